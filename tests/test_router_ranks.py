"""Router(group=): a sequence's loss counts the sequence alone, whatever the other ranks have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ranks
from fp8moe_cutlass.nn import LossCoefficients, MoE, MoEExperts, Router, RoutingRule
from ranks import Pool, results
from reference_router import RULES

H, E, K, LENGTH = 32, 12, 4, 24
PARTS = {"one each": [1, 1], "one and two": [1, 2], "none and two": [0, 2]}


pool = ranks.pool(2, timeout=20.0)


def router_of(group: Any, rule: RoutingRule, **coefficients: float) -> Router:
    torch.manual_seed(2)
    router = Router(H, E, K, rule, group=group, coefficients=LossCoefficients(**coefficients))
    if router.selection_bias is not None:
        router.selection_bias.normal_()
    return router


def loss_of_a_sequence(weight: Tensor, x: Tensor, real: Tensor, rule: RoutingRule) -> Tensor:
    """E / (k T) sum_e n_e mean_t p_te over the real tokens of x [T, H], in float64."""
    logits = x[real].double() @ weight.T
    scores = logits.softmax(dim=1) if rule.score == "softmax" else logits.sigmoid()
    counts = torch.zeros(E, dtype=torch.float64)
    for row in scores:
        counts[row.topk(K).indices] += 1
    p = scores / scores.sum(dim=1, keepdim=True)
    return E / (K * len(p)) * (counts * p.mean(dim=0)).sum()


def on_a_rank(
    group: Any, way: str, rule: RoutingRule, x: Tensor, padding: Tensor, parts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss of this rank's sequences, the gate's gradient of it, and the load."""
    x, padding = (t.split(parts)[group.rank()] for t in (x, padding))
    if way == "by hand":
        router = router_of(group, rule)
        routing = router(x.flatten(0, 1), padding=padding.flatten())
        loss = router.balancing_loss(routing, sequences=max(len(x), 1))
        loss.backward()
        return loss.detach(), router.weight.grad, routing.tokens_per_expert
    router = router_of(group, rule, balancing_per_sequence=1.0)
    if way == "router":
        routing = router(x.flatten(0, 1), padding=padding.flatten(), sequences=max(len(x), 1))
        (routing.topk_weights.sum() * 0).backward()
    else:
        moe = MoE(router, MoEExperts(E, H, 16, group=group, recipe=None))
        out, routing = moe(x, padding=padding, return_routing=True)
        (out.sum() * 0).backward()
    return routing.losses["balancing_per_sequence"], router.weight.grad, routing.tokens_per_expert


@pytest.mark.parametrize("rule", [RoutingRule(), RULES["deepseek_v3"]], ids=["plain", "bias"])
@pytest.mark.parametrize("way", ["by hand", "router", "moe"])
@pytest.mark.parametrize("name", PARTS)
def test_a_sequence_counts_itself(pool: Pool, name: str, way: str, rule: RoutingRule) -> None:
    parts = PARTS[name]
    x, padding = torch.randn(sum(parts), LENGTH, H), torch.rand(sum(parts), LENGTH) < 0.3
    weight = router_of(None, rule).weight.detach().double().requires_grad_()
    each = [loss_of_a_sequence(weight, s, ~p, rule) for s, p in zip(x, padding, strict=True)]
    load = router_of(None, rule)(x.flatten(0, 1), padding=padding.flatten()).tokens_per_expert
    found = results(pool.run(2, on_a_rank, way, rule, x, padding, parts))
    for number, first, (loss, grad, loads) in zip(parts, (0, parts[0]), found, strict=True):
        assert torch.equal(loads, load)
        want = torch.stack(each[first : first + number]).mean() if number else 0 * weight.sum()
        torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-5, atol=0)
        (its,) = torch.autograd.grad(want, weight, retain_graph=True)
        torch.testing.assert_close(grad.double(), its, rtol=1e-3, atol=1e-6)
