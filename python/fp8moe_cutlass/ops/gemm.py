"""The grouped GEMMs: D[rows of e] = A[rows of e] W[e]^T, and dW[e] (+)= dY[e]^T X[e]."""

from __future__ import annotations

from typing import Any

from fp8moe_cutlass import _C
from fp8moe_cutlass.arrays import dtype_name
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, DType


def grouped_gemm(
    a: Fp8Tensor,
    w: Fp8Tensor,
    plan: RoutingPlan,
    *,
    a2: Fp8Tensor | None = None,
    w2: Fp8Tensor | None = None,
    out_dtype: DType = "bfloat16",
    out: Array | None = None,
) -> Array:
    """Multiplies each expert's rows of a [R, K] (gemm layout) by its w[e]^T of w [E, N, K] (block).

    fprop with quantize_weight's first result, dgrad with its second. Rows are ragged: `plan` says
    whose they are. Returns d [R, N], bfloat16 or float32, accumulated in float32.
    a2 [R, K2] in a's format and w2 [E, N, K2], both or neither: adds a2 w2[e]^T, one K-block of K2
    at most 128, to the same sums, after a's: a low-rank term (lora_project, quantize_lora).
    """
    if not isinstance(out_dtype, str) or out_dtype not in ("bfloat16", "float32"):
        out_dtype = dtype_name("grouped_gemm", "out_dtype", out_dtype, "bfloat16", "float32")
    d: Array = _C.grouped_gemm(a, w, plan, out_dtype if out is None else out, a2, w2)
    return d


def grouped_gemm_wgrad(
    dy_t: Fp8Tensor,
    x_t: Fp8Tensor,
    plan: RoutingPlan,
    *,
    out: Array | None = None,
    accumulate: bool = False,
    out_dtype: DType = "float32",
    workspace: Array | None = None,
) -> Array:
    """Contracts dy_t [N, Kcap] and x_t [K, Kcap], two transposed operands, over tokens per expert.

    Both of the same kind: 128x128 tiles ("block") or 1x128 along tokens ("column"). Returns dW
    [E, N, K], float32 or bfloat16; accumulate=True adds to `out`; otherwise an expert without
    tokens gets zeros. workspace: of ops.zero_workspace, needed on CUDA; None: allocated.
    """
    op = "grouped_gemm_wgrad"
    if accumulate is True and out is None:
        raise ValueError(f"[{op}] accumulate=True adds to out; got out=None")
    if not isinstance(out_dtype, str) or out_dtype not in ("bfloat16", "float32"):
        out_dtype = dtype_name(op, "out_dtype", out_dtype, "float32", "bfloat16")
    dw: Any = out_dtype if out is None else out
    made: Array = _C.grouped_gemm_wgrad(dy_t, x_t, plan, dw, accumulate, workspace)
    return made
