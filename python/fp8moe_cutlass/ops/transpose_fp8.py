"""Rows into columns without leaving FP8: one scale a tile, codes shifted onto it."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import given_fp8, new_fp8
from fp8moe_cutlass.ops._words import (
    FP8_TENSOR,
    column_layout,
    flag,
    is_pow2,
    refuse,
    shape_of,
)
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Columns, ScaleKind

_op = operator("transpose_fp8")


def transpose_fp8(
    q: Fp8Tensor,
    plan: RoutingPlan,
    *,
    columns: Columns = "block",
    requantize: bool = False,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    out: Fp8Tensor | None = None,
) -> Fp8Tensor:
    """The rows q [R, C] (1x128 scales) as a transposed operand [C, Kcap], tokens contiguous.

    Each tile (128x128 for columns="block", 1x128 along tokens for "column") gets one power-of-two
    scale and codes RNE(code * 2^-k), exact where nothing underflows
    (docs/reference/numerics.md). That needs power-of-two scales: q.pow2=False is a ValueError.
    requantize=True dequantizes and quantizes again by `scale` and `eps` instead: a second rounding,
    any scales.
    A scale that is no power of two after all: ValueError on the CPU; CUDA counts it in plan.status.
    """
    if not isinstance(q, Fp8Tensor):
        refuse("transpose_fp8", "q", FP8_TENSOR, q)
    if out is None and not isinstance(plan, RoutingPlan):
        refuse("transpose_fp8", "plan", "a RoutingPlan", plan)
    fresh = out is None
    pow2 = is_pow2("transpose_fp8", scale)
    flag("transpose_fp8", "requantize", requantize)
    if not requantize and not (q.pow2 and pow2):
        raise ValueError(
            "[transpose_fp8] shifts codes by powers of two, so q must have pow2 scales and scale "
            f"be 'pow2'; got pow2={q.pow2}, scale={scale!r} (requantize=True rounds a second time)"
        )
    layout = column_layout("transpose_fp8", columns)
    if out is None:
        shape = (shape_of("transpose_fp8", "q", q.data, 2)[1], plan.columns)
        out = new_fp8("transpose_fp8", q.data, shape, layout, q.fp8_dtype, pow2)
    else:
        given_fp8("transpose_fp8", out, layout, q.fp8_dtype, pow2)
    _op(q, plan, out, requantize, scale, eps, fresh=fresh)
    return out
