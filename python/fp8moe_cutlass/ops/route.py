"""Plans: where each assignment lands once rows are grouped by expert."""

from __future__ import annotations

from typing import Any

from fp8moe_cutlass import _C
from fp8moe_cutlass.ops._words import count, require_out_plan, shape_of
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.typing import Array


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
    if type(num_experts) is not int or type(align) is not int:
        count("route", "num_experts", num_experts)
        count("route", "align", align)
    if capacity is None:
        if topk_idx is None and routing_map is not None:
            raise ValueError("[route] a routing_map needs capacity; got None")
        capacity = -1
    else:
        if type(capacity) is not int:
            count("route", "capacity", capacity)
        if capacity < 0:
            raise ValueError(f"[route] plan needs capacity >= 0; got {capacity}")
    plan: Any = (-1, -1, num_experts, align, capacity)
    if out is not None:
        plan = require_out_plan("route", out, plan)
    made: RoutingPlan = _C.route(topk_idx, routing_map, plan, workspace)
    return made


def plan_from_counts(
    tokens_per_expert: Array, *, capacity: int, align: int = 1, out: RoutingPlan | None = None
) -> RoutingPlan:
    """The plan of packed rows, tokens_per_expert [E] (int32 or int64) of each expert.

    It has T = capacity tokens of one slot: token i is the i-th packed row, -1 past their sum.
    """
    if type(capacity) is not int or type(align) is not int:
        count("plan_from_counts", "capacity", capacity)
        count("plan_from_counts", "align", align)
    plan: Any = (capacity, 1, -1, align, capacity)
    if out is not None:
        plan = require_out_plan("plan_from_counts", out, plan)
    made: RoutingPlan = _C.plan_from_counts(tokens_per_expert, plan)
    return made


def plan_from_row_id_map(
    row_id_map: Array,
    *,
    rows: int,
    slots: int | None = None,
    pad_offsets: Array | None = None,
    out: RoutingPlan | None = None,
) -> RoutingPlan:
    """The plan by which unpermute_unpad, its backward and permute_pad move `rows` rows.

    row_id_map [T, 2E+1] int32, of a mask: a token's n rows in columns [0, n), their experts in
      [E, E+n), n in the last one. pad_offsets [E] int64 is added to the rows of each expert.
    row_id_map [K*T] int32, of indices, with slots=K: element k*T + t is the row of slot k of token
      t, -1 where there is none.
    The plan has one slot per expert or index, and one expert, whose rows are all rows: experts are
    not needed to move rows, so the GEMMs take no such plan. Rows that the map does not name are
    padding, wherever they lie.
    A row at or past `rows`, a row named twice, an expert past E: ValueError on the CPU. CUDA drops
    the first and the last and counts them in plan.status; of tokens that share a row one has it.
    """
    op = "plan_from_row_id_map"
    count(op, "rows", rows)
    if slots is None:
        tokens, width = shape_of(op, "row_id_map", row_id_map, 2)
        slots = (width - 1) // 2
    else:
        count(op, "slots", slots)
        (cells,) = shape_of(op, "row_id_map", row_id_map, 1)
        if slots < 1 or cells % slots:
            raise ValueError(f"[{op}] row_id_map must have {slots} cells per token; got {cells}")
        tokens = cells // slots
    sizes: Any = (tokens, slots, 1, 1, rows)
    plan = sizes if out is None else require_out_plan(op, out, sizes)
    made: RoutingPlan = _C.plan_from_row_id_map(row_id_map, pad_offsets, plan)
    return made
