"""x = q * scale_inv."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import empty
from fp8moe_cutlass.ops._words import FP8_TENSOR, dtype_name, refuse
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, DType

_op = operator("dequantize")


def dequantize(t: Fp8Tensor, *, dtype: DType = "bfloat16", out: Array | None = None) -> Array:
    """The values of t [M, K] or [E, M, K], rounded once to float32, float16 or bfloat16."""
    if not isinstance(t, Fp8Tensor):
        refuse("dequantize", "t", FP8_TENSOR, t)
    fresh = out is None
    name = dtype_name("dequantize", "dtype", dtype, "float32", "float16", "bfloat16")
    x = empty("dequantize", t.data, t.shape, name) if out is None else out
    _op(t, x, fresh=fresh)
    return x
