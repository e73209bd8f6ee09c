"""router_topk and its gradient: CUDA against the CPU backend, twice, over poisoned outputs.

exp and log are each device's own: scores and weights agree within 1e-6, and choices but for scores
nearer than that. By logits the choice is the CPU's to the expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backends import on_both
from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import router_topk
from fp8moe_cutlass.nn import RoutingRule
from on_device import capture, moved
from reference import relative_error
from reference_router import RULES

EACH = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
SIZES = pytest.mark.parametrize("experts", [1, 2, 12, 60, 128, 256, 257, 1024])
OF_WEIGHTS = ("score", "softmax_after_topk", "normalize", "epsilon", "routed_scaling_factor")


def options_of(rule: RoutingRule, experts: int) -> dict[str, Any]:
    """With the largest number of groups of 1, 2, 3, 4, 8, 257 that divides so many experts."""
    if rule.has_closed_groups:
        groups = max(g for g in (1, 2, 3, 4, 8, 257) if experts % g == 0)
        best = min(rule.best_per_group or 1, experts // groups)
        rule = replace(rule, num_groups=groups, topk_groups=-(-groups // 2), best_per_group=best)
    return rule.options()


def problem(experts: int, tokens: int, rule: RoutingRule) -> dict[str, Tensor | None]:
    bias = torch.randn(experts) if rule.selection_bias else None
    padding = torch.rand(tokens) < 0.2
    return {"selection_bias": bias, "padding": padding}


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-30, equal_nan=True)


def assert_equal(first: Any, again: Any) -> None:
    assert all(map(torch.equal, first, again))


@SIZES
@EACH
def test_forward(rule: RoutingRule, experts: int) -> None:
    options = options_of(rule, experts)
    for tokens, top_k, sequences in ((1, 1, 1), (333, 4, 3), (4099, 8, 1), (4096, 32, 64)):
        k = min(top_k, experts)
        logits = 2 * torch.randn(tokens, experts)
        given = {**problem(experts, tokens, rule), **options, "sequences": sequences}
        want, first, again = on_both("router_topk", logits, k, **given)
        assert_equal(first, again)
        torch.testing.assert_close(first.scores, want.scores, rtol=1e-6, atol=1e-35)
        same = (first.topk_idx == want.topk_idx).all(dim=1)
        assert int((~same).sum()) <= 2 + tokens // 10
        if not rule.has_closed_groups:  # what differs is nearly tied
            values = (logits if rule.select_by == "logits" else want.scores).clone()
            if rule.selection_bias:
                values += given["selection_bias"]
            a, b = (values.gather(1, r.topk_idx) for r in (first, want))
            torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)
        near(first.topk_weights[same], want.topk_weights[same])
        length = tokens // sequences
        rows = first.topk_idx + (torch.arange(tokens) // length * experts)[:, None]
        kept = rows[~given["padding"]].flatten()
        counts = torch.bincount(kept, minlength=sequences * experts)
        assert torch.equal(first.tokens_per_expert, counts)

        given["given_idx"] = want.topk_idx
        there = {name: moved(value, "cuda") for name, value in given.items()}
        replay, twin = (
            ops.router_topk(logits, k, **given),
            ops.router_topk(logits.cuda(), k, **there),
        )
        near(twin.topk_weights.cpu(), replay.topk_weights)
        assert torch.equal(twin.tokens_per_expert.cpu(), replay.tokens_per_expert)


@SIZES
@pytest.mark.parametrize("groups", [1, 2, 4, 64, 257, 512])
@pytest.mark.parametrize("closed", [0.0, -float("inf")])
def test_choices_by_logits_are_those_of_the_cpu(experts: int, groups: int, closed: float) -> None:
    """Ties among few values, -0, infinities and NaN among them."""
    if experts % groups:
        pytest.skip("groups must divide the experts")
    few = torch.tensor([-float("inf"), -1.0, -0.0, 0.0, 0.5, 1.0, float("inf"), float("nan")])
    options: dict[str, Any] = {"select_by": "logits", "closed_value": closed}
    options |= {"num_groups": groups, "topk_groups": -(-groups // 3)}
    for values in (few, few[1:6], few[2:4]):
        logits = values[torch.randint(len(values), (500, experts))]
        for best in {1, min(2, experts // groups), experts // groups}:
            given = {**options, "best_per_group": best}
            want, first, again = on_both("router_topk", logits, min(32, experts), **given)
            assert torch.equal(first.topk_idx, want.topk_idx)
            assert torch.equal(first.topk_idx, again.topk_idx)
            assert torch.equal(first.tokens_per_expert, want.tokens_per_expert)


@SIZES
@EACH
def test_backward(rule: RoutingRule, experts: int) -> None:
    options = {name: rule.options()[name] for name in OF_WEIGHTS}
    for tokens, top_k in ((1, 1), (333, 4), (4099, 8), (1000, 32)):
        k = min(top_k, experts)
        logits = 2 * torch.randn(tokens, experts)
        idx = torch.randint(experts, (tokens, k)) if tokens == 333 else None
        routed = ops.router_topk(logits, k, given_idx=idx, **options)
        dweights, dscores = torch.randn(tokens, k), torch.randn(tokens, experts)
        for a, b in ((dweights, None), (None, dscores), (dweights, dscores)):
            want, first, again = on_both("router_topk_backward", a, b, *routed[:3], **options)
            assert torch.equal(first, again)
            assert relative_error(first, want) < 1e-6 or (first - want).abs().max() < 1e-6


def test_ids_that_name_no_expert(device: torch.device) -> None:
    """-1: weight zero. Other ids out of range: NaN. Not counted, without a gradient; the other
    tokens as ever."""
    logits = torch.randn(40, 60)
    idx = torch.randint(60, (40, 4))
    want = ops.router_topk(logits, 4, given_idx=idx)
    bad = idx.clone()
    bad[3, 1], bad[7, 0], bad[9, 2] = -1, 60, 2**40
    got = moved(ops.router_topk(logits.to(device), 4, given_idx=bad.to(device)), "cpu")
    good = (bad == idx).all(dim=1)
    near(got.topk_weights[good], want.topk_weights[good])
    assert got.topk_weights[[7, 9]].isnan().any(dim=1).all()
    assert got.topk_weights[3].isfinite().all()
    assert got.topk_weights[3, 1] == 0
    assert int(got.tokens_per_expert.sum()) == 160 - 3
    given = moved((torch.ones(40, 4), want.scores, bad, want.topk_weights), device)
    d = ops.router_topk_backward(given[0], None, *given[1:], normalize=False).cpu()
    assert d.isfinite().all()


@EACH
def test_in_a_graph(rule: RoutingRule, device: torch.device) -> None:
    """Forward and backward, replayed on other logits, three times in a row."""
    options = options_of(rule, 256)
    logits = torch.randn(1000, 256, device=device, requires_grad=True)
    padding = (torch.rand(1000) < 0.2).to(device)
    dweights = torch.randn(1000, 8, device=device)

    def step() -> list[Tensor]:
        routed = router_topk(logits, 8, padding=padding, **options)
        (d,) = torch.autograd.grad(routed.topk_weights, logits, dweights)
        return [*(t.detach() for t in routed), d]

    graph, captured = capture(step)
    for _ in range(3):
        with torch.no_grad():
            logits.normal_()
        graph.replay()
        got = [t.clone() for t in captured]
        assert_equal(got, step())


def test_a_token_does_not_depend_on_the_batch(device: torch.device) -> None:
    logits = torch.randn(5000, 256, device=device)
    whole = ops.router_topk(logits, 8)
    for part in (slice(0, 1), slice(17, 100), slice(4000, 5000)):
        alone = ops.router_topk(logits[part].contiguous(), 8)
        assert all(torch.equal(a[part], b) for a, b in zip(whole[:3], alone[:3], strict=True))
