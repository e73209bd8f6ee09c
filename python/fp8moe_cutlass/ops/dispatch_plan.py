"""The plan by which tokens travel to the ranks of their experts."""

from __future__ import annotations

from typing import NamedTuple

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import empty, new_plan
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
    out: tuple[RoutingPlan, Array] | None = None,
) -> Dispatch:
    """The plan of topk_idx [T, S] (int32 or int64; -1: none) over ranks of num_experts / ranks.

    Slot r of the plan is rank r (slots == experts == ranks): a token has one row for a rank however
    many of its experts live there; row_of [T, ranks], -1 where none does. Rows are rank-major, in
    token order. segment 0: rank after rank, T min(S, ranks) rows at most. segment > 0: rank r owns
    rows [r segment, (r+1) segment), padding (-1) after its tokens; tokens past it are dropped and
    counted in plan.status. Ids outside [-1, num_experts): ValueError on the CPU; dropped and
    counted on CUDA.
    """
    fresh = out is None
    if len(topk_idx.shape) != 2:
        raise ValueError(
            f"[dispatch_plan] topk_idx must have 2 dimensions; got {tuple(topk_idx.shape)}"
        )
    if ranks < 1 or num_experts % ranks != 0:
        raise ValueError(
            "[dispatch_plan] num_experts must be a multiple of ranks; "
            f"got {num_experts} and {ranks}"
        )
    tokens, slots = topk_idx.shape
    capacity = segment * ranks if segment else tokens * min(slots, ranks)
    sizes = (tokens, ranks, ranks, 1, capacity)
    if out is None:
        plan = new_plan("dispatch_plan", topk_idx, sizes)
        out = plan, empty("dispatch_plan", topk_idx, (ranks, 2), "int32")
    elif out[0].sizes != sizes:
        raise ValueError(f"[dispatch_plan] out must hold a plan of {sizes}; got {out[0].sizes}")
    _op(topk_idx, num_experts, segment, out[0], out[1], None, fresh=fresh)
    return Dispatch(*out)
