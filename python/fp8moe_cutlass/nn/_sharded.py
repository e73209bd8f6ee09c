"""Parameters that torch's fully_shard has split over ranks (DTensors); in a forward they are whole.

Duck-typed: to import DTensor takes half a second, and most layers never meet one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def is_sharded(t: Any) -> bool:
    """Whether t is a DTensor."""
    return hasattr(t, "full_tensor")


def whole(t: Any) -> Tensor:
    """All of t; collective where it is sharded."""
    gathered: Tensor = t.full_tensor() if is_sharded(t) else t
    return gathered


@contextmanager
def writable(t: Any) -> Iterator[Tensor]:
    """t to write to by parts; where it is sharded, a tensor in its place whose values, the first
    rank's, are in the shards at the end."""
    if not is_sharded(t):
        yield t
        return
    from torch.distributed.tensor import distribute_tensor

    values = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    yield values
    t.copy_(distribute_tensor(values, t.device_mesh, t.placements))
