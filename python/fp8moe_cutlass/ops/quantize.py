"""q, s = Q(x): one scale per tile of 1x128."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import given_fp8, new_fp8
from fp8moe_cutlass.ops._words import is_pow2, shape_of
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, DType, ScaleKind, ScaleLayout

_op = operator("quantize")


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
    "pow2" multiplies by L / a rounded down to a power of two, "fp32" by L / a, and "amax" divides
    by a / L (docs/reference/numerics.md). scale_layout: "row" or "gemm".
    """
    fresh = out is None
    pow2 = is_pow2("quantize", scale)
    if out is None:
        out = new_fp8("quantize", x, shape_of("quantize", "x", x, 2), scale_layout, fp8_dtype, pow2)
    else:
        given_fp8("quantize", out, scale_layout, fp8_dtype, pow2)
    _op(x, out, scale, eps, fresh=fresh)
    return out
