"""q, s = Q(x): one scale per tile of 1x128."""

from __future__ import annotations

from fp8moe_cutlass.ops._library import define, given_fp8, is_pow2, new_fp8, shape_of
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, DType, ScaleKind, ScaleLayout

_op = define(
    "quantize(Tensor x, Tensor(a!) q, Tensor(b!) q_scale, str q_layout, bool pow2, float eps)"
)


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

    A tile with largest magnitude a has the scale (docs/reference/numerics.md) that maps max(a, eps)
    to the largest FP8 value, rounded to a power of two for scale="pow2". scale_layout: "row" or
    "gemm".
    """
    pow2 = is_pow2("quantize", scale)
    if out is None:
        out = new_fp8("quantize", x, shape_of("quantize", "x", x, 2), scale_layout, fp8_dtype, pow2)
    else:
        given_fp8("quantize", out, scale_layout, fp8_dtype, pow2)
    _op(x, out, pow2, eps)
    return out
