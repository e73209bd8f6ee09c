"""What a backward reads, through save_for_backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor


def save(ctx: Any, *groups: Any) -> None:
    """ctx.save_for_backward of named tuples, or None: of an FP8 tensor in them its two tensors, of
    a plan its buffer. What is no tensor is kept beside them.

    By hand: torch's pytree takes 30 us of a step's host time for the same.
    """
    tensors: list[Tensor | None] = []
    kinds: list[tuple[Any, ...]] = []
    for group in groups:
        for item in group or ():
            if item is None or isinstance(item, Tensor):
                tensors.append(item)
                kinds.append((None,))
            elif isinstance(item, Fp8Tensor):
                tensors += (item.data, item.scale_inv)
                kinds.append((Fp8Tensor, item.scale_layout, item.pow2, item.fp8_dtype))
            elif isinstance(item, RoutingPlan):
                tensors.append(item.buffer)
                kinds.append((RoutingPlan, *item.sizes))
            else:
                kinds.append((_Other, item))
    ctx.kinds, ctx.groups = kinds, [None if group is None else type(group) for group in groups]
    ctx.save_for_backward(*tensors)


def load(ctx: Any) -> list[Any]:
    """What was given to `save`; dense, wherever a saved-tensor hook has put its tensors."""
    tensors = [None if t is None else t.contiguous() for t in ctx.saved_tensors]
    items: list[Any] = []
    at = 0
    for of, *kind in ctx.kinds:
        if of is _Other:
            items += kind
            continue
        if of is None:
            items.append(tensors[at])
        elif of is Fp8Tensor:
            items.append(Fp8Tensor(tensors[at], tensors[at + 1], *kind, check=False))
            at += 1
        else:
            items.append(RoutingPlan(tensors[at], *kind))
        at += 1
    groups: list[Any] = []
    for group in ctx.groups:
        count = 0 if group is None else len(group._fields)
        groups.append(None if group is None else group(*items[:count]))
        items = items[count:]
    return groups


class _Other:
    """What save_for_backward does not take."""


def tensors_of(tree: Any) -> list[Tensor]:
    """Its tensors, those of FP8 tensors and plans among them."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
