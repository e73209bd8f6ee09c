"""Every operator against an independent reference on this machine: what it promises, what it does.

`run(device)` yields a Check a contract. Movers, quantizers and transposes must agree in every bit;
SwiGLU within one code; the GEMMs within the bound of docs/reference/numerics.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .checks import CHECKS
from .compare import Check, Inputs

__all__ = ["Check", "run"]


def run(device: torch.device, seed: int = 0) -> Iterator[Check]:
    """All checks on `device`; an operator that raises is a failed check."""
    for check in CHECKS:
        try:
            yield from check(Inputs(device, seed))
        except Exception as error:  # the table must show the others too
            name = check.__name__.removeprefix("check_")
            yield Check(name, "raised", "runs", f"{type(error).__name__}: {error}", False)
