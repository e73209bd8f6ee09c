"""Quantization, its inverse, and counts of what it lost."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

from fp8moe_cutlass import _C
from fp8moe_cutlass.arrays import FLOATS, dtype_name
from fp8moe_cutlass.ops._words import (
    FORMATS,
    FP8_TENSOR,
    given_fp8,
    is_pow2,
    parts,
    refuse,
)
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import LAYOUTS, Fp8Tensor
from fp8moe_cutlass.typing import Array, DType, ScaleKind, ScaleLayout

SHIFTS = 17
COUNTS = 4 + SHIFTS  # words: live, underflowed, moved, flushed, and the histogram of shifts


def quantize(
    x: Array,
    *,
    fp8_dtype: DType = "e4m3",
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    scale_layout: ScaleLayout = "row",
    out: Fp8Tensor | None = None,
) -> Fp8Tensor:
    """Quantizes x [M, K] (float32, float16 or bfloat16; K a multiple of 16) by tiles of 1x128.

    A tile's scale maps max(a, eps), a its largest magnitude, to the largest FP8 value L. scale:
    "pow2" multiplies by L / a rounded down to a power of two, "fp32" by L / a, "amax" divides by
    a / L, and "approx" is SGLang's rule (docs/reference/numerics.md). scale_layout: "row" or
    "gemm".
    """
    if not isinstance(fp8_dtype, str) or fp8_dtype not in FORMATS:
        fp8_dtype = dtype_name("quantize", "fp8_dtype", fp8_dtype, *FORMATS)
    if not isinstance(scale_layout, str) or scale_layout not in LAYOUTS:
        refuse("quantize", "scale_layout", "'row', 'gemm' or 'block'", scale_layout)
    q: Any = (scale_layout, fp8_dtype)
    if out is not None:
        q = given_fp8("quantize", out, scale_layout, fp8_dtype, is_pow2("quantize", scale))
    made: Fp8Tensor = _C.quantize(x, q, scale, eps)
    return made


class QuantizedWeight(NamedTuple):
    """A weight's codes as fprop reads them, and as dgrad does."""

    q: Fp8Tensor  # [E, N, K], block layout
    q_t: Fp8Tensor  # [E, K, N], the same codes and scales transposed


@overload
def quantize_weight(
    w: Array,
    *,
    below: Array | None = None,
    transposed: Literal[True] = True,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    out: tuple[Fp8Tensor, Fp8Tensor] | None = None,
) -> QuantizedWeight: ...


@overload
def quantize_weight(
    w: Array,
    *,
    below: Array | None = None,
    transposed: Literal[False, "only"],
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    out: Fp8Tensor | None = None,
) -> Fp8Tensor: ...


def quantize_weight(
    w: Array,
    *,
    below: Array | None = None,
    transposed: bool | Literal["only"] = True,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    out: Any = None,
) -> Any:
    """Quantizes w [E, N, K] (float32, float16 or bfloat16) to E4M3, once for fprop and dgrad.

    below [E, M, K], of w's dtype: each expert's rows are w's, of which there are a multiple of 128,
    and then those of `below`: the codes are [E, N + M, K], as of one tensor, without a copy.
    transposed: True returns q and q_t, False q alone, "only" q_t alone.
    """
    op = "quantize_weight"
    if not isinstance(transposed, bool | str) or transposed not in (True, False, "only"):
        refuse(op, "transposed", "True, False or 'only'", transposed)
    q: Any = None if transposed == "only" else "block"
    q_t: Any = "block" if transposed else None
    if out is not None:
        given = parts(op, out, "q", "q_t") if transposed is True else (out, out)
        of: Any = ("block", "e4m3", is_pow2(op, scale))
        q = q and given_fp8(op, given[0], *of)
        q_t = q_t and given_fp8(op, given[1], *of)
    q, q_t = _C.quantize_weight(w, below, q, q_t, scale, eps)
    if q is not None and q_t is not None:
        return QuantizedWeight(q, q_t)
    return q if q_t is None else q_t


def turn_weight(q: Fp8Tensor, *, out: Fp8Tensor | None = None) -> Fp8Tensor:
    """The codes and scales of q [E, N, K] (E4M3, block layout) transposed: [E, K, N].

    Exact under any scales, because 128x128 tiles transpose onto themselves: what quantize_weight
    writes as q_t, from q alone, for weights that come as FP8.
    """
    if not isinstance(q, Fp8Tensor):
        refuse("turn_weight", "q", FP8_TENSOR, q)
    q_t: Any = "block"
    if out is not None:
        q_t = given_fp8("turn_weight", out, "block", "e4m3", q.pow2)
    made: Fp8Tensor = _C.turn_weight(q, q_t)
    return made


def dequantize(q: Fp8Tensor, *, dtype: DType = "bfloat16", out: Array | None = None) -> Array:
    """The values of q [M, K] or [E, M, K], rounded once to float32, float16 or bfloat16."""
    if not isinstance(dtype, str) or dtype not in FLOATS:
        dtype = dtype_name("dequantize", "dtype", dtype, *FLOATS)
    x: Array = _C.dequantize(q, dtype if out is None else out)
    return x


def count_codes(
    q: Fp8Tensor,
    plan: RoutingPlan,
    counts: Array,
    *,
    columns: Fp8Tensor | None = None,
    stride: int = 1,
) -> None:
    """Adds to counts [21] int64 what rows 0, stride, 2 stride, ... of q hold. q [T, C] in "row"
    layout, or [R, C] in "gemm" layout, of which rows without an assignment are left out.

    counts[0]: codes in live tiles, 1x128 tiles that hold a nonzero code. counts[1]: those of them
    that are 0. With `columns`, what permute_transpose_fp8 made of q (of which the scales alone are
    read), and counting a row once for every kept assignment: counts[2]: nonzero codes; counts[3]:
    those of them that the shift makes 0; counts[4 + k]: live tiles by their shift k (k <= 0 in 4,
    k >= 16 in 20; where each channel has its own, the largest). Shifts need power-of-two scales.
    """
    for name, codes in (("q", q), ("columns", q if columns is None else columns)):
        if not isinstance(codes, Fp8Tensor):
            refuse("count_codes", name, FP8_TENSOR, codes)
    if columns is not None and not (q.pow2 and columns.pow2):
        raise ValueError("[count_codes] columns need power-of-two scales; got pow2=False")
    _C.count_codes(q, plan, columns, stride, counts)
