"""RoutingPlan of rows that arrive grouped by expert."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import new_plan
from fp8moe_cutlass.ops._words import count, require_out_plan, shape_of
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.typing import Array

_op = operator("plan_from_counts")


def plan_from_counts(
    tokens_per_expert: Array, *, capacity: int, align: int = 1, out: RoutingPlan | None = None
) -> RoutingPlan:
    """The plan of tokens_per_expert [E] (int32 or int64) packed rows an expert.

    It has T = capacity tokens of one slot: token i is the i-th packed row, -1 past their sum.
    """
    count("plan_from_counts", "capacity", capacity)
    count("plan_from_counts", "align", align)
    fresh = out is None
    (experts,) = shape_of("plan_from_counts", "tokens_per_expert", tokens_per_expert, 1)
    sizes = (capacity, 1, experts, align, capacity)
    if out is None:
        out = new_plan("plan_from_counts", tokens_per_expert, sizes)
    else:
        require_out_plan("plan_from_counts", out, sizes)
    _op(tokens_per_expert, out, fresh=fresh)
    return out
