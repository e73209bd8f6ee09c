"""Parameters that are DTensors: fully_shard has split them over ranks, and in a forward they are
whole; or shard_experts has, and a rank multiplies its part (distributed/shards.py).

Duck-typed: to import DTensor takes half a second, and most layers never meet one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass.distributed.shards import held


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


def take_share(state: dict[str, Any], name: str, weight: Any, experts: range) -> None:
    """state[name], where it is a whole plain tensor [E, ...], as a DTensor like `weight`."""
    whole = state.get(name)
    if isinstance(whole, Tensor) and not is_sharded(whole) and whole.shape == weight.shape:
        part = whole[experts.start : experts.stop].to(held(weight).device, copy=True)
        state[name] = type(weight.data).from_local(
            part, weight.device_mesh, weight.placements, run_check=False
        )
