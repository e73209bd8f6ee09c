"""What a backward reads, through save_for_backward: any pytree, FP8 tensors and plans in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fp8moe_cutlass.autograd.dense import dense
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor


def save(ctx: Any, tree: Any) -> None:
    """ctx.save_for_backward of the tree's tensors; what else is in it is kept beside them."""
    leaves, ctx.spec = pytree.tree_flatten(tree)
    ctx.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    ctx.save_for_backward(*(leaf if isinstance(leaf, Tensor) else None for leaf in leaves))


def load(ctx: Any) -> Any:
    """The tree given to `save`; dense, wherever a saved-tensor hook has put its tensors."""
    leaves = [
        other if tensor is None else dense(tensor)
        for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
    ]
    return pytree.tree_unflatten(leaves, ctx.spec)


def tensors_of(tree: Any) -> list[Tensor]:
    """Its tensors, those of FP8 tensors and plans among them."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _fp8_tensor(codes: Iterable[Any], kind: Any) -> Any:
    # Where a pass over the tree has put something else than tensors, there is nothing to check.
    codes = tuple(codes)
    if all(isinstance(t, Tensor) for t in codes):
        return Fp8Tensor(*codes, *kind)
    made = object.__new__(Fp8Tensor)
    made.__dict__.update(zip(("data", "scale_inv", *_KIND), (*codes, *kind), strict=True))
    return made


_KIND = ("scale_layout", "pow2", "fp8_dtype")

pytree.register_pytree_node(
    Fp8Tensor,
    lambda t: ([t.data, t.scale_inv], tuple(getattr(t, name) for name in _KIND)),
    _fp8_tensor,
    serialized_type_name="fp8moe_cutlass.Fp8Tensor",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=lambda t: (
        [(pytree.GetAttrKey(name), getattr(t, name)) for name in ("data", "scale_inv")],
        tuple(getattr(t, name) for name in _KIND),
    ),
)
pytree.register_pytree_node(
    RoutingPlan,
    lambda plan: ([plan.buffer], plan.sizes),
    lambda buffer, sizes: RoutingPlan(*buffer, *sizes),
    serialized_type_name="fp8moe_cutlass.RoutingPlan",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=lambda plan: (
        [(pytree.GetAttrKey("buffer"), plan.buffer)],
        plan.sizes,
    ),
)
