"""Routing rules, and what they mean: loops and float64, apart from the operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass.nn import RoutingRule

V3 = RoutingRule(
    score="sigmoid",
    selection_bias=True,
    num_groups=3,
    topk_groups=2,
    best_per_group=2,
    routed_scaling_factor=2.5,
)
AFTER: dict[str, Any] = {"softmax_after_topk": True, "select_by": "logits"}
GROUPS: dict[str, Any] = {"num_groups": 4, "topk_groups": 2}
RULES = {
    "softmax": RoutingRule(),
    "softmax_raw": RoutingRule(normalize=False, routed_scaling_factor=2.5),
    "softmax_after": RoutingRule(**AFTER, gate_bias=True, routed_scaling_factor=2.5),
    "softmax_after_groups": RoutingRule(**AFTER, **GROUPS, best_per_group=3),
    "sigmoid": RoutingRule(score="sigmoid", epsilon=0.0),
    "sigmoid_of_logits": RoutingRule(score="sigmoid", select_by="logits", normalize=False),
    "sqrt_softplus": RoutingRule(score="sqrt_softplus", selection_bias=True),
    "bias": RoutingRule(score="sigmoid", selection_bias=True),
    "bias_masked_to_0": RoutingRule(
        score="sigmoid", selection_bias=True, **GROUPS, best_per_group=2, closed_value=0.0
    ),
    "best_of_a_group": RoutingRule(**GROUPS, best_per_group=1, normalize=False),
    "groups_of_one": RoutingRule(num_groups=12, topk_groups=5, best_per_group=1),
    "gemma4": RoutingRule(input_norm_eps=1e-6, expert_scale=True),
    "deepseek_v3": V3,
}


def scores_of(rule: RoutingRule, logits: Tensor) -> Tensor:
    """[T, E] float64, by the definition."""
    if rule.score == "softmax":
        e = torch.exp(logits)
        return e / e.sum(dim=1, keepdim=True)
    if rule.score == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    return torch.sqrt(torch.log1p(torch.exp(logits)))


def experts_of(rule: RoutingRule, compared: list[float], top_k: int) -> list[int]:
    """One token's experts, best first; of equal ones the lower first, as sorted is stable."""
    size = len(compared) // rule.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(rule.num_groups)]
    if rule.topk_groups < rule.num_groups:
        value = [sum(sorted(compared[e] for e in g)[-rule.best_per_group :]) for g in groups]
        is_open = sorted(range(rule.num_groups), key=lambda g: -value[g])[: rule.topk_groups]
        compared = [
            c if e // size in is_open else rule.closed_value for e, c in enumerate(compared)
        ]
    return sorted(range(len(compared)), key=lambda e: -compared[e])[:top_k]


def weights_of(rule: RoutingRule, logits: Tensor, scores: Tensor, idx: Tensor) -> Tensor:
    """[T, k] without the scale per expert, by the definition."""
    if rule.softmax_after_topk:
        weights = scores_of(RoutingRule(), logits.gather(1, idx))
    else:
        weights = scores.gather(1, idx)
        if rule.normalize:
            weights = weights / weights.sum(dim=1, keepdim=True)
    return weights * rule.routed_scaling_factor
