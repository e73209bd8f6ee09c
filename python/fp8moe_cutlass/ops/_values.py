"""Fp8Tensor and RoutingPlan as pytrees of torch's."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor


def _kind(t: Fp8Tensor) -> tuple[Any, ...]:
    return t.scale_layout, t.pow2, t.fp8_dtype


pytree.register_pytree_node(
    Fp8Tensor,
    lambda t: ([t.data, t.scale_inv], _kind(t)),
    # Unchecked: a pass over the tree may put something else than tensors in their place.
    lambda codes, kind: Fp8Tensor(*codes, *kind, check=False),
    serialized_type_name="fp8moe_cutlass.Fp8Tensor",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=lambda t: (
        [(pytree.GetAttrKey(name), getattr(t, name)) for name in ("data", "scale_inv")],
        _kind(t),
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
