"""q, s = Q(x): one scale a tile."""

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
    block: tuple[int, int] = (1, 128),
    fp8_dtype: DType = "e4m3",
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    scale_layout: ScaleLayout | None = None,
    out: Fp8Tensor | None = None,
) -> Fp8Tensor:
    """Quantizes x [M, K] (float32, float16 or bfloat16; K a multiple of 16) by tiles.

    A tile of `block` (1x128 or 128x128) with largest magnitude a has the scale (docs/numerics.md)
    that maps max(a, eps) to the largest FP8 value, rounded to a power of two for scale="pow2".
    scale_layout: "row" (default) or "gemm" for 1x128; "block" for 128x128.
    """
    layout = scale_layout or ("row" if block == (1, 128) else "block")
    if block != ((128, 128) if layout == "block" else (1, 128)):
        raise ValueError(
            "[quantize] block must be (1, 128) for scale_layout 'row' and 'gemm', (128, 128) for "
            f"'block'; got {block} with {layout!r}"
        )
    pow2 = is_pow2("quantize", scale)
    if out is None:
        out = new_fp8("quantize", x, shape_of("quantize", "x", x, 2), layout, fp8_dtype, pow2)
    else:
        given_fp8("quantize", out, layout, fp8_dtype, pow2)
    _op(x, out, pow2, eps)
    return out
