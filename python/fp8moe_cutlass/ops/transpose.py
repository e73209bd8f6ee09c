"""Rows into token-transposed operands without leaving FP8: one scale per tile."""

from __future__ import annotations

from typing import Any

from fp8moe_cutlass import _C
from fp8moe_cutlass.ops._words import FP8_TENSOR, column_layout, given_fp8, is_pow2, refuse
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Columns, ScaleKind


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
    pow2 = is_pow2("transpose_fp8", scale)
    if requantize is not True and not (q.pow2 and pow2):
        raise ValueError(
            "[transpose_fp8] shifts codes by powers of two, so q must have pow2 scales and scale "
            f"be 'pow2'; got pow2={q.pow2}, scale={scale!r} (requantize=True rounds a second time)"
        )
    layout: Any = column_layout("transpose_fp8", columns)
    if out is not None:
        layout = given_fp8("transpose_fp8", out, layout, q.fp8_dtype, pow2)
    made: Fp8Tensor = _C.transpose_fp8(q, plan, layout, requantize, scale, eps)
    return made


def permute_transpose_fp8(
    q: Fp8Tensor, plan: RoutingPlan, *, columns: Columns = "block", out: Fp8Tensor | None = None
) -> Fp8Tensor:
    """The unpermuted tokens q [T, C] as a transposed operand [C, Kcap].

    Bit-equal to transpose_fp8 of permute_pad's rows; q needs power-of-two 1x128 scales.
    """
    if not isinstance(q, Fp8Tensor):
        refuse("permute_transpose_fp8", "q", FP8_TENSOR, q)
    if not q.pow2:
        raise ValueError(
            "[permute_transpose_fp8] shifts codes by powers of two, so q must have pow2 scales; "
            "got pow2=False (permute_pad, then transpose_fp8 with requantize=True)"
        )
    layout: Any = column_layout("permute_transpose_fp8", columns)
    if out is not None:
        layout = given_fp8("permute_transpose_fp8", out, layout, q.fp8_dtype, True)
    made: Fp8Tensor = _C.permute_transpose_fp8(q, plan, layout)
    return made
