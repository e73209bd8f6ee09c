"""RoutingPlan of a top-k choice or of a routing mask."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import new_plan
from fp8moe_cutlass.ops._words import count, require_out_plan, shape_of
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.typing import Array

_op = operator("route")


def route(
    num_experts: int,
    *,
    topk_idx: Array | None = None,
    routing_map: Array | None = None,
    align: int = 1,
    capacity: int | None = None,
    out: RoutingPlan | None = None,
    workspace: Array | None = None,
) -> RoutingPlan:
    """The plan of topk_idx [T, S] (int32 or int64; -1: dropped), or of routing_map [T, E].

    A mask (bool, uint8, int32 or int64) stands for S = E slots, slot e being expert e; it needs
    `capacity`, the number of assignments to provide rows for (T*S otherwise). Assignments beyond it
    are dropped and counted in plan.status. align: 1, 16, 32 or 128.
    workspace: scratch in uint8, for arrays beside which it cannot be allocated here (CuPy, JAX).
    Ids outside [-1, E): ValueError on the CPU; dropped and counted on CUDA (plan.check()).
    """
    count("route", "num_experts", num_experts)
    count("route", "align", align)
    if capacity is not None:
        count("route", "capacity", capacity)
    fresh = out is None
    if (topk_idx is None) == (routing_map is None):
        raise ValueError("[route] exactly one of topk_idx and routing_map is needed")
    if routing_map is not None and capacity is None:
        raise ValueError("[route] a routing_map needs capacity; got None")
    name, given = ("routing_map", routing_map) if topk_idx is None else ("topk_idx", topk_idx)
    assert given is not None
    tokens, slots = shape_of("route", name, given, 2)
    sizes = (tokens, slots, num_experts, align, tokens * slots if capacity is None else capacity)
    if out is None:
        out = new_plan("route", given, sizes)
    else:
        require_out_plan("route", out, sizes)
    _op(topk_idx, routing_map, out, workspace, fresh=fresh)
    return out
