"""The k best experts of each token by its logits, their weights, and the gradient of both."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fp8moe_cutlass import _C
from fp8moe_cutlass.ops._words import parts, refuse
from fp8moe_cutlass.typing import Array

_SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}
_BY_LOGITS = {"scores": False, "logits": True}


class RouterTopk(NamedTuple):
    """The experts of T tokens, their weights, and the experts' loads."""

    scores: Array  # [T, E] f32, without bias and groups
    topk_idx: Array  # [T, k] i64, best first; or as given
    topk_weights: Array  # [T, k] f32
    tokens_per_expert: Array  # [sequences E] i64, without padding


def router_topk(
    logits: Array,
    top_k: int,
    *,
    selection_bias: Array | None = None,
    padding: Array | None = None,
    given_idx: Array | None = None,
    sequences: int = 1,
    score: str = "softmax",
    select_by: str = "scores",
    num_groups: int = 1,
    topk_groups: int = 1,
    best_per_group: int = 1,
    closed_value: float = -math.inf,
    softmax_after_topk: bool = False,
    normalize: bool = True,
    epsilon: float = 1e-20,
    routed_scaling_factor: float = 1.0,
    out: RouterTopk | None = None,
) -> RouterTopk:
    """The top_k experts and weights of logits [T, E] float32, E <= 1024, top_k <= 32.

    nn.RoutingRule describes the options from `score` on. Of equal values the lower expert comes
    first, and of equal groups the lower group; NaN comes before all numbers.
    selection_bias [E] float32 is added to what is compared. padding [T] (bool or uint8): tokens
    that tokens_per_expert leaves out. sequences: it counts in each of so many sequences of equal
    length, one after the other.
    given_idx [T, top_k] int64: take these experts; a token may name one twice. -1 names none: its
    weight is 0, and it has no part in sums and counts. Another id outside [0, E) is a ValueError on
    the CPU; on CUDA its weight is NaN, and it is not counted.
    """
    if not isinstance(score, str) or score not in _SCORES:
        refuse("router_topk", "score", f"one of {tuple(_SCORES)}", score)
    if not isinstance(select_by, str) or select_by not in _BY_LOGITS:
        refuse("router_topk", "select_by", "'scores' or 'logits'", select_by)
    topk_idx: Any = True if given_idx is None else None
    scores: Any = True
    topk_weights: Any = True
    counts: Any = True
    if out is not None:
        scores, ids, topk_weights, counts = parts("router_topk", out, *RouterTopk._fields)
        topk_idx = ids if given_idx is None else None
    scores, topk_idx, topk_weights, counts = _C.router_topk(
        logits,
        selection_bias,
        padding,
        given_idx,
        top_k,
        sequences,
        scores,
        topk_idx,
        topk_weights,
        counts,
        _SCORES[score],
        _BY_LOGITS[select_by],
        num_groups,
        topk_groups,
        best_per_group,
        closed_value,
        softmax_after_topk,
        normalize,
        epsilon,
        routed_scaling_factor,
    )
    if out is not None:
        return out
    return RouterTopk(scores, given_idx if topk_idx is None else topk_idx, topk_weights, counts)


def router_topk_backward(
    dweights: Array | None,
    dscores: Array | None,
    scores: Array,
    topk_idx: Array,
    topk_weights: Array,
    *,
    score: str = "softmax",
    softmax_after_topk: bool = False,
    normalize: bool = True,
    epsilon: float = 1e-20,
    routed_scaling_factor: float = 1.0,
    out: Array | None = None,
) -> Array:
    """dlogits [T, E] float32, from dweights [T, k] and dscores [T, E], float32; one may be None.

    scores, topk_idx, topk_weights and the options are those of router_topk. An id outside [0, E) is
    a ValueError on the CPU, and has no gradient on CUDA.
    """
    if not isinstance(score, str) or score not in _SCORES:
        refuse("router_topk_backward", "score", f"one of {tuple(_SCORES)}", score)
    dlogits: Array = _C.router_topk_backward(
        dweights,
        dscores,
        scores,
        topk_idx,
        topk_weights,
        True if out is None else out,
        _SCORES[score],
        softmax_after_topk,
        normalize,
        epsilon,
        routed_scaling_factor,
    )
    return dlogits
