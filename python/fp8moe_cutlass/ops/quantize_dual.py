"""Rows and columns of Q(x) in one pass over x."""

from __future__ import annotations

from fp8moe_cutlass.ops._library import (
    PLAN,
    column_layout,
    define,
    given_fp8,
    is_pow2,
    new_fp8,
    shape_of,
)
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, Columns, DType, ScaleKind, ScaleLayout

_op = define(
    f"quantize_dual(Tensor x, Tensor plan, {PLAN}, "
    "Tensor(a!) rows, Tensor(b!) rows_scale, str rows_layout, "
    "Tensor(c!) columns, Tensor(d!) columns_scale, str columns_layout, bool pow2, float eps)"
)


def quantize_dual(
    x: Array,
    plan: RoutingPlan,
    *,
    columns: Columns = "block",
    fp8_dtype: DType = "e4m3",
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    scale_layout: ScaleLayout = "gemm",
    out: tuple[Fp8Tensor, Fp8Tensor] | None = None,
) -> tuple[Fp8Tensor, Fp8Tensor]:
    """Quantizes x [R, C] (grouped by `plan`) by rows and, transposed, by columns.

    Returns the rows [R, C] by 1x128 tiles in `scale_layout` ("gemm" or "row") and the columns
    [C, Kcap] by 128x128 tiles (columns="block") or 1x128 tiles along tokens ("column"). Both are
    single quantizations of x; an expert's tiles see its own rows only.
    """
    pow2 = is_pow2("quantize_dual", scale)
    layout = column_layout("quantize_dual", columns)
    if out is None:
        r, c = shape_of("quantize_dual", "x", x, 2)
        rows = new_fp8("quantize_dual", x, (r, c), scale_layout, fp8_dtype, pow2)
        cols = new_fp8("quantize_dual", x, (c, plan.columns), layout, fp8_dtype, pow2)
    else:
        rows = given_fp8("quantize_dual", out[0], scale_layout, fp8_dtype, pow2)
        cols = given_fp8("quantize_dual", out[1], layout, fp8_dtype, pow2)
    _op(x, plan, rows, cols, pow2, eps)
    return rows, cols
