"""dW[e] (+)= dY[e]^T X[e], over tokens."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import empty
from fp8moe_cutlass.ops._words import FP8_TENSOR, dtype_name, flag, refuse
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, DType

_op = operator("grouped_gemm_wgrad")


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
    if not isinstance(dy_t, Fp8Tensor):
        refuse("grouped_gemm_wgrad", "dy_t", FP8_TENSOR, dy_t)
    if not isinstance(x_t, Fp8Tensor):
        refuse("grouped_gemm_wgrad", "x_t", FP8_TENSOR, x_t)
    if out is None and not isinstance(plan, RoutingPlan):
        refuse("grouped_gemm_wgrad", "plan", "a RoutingPlan", plan)
    fresh = out is None
    flag("grouped_gemm_wgrad", "accumulate", accumulate)
    name = dtype_name("grouped_gemm_wgrad", "out_dtype", out_dtype, "float32", "bfloat16")
    if out is None:
        if accumulate:
            raise ValueError("[grouped_gemm_wgrad] accumulate=True adds to out; got out=None")
        shape = (plan.experts, dy_t.shape[0], x_t.shape[0])
        out = empty("grouped_gemm_wgrad", dy_t.data, shape, name)
    _op(dy_t, x_t, plan, out, accumulate, workspace, fresh=fresh)
    return out
