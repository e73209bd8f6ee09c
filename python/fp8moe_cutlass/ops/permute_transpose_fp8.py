"""transpose_fp8(permute_pad(q)) in one gathering pass."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import given_fp8, new_fp8
from fp8moe_cutlass.ops._words import FP8_TENSOR, column_layout, refuse, shape_of
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Columns

_op = operator("permute_transpose_fp8")


def permute_transpose_fp8(
    q: Fp8Tensor, plan: RoutingPlan, *, columns: Columns = "block", out: Fp8Tensor | None = None
) -> Fp8Tensor:
    """The unpermuted tokens q [T, C] as a transposed operand [C, Kcap].

    Bit-equal to transpose_fp8 of permute_pad's rows; q needs power-of-two 1x128 scales.
    """
    if not isinstance(q, Fp8Tensor):
        refuse("permute_transpose_fp8", "q", FP8_TENSOR, q)
    if out is None and not isinstance(plan, RoutingPlan):
        refuse("permute_transpose_fp8", "plan", "a RoutingPlan", plan)
    fresh = out is None
    if not q.pow2:
        raise ValueError(
            "[permute_transpose_fp8] shifts codes by powers of two, so q must have pow2 scales; "
            "got pow2=False (permute_pad, then transpose_fp8 with requantize=True)"
        )
    layout = column_layout("permute_transpose_fp8", columns)
    if out is None:
        shape = (shape_of("permute_transpose_fp8", "q", q.data, 2)[1], plan.columns)
        out = new_fp8("permute_transpose_fp8", q.data, shape, layout, q.fp8_dtype, True)
    else:
        given_fp8("permute_transpose_fp8", out, layout, q.fp8_dtype, True)
    _op(q, plan, out, fresh=fresh)
    return out
