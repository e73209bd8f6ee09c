"""The router's functions: top k by a score function, the scores of the auxiliary loss, the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass.autograd import router_topk
from fp8moe_cutlass.nn.published import megatron_rule
from fp8moe_cutlass.ops import RouterTopk


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: Any = "bytemap",
    topk_indices: Tensor | None = None,
    qb_histogram: Tensor | None = None,
    qb_bin_bounds: Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """probs [..., E] in logits' dtype, 0 but for the top k, and the routing map [..., E] bool.

    logits [..., E] float32, bfloat16 or float16; computed in float32. score_function "softmax",
    "sigmoid" or "sqrtsoftplus"; expert_bias [E] with the latter two. Of equal scores the lower
    expert wins. topk_indices [T, topk], an integer buffer: is filled with the experts, best first,
    and returned in the map's place. ValueError for a routing_map_format other than "bytemap" (or
    TransformerEngine's RoutingMapFormat.BYTEMAP), and for the histogram of quantile balancing.
    """
    op = "fused_topk_with_score_function"
    _check_format(op, routing_map_format)
    if any(given is not None for given in (qb_histogram, qb_bin_bounds, qb_histogram_mode)):
        raise ValueError(f"[{op}] quantile balancing is not supported; got qb_ arguments")
    routed = topk_of(
        _rows(op, logits),
        topk,
        use_pre_softmax=use_pre_softmax,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        score_function=score_function,
        expert_bias=expert_bias,
    )
    probs, chosen = dense(logits, routed)
    if topk_indices is None:
        return probs, chosen
    topk_indices.copy_(routed.topk_idx.view(topk_indices.shape))
    return probs, topk_indices


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: Any = "bytemap"
) -> tuple[Tensor, Tensor]:
    """The routing map [..., E] bool of the top k scores, and the scores [..., E] float32, which sum
    to 1 per token: without bias, groups and scaling. Differentiable in logits."""
    op = "fused_compute_score_for_moe_aux_loss"
    _check_format(op, routing_map_format)
    routed = topk_of(_rows(op, logits), topk, use_pre_softmax=True, score_function=score_function)
    scores = routed.scores
    if score_function != "softmax":
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    return dense(logits, routed)[1], scores.view(logits.shape)


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """coeff E / (topk N^2) times the sum over experts of tokens_per_expert and of the sum of probs
    [T, E]: a scalar in probs' dtype, computed in float32. total_num_tokens N: an int or a 0-d
    tensor, which a CUDA graph may change between replays."""
    total: float | Tensor
    if isinstance(total_num_tokens, Tensor):
        total = total_num_tokens.to(probs.device, torch.float32)
    else:
        total = float(total_num_tokens)  # of NumPy's int32 the square would overflow
    scale = num_experts * coeff / (topk * total * total)
    loss = (probs.float().sum(dim=0) * tokens_per_expert.float()).sum() * scale
    return loss.to(probs.dtype)


# ---- what Megatron's router has in common -------------------------------------------------------


def topk_of(
    logits: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    given_idx: Tensor | None = None,
) -> RouterTopk:
    """The operator's results for logits [T, E], in float32."""
    rule = megatron_rule(
        topk,
        score_function=score_function,
        use_pre_softmax=use_pre_softmax,
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=scaling_factor,
        expert_bias=expert_bias is not None,
    )
    bias = None if expert_bias is None else expert_bias.detach().float()
    return router_topk(
        logits.float(), topk, selection_bias=bias, given_idx=given_idx, **rule.options()
    )


def dense(logits: Tensor, routed: RouterTopk) -> tuple[Tensor, Tensor]:
    """Probabilities in logits' dtype and the map (bool), both of logits' shape."""
    rows = logits.reshape(-1, logits.shape[-1])
    probs = torch.zeros_like(rows).scatter(1, routed.topk_idx, routed.topk_weights.to(rows.dtype))
    chosen = torch.zeros_like(rows, dtype=torch.bool).scatter(1, routed.topk_idx, True)
    return probs.view(logits.shape), chosen.view(logits.shape)


def _rows(op: str, logits: Tensor) -> Tensor:
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"[{op}] logits must be float32, float16 or bfloat16; got {logits.dtype}")
    return logits.reshape(-1, logits.shape[-1])


def _check_format(op: str, routing_map_format: Any) -> None:
    """Raises unless it is the name, TransformerEngine's RoutingMapFormat.BYTEMAP, or its value."""
    if getattr(routing_map_format, "value", routing_map_format) not in ("bytemap", 0):
        raise ValueError(f"[{op}] routing_map_format must be 'bytemap'; got {routing_map_format!r}")
