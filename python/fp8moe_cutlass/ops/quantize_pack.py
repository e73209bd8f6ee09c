"""Rows of the wire: tokens quantized and written once to each rank they travel to."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import empty
from fp8moe_cutlass.ops._words import count, dtype_name, refuse, shape_of
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import cdiv
from fp8moe_cutlass.typing import Array, DType, ScaleKind

_op = operator("quantize_pack")


def packed_row_bytes(hidden: int, slots: int) -> int:
    """Bytes of a row: codes, float32 scales, int32 ids, float32 probs, up to a multiple of 16.

    slots 0: a gradient, codes and scales alone. docs/reference/layouts.md has the picture.
    """
    count("packed_row_bytes", "hidden", hidden)
    count("packed_row_bytes", "slots", slots)
    return cdiv(hidden + 4 * cdiv(hidden, 128) + 8 * slots, 16) * 16


def quantize_pack(
    x: Array,
    plan: RoutingPlan,
    topk_idx: Array | None = None,
    probs: Array | None = None,
    *,
    num_experts: int | None = None,
    fp8_dtype: DType = "e4m3",
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    out: Array | None = None,
) -> Array:
    """packed[row_of[t, r]] = Q(x[t]) by 1x128 tiles, and which experts of rank r it goes to.

    x [T, H] (float32, float16 or bfloat16; H a multiple of 16) is read and quantized once; plan is
    dispatch_plan's. topk_idx [T, S] (int32 or int64) and probs [T, S] float32, both or neither
    (a gradient): a row carries, for each slot, the expert counted from the first of its rank and
    the prob; -1 and 0 where the expert lives elsewhere. num_experts: of all ranks, with topk_idx.
    Rows of a segment without a token have ids -1 and are unspecified else.
    Returns uint8 [plan.rows, packed_row_bytes(H, S)]; `ops.unpack` reads it.
    """
    if out is None and not isinstance(plan, RoutingPlan):
        refuse("quantize_pack", "plan", "a RoutingPlan", plan)
    fresh = out is None
    if topk_idx is not None and num_experts is None:
        raise ValueError("[quantize_pack] topk_idx needs num_experts; got None")
    if num_experts is not None:
        count("quantize_pack", "num_experts", num_experts)
    format = dtype_name("quantize_pack", "fp8_dtype", fp8_dtype, "e4m3", "e5m2")
    if out is None:
        hidden = shape_of("quantize_pack", "x", x, 2)[1]
        slots = 0 if topk_idx is None else shape_of("quantize_pack", "topk_idx", topk_idx, 2)[1]
        shape = (plan.rows, packed_row_bytes(hidden, slots))
        out = empty("quantize_pack", x, shape, "uint8")
    _op(x, topk_idx, probs, num_experts or 0, plan, out, format, scale, eps, fresh=fresh)
    return out
