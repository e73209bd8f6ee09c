"""x = q * scale_inv."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import empty
from fp8moe_cutlass.ops._words import FP8_TENSOR, dtype_name, refuse
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, DType

_op = operator("dequantize")


def dequantize(q: Fp8Tensor, *, dtype: DType = "bfloat16", out: Array | None = None) -> Array:
    """The values of q [M, K] or [E, M, K], rounded once to float32, float16 or bfloat16."""
    if not isinstance(q, Fp8Tensor):
        refuse("dequantize", "q", FP8_TENSOR, q)
    fresh = out is None
    name = dtype_name("dequantize", "dtype", dtype, "float32", "float16", "bfloat16")
    x = empty("dequantize", q.data, q.shape, name) if out is None else out
    _op(q, x, fresh=fresh)
    return x
