"""RoutingPlan of rows that another library has permuted, by TransformerEngine's row_id_map."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import new_plan
from fp8moe_cutlass.ops._words import count, require_out_plan, shape_of
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.typing import Array

_op = operator("plan_from_row_id_map")


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
    fresh = out is None
    if slots is None:
        tokens, width = shape_of(op, "row_id_map", row_id_map, 2)
        slots = (width - 1) // 2
    else:
        count(op, "slots", slots)
        (cells,) = shape_of(op, "row_id_map", row_id_map, 1)
        if slots < 1 or cells % slots:
            raise ValueError(f"[{op}] row_id_map must have {slots} cells per token; got {cells}")
        tokens = cells // slots
    sizes = (tokens, slots, 1, 1, rows)
    if out is None:
        out = new_plan(op, row_id_map, sizes)
    else:
        require_out_plan(op, out, sizes)
    _op(row_id_map, pad_offsets, out, fresh=fresh)
    return out
