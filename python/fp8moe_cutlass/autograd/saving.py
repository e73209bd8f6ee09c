"""Tensors and FP8 tensors through save_for_backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8moe_cutlass.tensor import Fp8Tensor

Saved = Tensor | Fp8Tensor | None


def save(ctx: Any, *items: Saved) -> None:
    """ctx.save_for_backward of the items; an Fp8Tensor is saved as its two tensors."""
    tensors: list[Tensor] = []
    kinds: list[tuple[Any, ...]] = []
    for item in items:
        if item is None:
            kinds.append(())
        elif isinstance(item, Fp8Tensor):
            tensors += [item.data, item.scale_inv]
            kinds.append((item.block, item.scale_layout, item.pow2, item.interleave))
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
        elif kind == ("tensor",):
            items.append(tensors.pop(0))
        else:
            data, scale_inv = tensors.pop(0), tensors.pop(0)
            items.append(Fp8Tensor(data, scale_inv, *kind))
    return items
