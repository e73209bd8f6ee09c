"""q = Q(w) by 128x128 tiles, and q_t, its exact transpose."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import given_fp8, new_fp8
from fp8moe_cutlass.ops._words import is_pow2, parts, refuse, shape_of
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, ScaleKind

_op = operator("quantize_weight")


class QuantizedWeight(NamedTuple):
    """What quantize_weight returns."""

    q: Fp8Tensor  # [E, N, K], block layout
    q_t: Fp8Tensor  # [E, K, N], the same codes and scales transposed


@overload
def quantize_weight(
    w: Array,
    *,
    transposed: Literal[True] = True,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    out: tuple[Fp8Tensor, Fp8Tensor] | None = None,
) -> QuantizedWeight: ...


@overload
def quantize_weight(
    w: Array,
    *,
    transposed: Literal[False, "only"],
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    out: Fp8Tensor | None = None,
) -> Fp8Tensor: ...


def quantize_weight(
    w: Array,
    *,
    transposed: bool | Literal["only"] = True,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    out: Any = None,
) -> Any:
    """Quantizes w [E, N, K] (float32, float16 or bfloat16) to E4M3, once for fprop and dgrad.

    transposed: True returns q and q_t, False q alone, "only" q_t alone.
    """
    fresh = out is None
    op = "quantize_weight"
    if not isinstance(transposed, bool | str) or transposed not in (True, False, "only"):
        refuse(op, "transposed", "True, False or 'only'", transposed)
    pow2 = is_pow2(op, scale)
    q = q_t = None
    if out is None:
        e, n, k = shape_of(op, "w", w, 3)
        if transposed != "only":
            q = new_fp8(op, w, (e, n, k), "block", "e4m3", pow2)
        if transposed:
            q_t = new_fp8(op, w, (e, k, n), "block", "e4m3", pow2)
    else:
        given = parts(op, out, "q", "q_t") if transposed is True else (out, out)
        if transposed != "only":
            q = given_fp8(op, given[0], "block", "e4m3", pow2)
        if transposed:
            q_t = given_fp8(op, given[1], "block", "e4m3", pow2)
    _op(w, q, q_t, scale, eps, fresh=fresh)
    if q is not None and q_t is not None:
        return QuantizedWeight(q, q_t)
    return q if q_t is None else q_t
