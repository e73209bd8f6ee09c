"""The k best experts of each token by its logits, their weights, and the gradient of both."""

from __future__ import annotations

import math
from typing import NamedTuple

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import empty
from fp8moe_cutlass.ops._words import count, parts, refuse, shape_of
from fp8moe_cutlass.typing import Array

_op = operator("router_topk")
_backward = operator("router_topk_backward")

_SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}


class RouterTopk(NamedTuple):
    """What router_topk decides for T tokens."""

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
    given_idx [T, top_k] int64: take these experts; a token may name one twice. An id outside [0, E)
    is a ValueError on the CPU; on CUDA its weight is NaN, and it is not counted.
    """
    tokens, experts = shape_of("router_topk", "logits", logits, 2)
    count("router_topk", "top_k", top_k)
    count("router_topk", "sequences", sequences)
    fresh = out is None
    if out is None:
        ids, most = given_idx, max(top_k, 0)  # what is wrong with a negative one the op says
        if ids is None:
            ids = empty("router_topk", logits, (tokens, most), "int64")
        out = RouterTopk(
            empty("router_topk", logits, (tokens, experts), "float32"),
            ids,
            empty("router_topk", logits, (tokens, most), "float32"),
            empty("router_topk", logits, (max(sequences, 0) * experts,), "int64"),
        )
    else:
        parts("router_topk", out, *RouterTopk._fields)
        got = (
            shape_of("router_topk", "out.topk_weights", out[2], 2)[1],
            shape_of("router_topk", "out.tokens_per_expert", out[3], 1)[0],
        )
        if got != (asked := (top_k, sequences * experts)):
            raise ValueError(
                "[router_topk] out must have (topk_weights.shape[1], tokens_per_expert.shape[0]) "
                f"{asked}; got {got}"
            )
    scores, topk_idx, topk_weights, tokens_per_expert = out
    _op(
        logits,
        selection_bias,
        padding,
        given_idx,
        scores,
        topk_idx if given_idx is None else None,
        topk_weights,
        tokens_per_expert,
        _word("router_topk", score),
        _by_logits(select_by),
        num_groups,
        topk_groups,
        best_per_group,
        closed_value,
        softmax_after_topk,
        normalize,
        epsilon,
        routed_scaling_factor,
        fresh=fresh,
    )
    return out


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
    fresh = out is None
    if out is None:
        shape = shape_of("router_topk_backward", "scores", scores, 2)
        out = empty("router_topk_backward", scores, shape, "float32")
    _backward(
        dweights,
        dscores,
        scores,
        topk_idx,
        topk_weights,
        out,
        _word("router_topk_backward", score),
        softmax_after_topk,
        normalize,
        epsilon,
        routed_scaling_factor,
        fresh=fresh,
    )
    return out


def _word(op: str, score: str) -> int:
    if not isinstance(score, str) or score not in _SCORES:
        refuse(op, "score", f"one of {tuple(_SCORES)}", score)
    return _SCORES[score]


def _by_logits(select_by: str) -> bool:
    if not isinstance(select_by, str) or select_by not in ("scores", "logits"):
        refuse("router_topk", "select_by", "'scores' or 'logits'", select_by)
    return select_by == "logits"
