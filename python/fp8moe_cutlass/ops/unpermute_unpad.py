"""out[t] = sum over slots of (prob *) y[row_of[t, s]], and back."""

from __future__ import annotations

from typing import NamedTuple

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import empty
from fp8moe_cutlass.ops._words import parts, refuse, shape_of
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.typing import Array

_op = operator("unpermute_unpad")
_backward = operator("unpermute_unpad_backward")


class UnpermuteGradients(NamedTuple):
    """What unpermute_unpad_backward returns."""

    dy: Array  # [R, C], padding rows zero
    dprobs: Array | None  # [T, S] float32, with probs


def unpermute_unpad(
    y: Array, plan: RoutingPlan, probs: Array | None = None, *, out: Array | None = None
) -> Array:
    """Sums the rows y [R, C] of each token, slots ascending, weighted by probs [T, S] float32.

    Summed in float32, rounded once to y's dtype (float32, float16 or bfloat16). Returns [T, C].
    """
    if out is None and not isinstance(plan, RoutingPlan):
        refuse("unpermute_unpad", "plan", "a RoutingPlan", plan)
    fresh = out is None
    if out is None:
        out = empty("unpermute_unpad", y, (plan.tokens, shape_of("unpermute_unpad", "y", y, 2)[1]))
    _op(y, plan, probs, out, fresh=fresh)
    return out


def unpermute_unpad_backward(
    dout: Array,
    plan: RoutingPlan,
    y: Array | None = None,
    probs: Array | None = None,
    *,
    out: tuple[Array, Array | None] | None = None,
) -> UnpermuteGradients:
    """The gradient: dy[row] = (prob *) dout[t], and dprobs[t, s] = <y[row], dout[t]>.

    dout [T, C]; with probs [T, S] also y [R, C] is needed. Of an FP8 dout without probs it is
    permute_pad.
    """
    if out is None and not isinstance(plan, RoutingPlan):
        refuse("unpermute_unpad_backward", "plan", "a RoutingPlan", plan)
    fresh = out is None
    dy, dprobs = parts("unpermute_unpad_backward", out, "dy", "dprobs")
    if dy is None:
        shape = (plan.rows, shape_of("unpermute_unpad_backward", "dout", dout, 2)[1])
        dy = empty("unpermute_unpad_backward", dout, shape)
    if probs is not None and dprobs is None:
        shape = (plan.tokens, plan.slots)
        dprobs = empty("unpermute_unpad_backward", probs, shape, "float32")
    _backward(dout, plan, y, probs, dy, dprobs, fresh=fresh)
    return UnpermuteGradients(dy, dprobs)
