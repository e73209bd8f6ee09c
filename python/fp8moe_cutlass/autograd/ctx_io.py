"""Tensors, FP8 tensors and plans through save_for_backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fp8moe_cutlass.autograd.dense import dense
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor

Saved = Tensor | Fp8Tensor | RoutingPlan | tuple[Tensor, ...] | None
Kinds = tuple[tuple[Any, ...], ...]


def save(ctx: Any, *items: Saved) -> None:
    """ctx.save_for_backward: of an Fp8Tensor its two tensors, of a plan its buffer, of a named
    tuple its members."""
    tensors, ctx.kinds = flatten(items)
    ctx.save_for_backward(*tensors)


def load(ctx: Any) -> list[Any]:
    """The items given to `save`, in order; dense, wherever a saved-tensor hook has put them."""
    return unflatten([dense(t) for t in ctx.saved_tensors], ctx.kinds)


def flatten(items: Iterable[Saved]) -> tuple[list[Tensor], Kinds]:
    """The tensors of the items, and what `unflatten` makes of them."""
    tensors: list[Tensor] = []
    kinds: list[tuple[Any, ...]] = []
    for item in items:
        if item is None:
            kinds.append(())
        elif isinstance(item, Fp8Tensor):
            tensors += [item.data, item.scale_inv]
            kinds.append((item.scale_layout, item.pow2, item.fp8_dtype))
        elif isinstance(item, RoutingPlan):
            tensors.append(item.buffer)
            kinds.append(("plan", *item.sizes))
        elif isinstance(item, tuple):
            tensors += item
            kinds.append(("tuple", type(item), len(item)))
        else:
            tensors.append(item)
            kinds.append(("tensor",))
    return tensors, tuple(kinds)


def unflatten(tensors: Iterable[Tensor], kinds: Kinds) -> list[Any]:
    """The items given to `flatten`."""
    left = list(tensors)
    items: list[Saved] = []
    for kind in kinds:
        if not kind:
            items.append(None)
        elif kind[0] == "tensor":
            items.append(left.pop(0))
        elif kind[0] == "plan":
            items.append(RoutingPlan(left.pop(0), *kind[1:]))
        elif kind[0] == "tuple":
            items.append(kind[1](*(left.pop(0) for _ in range(kind[2]))))
        else:
            data, scale_inv = left.pop(0), left.pop(0)
            items.append(Fp8Tensor(data, scale_inv, *kind))
    return items
