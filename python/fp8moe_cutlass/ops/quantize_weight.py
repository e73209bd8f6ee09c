"""q = Q(w) by 128x128 tiles, and q_t, its exact transpose."""

from __future__ import annotations

from typing import Any, Literal, overload

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import given_fp8, new_fp8
from fp8moe_cutlass.ops._words import is_pow2, shape_of
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, ScaleKind

_op = operator("quantize_weight")


@overload
def quantize_weight(
    w: Array,
    *,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    only: None = None,
    out: tuple[Fp8Tensor, Fp8Tensor] | None = None,
) -> tuple[Fp8Tensor, Fp8Tensor]: ...


@overload
def quantize_weight(
    w: Array,
    *,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    only: Literal["rows", "transpose"],
    out: Fp8Tensor | None = None,
) -> Fp8Tensor: ...


def quantize_weight(
    w: Array,
    *,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    only: Literal["rows", "transpose"] | None = None,
    out: Any = None,
) -> Any:
    """Quantizes w [E, N, K] (float32, float16 or bfloat16) to E4M3, once for fprop and dgrad.

    Returns q [E, N, K] and q_t [E, K, N] with the same codes and scales transposed; with `only`
    "rows" q alone, with "transpose" q_t alone.
    """
    fresh = out is None
    op = "quantize_weight"
    if only not in (None, "rows", "transpose"):
        raise ValueError(f"[{op}] only must be None, 'rows' or 'transpose'; got {only!r}")
    pow2 = is_pow2(op, scale)
    rows = transpose = None
    if out is None:
        e, n, k = shape_of(op, "w", w, 3)
        if only != "transpose":
            rows = new_fp8(op, w, (e, n, k), "block", "e4m3", pow2)
        if only != "rows":
            transpose = new_fp8(op, w, (e, k, n), "block", "e4m3", pow2)
    else:
        given = (out, out) if only else out
        if only != "transpose":
            rows = given_fp8(op, given[0], "block", "e4m3", pow2)
        if only != "rows":
            transpose = given_fp8(op, given[1], "block", "e4m3", pow2)
    _op(w, rows, transpose, pow2, eps, fresh=fresh)
    return {None: (rows, transpose), "rows": rows, "transpose": transpose}[only]
