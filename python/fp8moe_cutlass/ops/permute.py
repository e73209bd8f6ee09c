"""Rows to their experts and back: y[row_of[t, s]] = x[t], out[t] = sum of y[row_of[t, s]]."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from fp8moe_cutlass import _C
from fp8moe_cutlass.ops._words import given_fp8, parts, refuse
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import LAYOUTS, Fp8Tensor
from fp8moe_cutlass.typing import Array, ScaleLayout

T = TypeVar("T")


class Permuted(NamedTuple):
    """Rows grouped by expert, and their probs."""

    y: Any  # [R, C], of x's kind
    row_probs: Array | None  # [R] float32, with probs


class PermuteGradients(NamedTuple):
    """The gradients of the tokens and of their probs."""

    dx: Array  # [T, C]
    dprobs: Array | None  # [T, S] float32, 0 for dropped slots; with dprobs


class UnpermuteGradients(NamedTuple):
    """The gradients of the rows and of the probs."""

    dy: Array  # [R, C], padding rows zero
    dprobs: Array | None  # [T, S] float32, with probs


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
    if not isinstance(scale_layout, str) or scale_layout not in LAYOUTS:
        refuse("permute_pad", "scale_layout", "'row', 'gemm' or 'block'", scale_layout)
    y: Any = scale_layout
    row_probs: Any = None if probs is None else True
    if out is not None:
        y, given = parts("permute_pad", out, "y", "row_probs")
        row_probs = row_probs if given is None else given
        if y is None:
            y = scale_layout
        elif isinstance(x, Fp8Tensor):
            given_fp8("permute_pad", y, scale_layout, x.fp8_dtype, x.pow2)
    given_x: Any = x
    return Permuted(*_C.permute_pad(given_x, plan, probs, y, row_probs, zero_unweighted))


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
    dx, of_probs = parts("permute_pad_backward", out, "dx", "dprobs")
    if of_probs is None and dprobs is not None:
        of_probs = True
    dx = True if dx is None else dx
    return PermuteGradients(*_C.permute_pad_backward(dy, plan, dprobs, dx, of_probs))


def unpermute_unpad(
    y: Array,
    plan: RoutingPlan,
    probs: Array | None = None,
    *,
    peers: Array | None = None,
    first: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Sums the rows y [R, C] of each token, slots ascending, weighted by probs [T, S] float32.

    Summed in float32, rounded once to y's dtype (float32, float16 or bfloat16). Returns [T, C]. C
    is a multiple of 16, in float32 of 4.

    peers [ranks] int64 and first [ranks] int32, with a plan of `dispatch_plan`: the rows of slot r
    are read where rank r has them, as `share_words` describes. peers are addresses; the rows for
    this rank begin first[r] rows behind peers[r]. first lies on the host, and there are at most 64
    ranks. y [n, C] is what this rank's address points at.
    """
    made: Array = _C.unpermute_unpad(y, plan, probs, peers, first, True if out is None else out)
    return made


def unpermute_unpad_backward(
    dout: Array,
    plan: RoutingPlan,
    y: Array | None = None,
    probs: Array | None = None,
    *,
    out: tuple[Array, Array | None] | None = None,
) -> UnpermuteGradients:
    """The gradient: dy[row] = (prob *) dout[t], and dprobs[t, s] = <y[row], dout[t]>.

    dout [T, C], C as of `unpermute_unpad`; with probs [T, S] also y [R, C] is needed. Of an FP8
    dout without probs it is permute_pad.
    """
    dy, dprobs = parts("unpermute_unpad_backward", out, "dy", "dprobs")
    if dprobs is None and probs is not None:
        dprobs = True
    dy = True if dy is None else dy
    return UnpermuteGradients(*_C.unpermute_unpad_backward(dout, plan, y, probs, dy, dprobs))
