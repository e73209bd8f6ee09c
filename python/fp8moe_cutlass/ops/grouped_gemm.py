"""D[rows of e] = A[rows of e] W[e]^T."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import empty
from fp8moe_cutlass.ops._words import FP8_TENSOR, dtype_name, refuse, shape_of
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, DType

_op = operator("grouped_gemm")


def grouped_gemm(
    a: Fp8Tensor,
    w: Fp8Tensor,
    plan: RoutingPlan,
    *,
    out_dtype: DType = "bfloat16",
    out: Array | None = None,
) -> Array:
    """Multiplies each expert's rows of a [R, K] (gemm layout) by its w[e]^T of w [E, N, K] (block).

    fprop with quantize_weight's first result, dgrad with its second. Rows are ragged: `plan` says
    whose they are. Returns d [R, N], bfloat16 or float32, accumulated in float32.
    """
    if not isinstance(a, Fp8Tensor):
        refuse("grouped_gemm", "a", FP8_TENSOR, a)
    if not isinstance(w, Fp8Tensor):
        refuse("grouped_gemm", "w", FP8_TENSOR, w)
    fresh = out is None
    name = dtype_name("grouped_gemm", "out_dtype", out_dtype, "bfloat16", "float32")
    if out is None:
        rows, _ = shape_of("grouped_gemm", "a", a.data, 2)
        _, n, _ = shape_of("grouped_gemm", "w", w.data, 3)
        out = empty("grouped_gemm", a.data, (rows, n), name)
    _op(a, w, plan, out, fresh=fresh)
    return out
