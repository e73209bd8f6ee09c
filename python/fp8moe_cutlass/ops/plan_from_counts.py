"""RoutingPlan of rows that arrive grouped by expert."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import new_plan
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.typing import Array

_op = operator("plan_from_counts")


def plan_from_counts(
    tokens_per_expert: Array, *, capacity: int, align: int = 1, out: RoutingPlan | None = None
) -> RoutingPlan:
    """The plan of tokens_per_expert [E] (int32 or int64) packed rows an expert.

    It has T = capacity tokens of one slot: token i is the i-th packed row, -1 past their sum.
    """
    fresh = out is None
    if len(tokens_per_expert.shape) != 1:
        raise ValueError(
            "[plan_from_counts] tokens_per_expert must have 1 dimension; "
            f"got {tuple(tokens_per_expert.shape)}"
        )
    sizes = (capacity, 1, tokens_per_expert.shape[0], align, capacity)
    if out is None:
        out = new_plan("plan_from_counts", tokens_per_expert, sizes)
    elif out.sizes != sizes:
        raise ValueError(f"[plan_from_counts] out must be a plan of {sizes}; got {out.sizes}")
    _op(tokens_per_expert, out, fresh=fresh)
    return out
