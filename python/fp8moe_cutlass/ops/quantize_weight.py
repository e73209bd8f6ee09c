"""q = Q(w) by 128x128 tiles, and q_t, its exact transpose."""

from __future__ import annotations

from fp8moe_cutlass.ops._library import define, flat_in, fp8_output, is_pow2
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, DType, ScaleKind

_op = define(
    "quantize_weight(Tensor w, Tensor(a!)? q, Tensor(b!)? q_scale, "
    "Tensor(c!)? q_t, Tensor(d!)? q_t_scale, bool pow2, float eps, int interleave)"
)


def quantize_weight(
    w: Array,
    *,
    interleave: int = 0,
    fp8_dtype: DType = "e4m3",
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    out: tuple[Fp8Tensor, Fp8Tensor] | None = None,
) -> tuple[Fp8Tensor, Fp8Tensor]:
    """Quantizes w [E, N, K] (float32, float16 or bfloat16) once for fprop and dgrad.

    Returns q [E, N, K] and q_t [E, K, N] with the same codes and scales transposed.
    interleave g > 0 stores the rows of q as g of the first half (gate), g of the second (up), and
    so on (N % 256 == 0 and 128 % g == 0); scales and q_t keep the order of w.
    """
    pow2 = is_pow2("quantize_weight", scale)
    e, n, k = w.shape
    given = out or (None, None)
    q = fp8_output("quantize_weight", given[0], w, (e, n, k), "block", fp8_dtype, pow2, interleave)
    q_t = fp8_output("quantize_weight", given[1], w, (e, k, n), "block", fp8_dtype, pow2)
    op = "quantize_weight"
    _op(w, *flat_in(op, "q", q, "block"), *flat_in(op, "q_t", q_t, "block"), pow2, eps, interleave)
    return q, q_t
