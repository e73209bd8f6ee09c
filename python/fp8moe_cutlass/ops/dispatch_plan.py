"""The plan by which tokens travel to the ranks of their experts."""

from __future__ import annotations

from typing import NamedTuple

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import empty, new_plan
from fp8moe_cutlass.ops._words import count, parts, require_out_plan, shape_of
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.typing import Array

_op = operator("dispatch_plan")


class Dispatch(NamedTuple):
    """What dispatch_plan returns."""

    plan: RoutingPlan  # a slot per rank
    counts: Array  # [ranks, 2] int32: rows with a token, and entries of topk_idx on them


def dispatch_plan(
    topk_idx: Array,
    num_experts: int,
    ranks: int,
    *,
    segment: int = 0,
    spare: int = 0,
    out: tuple[RoutingPlan, Array] | None = None,
    workspace: Array | None = None,
) -> Dispatch:
    """The plan of topk_idx [T, S] (int32 or int64; -1: none) over ranks of num_experts / ranks.

    Slot r of the plan is rank r (slots == experts == ranks): a token has one row for a rank however
    many of its experts live there; row_of [T, ranks], -1 where none does. Rows are rank-major, in
    token order. segment 0: rank after rank, T min(S, ranks) rows at most. segment > 0: rank r owns
    rows [r n, (r+1) n), n = segment + spare; tokens past the first `segment` are dropped and
    counted in plan.status, and rows after its tokens are padding (-1). Ids outside
    [-1, num_experts): ValueError on the CPU; dropped and counted on CUDA. workspace: scratch in
    uint8, as for `route`.
    """
    given = {"num_experts": num_experts, "ranks": ranks, "segment": segment, "spare": spare}
    for name, value in given.items():
        count("dispatch_plan", name, value)
    fresh = out is None
    if ranks < 1 or num_experts % ranks != 0:
        raise ValueError(
            "[dispatch_plan] num_experts must be a multiple of ranks; "
            f"got {num_experts} and {ranks}"
        )
    tokens, slots = shape_of("dispatch_plan", "topk_idx", topk_idx, 2)
    capacity = (segment + spare) * ranks if segment else tokens * min(slots, ranks)
    sizes = (tokens, ranks, ranks, 1, capacity)
    if out is None:
        plan = new_plan("dispatch_plan", topk_idx, sizes)
        out = plan, empty("dispatch_plan", topk_idx, (ranks, 2), "int32")
    else:
        parts("dispatch_plan", out, "plan", "counts")
        require_out_plan("dispatch_plan", out[0], sizes)
    _op(topk_idx, num_experts, segment, out[0], out[1], workspace, fresh=fresh)
    return Dispatch(*out)
