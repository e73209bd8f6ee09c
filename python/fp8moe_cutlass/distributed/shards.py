"""Weights that the ranks of a group hold in parts: DTensors, and averages of their gradients.

fully_shard splits parameters, and in a forward they are whole; of shard_experts' a rank multiplies
its part.

Duck-typed: to import DTensor takes half a second, and most layers never meet one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Average:
    """The average that data parallelism takes of replicated weights' gradients, of one that has
    summed over the tokens of several ranks: autograd.weight_grad's Average."""

    scale: float
    replicas: Any = None  # the process group whose ranks hold the same weights; None: one rank

    def sum_(self, grad: Tensor) -> None:
        """The sum of the replicas' gradients, in place. Collective."""
        dist.all_reduce(grad, group=self.replicas)

    def __deepcopy__(self, memo: dict[int, Any]) -> Average:
        return self


def held(weight: Any) -> Tensor:
    """This rank's part of a DTensor, without a gradient; another tensor is returned as it is."""
    if not hasattr(weight, "to_local"):
        tensor: Tensor = weight
        return tensor
    with torch.no_grad():
        mine: Tensor = weight.to_local()
    return mine


class _Local(torch.autograd.Function):
    """Not DTensor.to_local: its backward turns the None of a gradient in main_grad into zeros."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.stride = weight.shape, weight.stride()
        ctx.mesh, ctx.placements = weight.device_mesh, weight.placements
        mine: Tensor = weight.to_local()
        return mine.view_as(mine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            grad, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


# This rank's part of a DTensor. Its gradient is this rank's part of the DTensor's.
local: Callable[[Any], Tensor] = _Local.apply


def is_sharded(t: Any) -> bool:
    """Whether t is a DTensor."""
    return hasattr(t, "full_tensor")


def whole(t: Any) -> Tensor:
    """All of t; collective where it is sharded."""
    gathered: Tensor = t.full_tensor() if is_sharded(t) else t
    return gathered


def draw_share(mine: Tensor, bound: float, local: range, experts: int) -> None:
    """Fills mine [E, ...], of the experts `local`, uniformly within bound. All `experts` are drawn:
    ranks that start from the same random state hold parts of one layer."""
    other = torch.empty_like(mine[0])
    for e in range(experts):
        expert = mine[e - local.start] if e in local else other
        nn.init.uniform_(expert, -bound, bound)


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
