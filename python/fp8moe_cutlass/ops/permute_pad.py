"""y[row_of[t, s]] = x[t], and back."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import empty, given_fp8, new_fp8
from fp8moe_cutlass.ops._words import parts, refuse, shape_of
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, ScaleLayout

T = TypeVar("T")

_op = operator("permute_pad")
_backward = operator("permute_pad_backward")


class Permuted(NamedTuple):
    """What permute_pad returns."""

    y: Any  # [R, C], of x's kind
    row_probs: Array | None  # [R] float32, with probs


class PermuteGradients(NamedTuple):
    """What permute_pad_backward returns."""

    dx: Array  # [T, C]
    dprobs: Array | None  # [T, S] float32, 0 for dropped slots; with dprobs


def permute_pad(
    x: T,
    plan: RoutingPlan,
    probs: Array | None = None,
    *,
    scale_layout: ScaleLayout = "gemm",
    zero_unweighted: bool = False,
    out: tuple[T, Array | None] | None = None,
) -> Permuted:
    """Copies the tokens x [T, C] to the rows of their experts; padding rows are zero.

    x: float32, float16 or bfloat16, or an Fp8Tensor with 1x128 scales, which move along (into
    `scale_layout`, "gemm" or "row"). probs [T, S] float32 becomes row_probs [R].
    zero_unweighted: rows whose prob is 0 are zero too, data and scale (as in TransformerEngine).
    """
    if out is None and not isinstance(plan, RoutingPlan):
        refuse("permute_pad", "plan", "a RoutingPlan", plan)
    fresh = out is None
    y, permuted = parts("permute_pad", out, "y", "row_probs")
    if probs is not None and permuted is None:
        permuted = empty("permute_pad", probs, (plan.rows,), "float32")
    if isinstance(x, Fp8Tensor):
        if y is None:
            shape = (plan.rows, shape_of("permute_pad", "x", x.data, 2)[1])
            y8 = new_fp8("permute_pad", x.data, shape, scale_layout, x.fp8_dtype, x.pow2)
        else:
            y8 = given_fp8("permute_pad", y, scale_layout, x.fp8_dtype, x.pow2)
        _op(x, plan, probs, y8, permuted, zero_unweighted, fresh=fresh)
        return Permuted(y8, permuted)
    if y is None:
        y = empty("permute_pad", x, (plan.rows, shape_of("permute_pad", "x", x, 2)[1]))
    _op(x, plan, probs, y, permuted, zero_unweighted, fresh=fresh)
    return Permuted(y, permuted)


def permute_pad_backward(
    dy: Array,
    plan: RoutingPlan,
    dprobs: Array | None = None,
    *,
    out: tuple[Array, Array | None] | None = None,
) -> PermuteGradients:
    """The gradient of permute_pad: dx[t] = sum over slots ascending of dy[row_of[t, s]].

    dy [R, C] float32, float16 or bfloat16, summed in float32, rounded once. dprobs [R] float32 is
    the gradient of row_probs.
    """
    if out is None and not isinstance(plan, RoutingPlan):
        refuse("permute_pad_backward", "plan", "a RoutingPlan", plan)
    fresh = out is None
    dx, dprobs_out = parts("permute_pad_backward", out, "dx", "dprobs")
    if dx is None:
        width = shape_of("permute_pad_backward", "dy", dy, 2)[1]
        dx = empty("permute_pad_backward", dy, (plan.tokens, width))
    if dprobs is not None and dprobs_out is None:
        shape = (plan.tokens, plan.slots)
        dprobs_out = empty("permute_pad_backward", dprobs, shape, "float32")
    _backward(dy, plan, dprobs, dx, dprobs_out, fresh=fresh)
    return PermuteGradients(dx, dprobs_out)
