"""Weights that the ranks of a group hold in parts: DTensors, of which a rank multiplies its own,
and averages of their gradients.

Duck-typed: to import DTensor takes half a second, and most layers never meet one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


def local(weight: Any) -> Tensor:
    """This rank's part of a DTensor. Its gradient is this rank's part of the DTensor's."""
    mine: Tensor = _Local.apply(weight)  # type: ignore[no-untyped-call]
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
