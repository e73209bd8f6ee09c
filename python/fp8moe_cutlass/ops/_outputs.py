"""Arrays beside an input: what _C asks for where it cannot allocate, views, and workspaces."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe_cutlass import _C
from fp8moe_cutlass.typing import Array

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = None  # type: ignore[assignment]

TORCH_DTYPES: dict[str, Any] = {}  # of the parts of packed rows
if torch is not None:
    TORCH_DTYPES = {
        "float32": torch.float32,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }


def empty(op: str, like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """An uninitialized array of NumPy's, as `like` is; _C allocates torch's by itself."""
    if not isinstance(like, np.ndarray):
        raise ValueError(
            f"[{op}] allocates outputs for torch and NumPy only; give out= for {type(like)}"
        )
    if dtype == "bfloat16":
        raise ValueError(f"[{op}] NumPy has no bfloat16; ask for 'float32'")
    return np.empty(shape, "uint8" if dtype in ("e4m3", "e5m2") else dtype)


def zero_workspace(like: Array) -> Array | None:
    """Makes the counters of running operators, zeros on the device of `like`; None on the CPU.

    uint8, zero before a call and zero after it. One serves every operator with `workspace=`, in
    calls that follow one another on a stream. Calls that may run at the same time need one each.
    """
    if torch is None or not isinstance(like, torch.Tensor) or not like.is_cuda:
        return None
    zeros: Array = torch.zeros(_C.ZERO_WORKSPACE_BYTES, dtype=torch.uint8, device=like.device)
    return zeros
