"""Tensors, FP8 tensors and plans through save_for_backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor

Saved = Tensor | Fp8Tensor | RoutingPlan | tuple[Tensor, ...] | None


def save(ctx: Any, *items: Saved) -> None:
    """ctx.save_for_backward: of an Fp8Tensor its two tensors, of a plan its buffer, of a named
    tuple its members."""
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
    ctx.save_for_backward(*tensors)
    ctx.kinds = kinds


def load(ctx: Any) -> list[Any]:
    """The items given to `save`, in order."""
    tensors = list(ctx.saved_tensors)
    items: list[Saved] = []
    for kind in ctx.kinds:
        if not kind:
            items.append(None)
        elif kind[0] == "tensor":
            items.append(tensors.pop(0))
        elif kind[0] == "plan":
            items.append(RoutingPlan(tensors.pop(0), *kind[1:]))
        elif kind[0] == "tuple":
            items.append(kind[1](*(tensors.pop(0) for _ in range(kind[2]))))
        else:
            data, scale_inv = tensors.pop(0), tensors.pop(0)
            items.append(Fp8Tensor(data, scale_inv, *kind))
    return items
