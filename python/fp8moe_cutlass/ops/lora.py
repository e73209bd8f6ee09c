"""Low-rank terms (LoRA) of the grouped GEMMs: u = s rows A^T as a further K-block, beside B."""

from __future__ import annotations

from typing import Any, NamedTuple

from fp8moe_cutlass import _C
from fp8moe_cutlass.arrays import dtype_name
from fp8moe_cutlass.ops._words import FP8_TENSOR, given_fp8, is_pow2, parts, refuse
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, DType, ScaleKind


class Projected(NamedTuple):
    """Rows in the low-rank space."""

    u: Array  # [R, r] bfloat16
    u_q: Fp8Tensor  # [R, parts], gemm layout: `a2` of grouped_gemm


def lora_project(
    rows: Fp8Tensor,
    factor: Array,
    plan: RoutingPlan,
    *,
    rank_first: bool = True,
    scaling: float = 1.0,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    out: tuple[Array, Fp8Tensor] | None = None,
) -> Projected:
    """Computes u = scaling * rows factor[e]^T of each expert's rows, and u's FP8 parts.

    rows: [R, C] in gemm layout, or [T, C] in row layout, which the plan takes to their experts.
    factor: bfloat16, [E, r, C] (rank_first: LoRA's A) or [E, C, r] (its B); r a multiple of 8, 8
    to 64. u_q holds the codes of u and of what rounding left, in rows' format, zero on padding.
    """
    if not isinstance(rows, Fp8Tensor):
        refuse("lora_project", "rows", FP8_TENSOR, rows)
    u: Any = "bfloat16"
    u_q: Any = ("gemm", rows.fp8_dtype)
    if out is not None:
        u, u_q = parts("lora_project", out, "u", "u_q")
        u_q = given_fp8("lora_project", u_q, "gemm", rows.fp8_dtype, is_pow2("lora_project", scale))
    made = _C.lora_project(rows, factor, plan, u, u_q, rank_first, scaling, scale, eps)
    return Projected(*made)


def lora_wgrad(
    u: Array,
    rows: Fp8Tensor,
    plan: RoutingPlan,
    *,
    rank_first: bool = True,
    out_dtype: DType = "bfloat16",
    out: Array | None = None,
) -> Array:
    """Contracts u [R, r] (bfloat16) and rows, as lora_project takes them, over each expert's rows.

    Returns [E, r, C] (rank_first), the gradient of LoRA's A, or [E, C, r], that of its B; float32
    or bfloat16, zeros for an expert without tokens. Sums in float32, in one order.
    """
    if not isinstance(out_dtype, str) or out_dtype not in ("bfloat16", "float32"):
        out_dtype = dtype_name("lora_wgrad", "out_dtype", out_dtype, "bfloat16", "float32")
    made: Array = _C.lora_wgrad(u, rows, plan, out_dtype if out is None else out, rank_first)
    return made


def quantize_lora(
    factor: Array,
    *,
    rank_first: bool = False,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    out: Fp8Tensor | None = None,
) -> Fp8Tensor:
    """Quantizes a factor [E, C, r] (or [E, r, C], rank_first), bfloat16, to `w2` of grouped_gemm.

    w2 [E, C, parts] in block layout: the codes of E4M3 and, for ranks up to 32, of what rounding
    left, one scale per 128 of C.
    """
    w2: Any = ("block", "e4m3")
    if out is not None:
        w2 = given_fp8("quantize_lora", out, "block", "e4m3", is_pow2("quantize_lora", scale))
    made: Fp8Tensor = _C.quantize_lora(factor, w2, rank_first, scale, eps)
    return made
