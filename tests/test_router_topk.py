"""ops.router_topk and its gradient: against float64, at their edges, and what they refuse."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8moe_cutlass.autograd import router_topk
from fp8moe_cutlass.nn import RoutingRule
from on_device import CPU_ONLY, ops
from reference import relative_error
from reference_router import RULES, experts_of, scores_of, weights_of

pytestmark = pytest.mark.usefixtures("device")

EACH = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
LARGE = pytest.mark.parametrize(
    ("experts", "top_k"), [(1, 1), (2, 2), (60, 4), (128, 8), (257, 8), (256, 32), (1024, 32)]
)


Given = dict[str, Any]


def fitted(rule: RoutingRule, experts: int) -> RoutingRule:
    """With groups that divide so many experts."""
    if not rule.has_closed_groups:
        return rule
    groups = max(g for g in (1, 2, 3, 4, 12) if experts % g == 0)
    assert rule.best_per_group is not None
    best = min(rule.best_per_group, experts // groups)
    return replace(rule, num_groups=groups, topk_groups=-(-groups // 2), best_per_group=best)


def problem(rule: RoutingRule, experts: int = 12) -> tuple[Tensor, Tensor | None]:
    """Logits of 50 tokens and a selection bias."""
    generator = torch.Generator().manual_seed(experts)
    logits = 2 * torch.randn(50, experts, generator=generator)
    bias = torch.randn(experts, generator=generator)
    return logits, bias if rule.selection_bias else None


def exact(
    rule: RoutingRule, logits: Tensor, bias: Tensor | None, top_k: int, idx: Tensor | None = None
) -> list[Tensor]:
    """scores, topk_idx, topk_weights in float64, token by token."""
    scores = scores_of(rule, logits)
    compared = (scores if rule.select_by == "scores" else logits).detach()
    if bias is not None:
        compared = compared + bias.double()
    if idx is None:
        idx = torch.tensor([experts_of(rule, row, top_k) for row in compared.tolist()])
    return [scores, idx, weights_of(rule, logits, scores, idx)]


@LARGE
@EACH
def test_against_float64(rule: RoutingRule, experts: int, top_k: int) -> None:
    """Choices, weights, counts, and the gradient of both outputs."""
    rule = fitted(rule, experts)
    logits, bias = problem(rule, experts)
    padding = torch.arange(50) % 7 == 0
    leaf, leaf64 = logits.clone().requires_grad_(), logits.double().requires_grad_()
    given: Given = {"selection_bias": bias, "padding": padding, "sequences": 2, **rule.options()}
    got = router_topk(leaf, top_k, **given)
    scores, idx, weights = exact(rule, leaf64, bias, top_k)
    assert torch.equal(got.topk_idx, idx)
    assert relative_error(got.scores.detach(), scores.detach()) < 1e-6
    assert relative_error(got.topk_weights.detach(), weights.detach()) < 1e-6
    counts = [
        torch.bincount(half[keep].flatten(), minlength=experts)
        for half, keep in zip(idx.chunk(2), (~padding).chunk(2), strict=True)
    ]
    assert torch.equal(got.tokens_per_expert, torch.cat(counts))

    by_weights, by_scores = torch.randn(50, top_k), torch.randn(50, experts)
    for a, b in ((1, 0), (0, 1), (1, 1)):
        losses = [
            a * (w * by_weights).sum() + b * (s * by_scores).sum()
            for w, s in ((got.topk_weights, got.scores), (weights, scores))
        ]
        (d,) = torch.autograd.grad(losses[0], leaf, retain_graph=True)
        (want,) = torch.autograd.grad(losses[1], leaf64, retain_graph=True)
        assert relative_error(d, want) < 1e-6 or (d - want).abs().max() < 1e-6


@EACH
def test_a_gradient_of_one_output_alone(rule: RoutingRule) -> None:
    """What autograd does not ask for is None to the op, and counts as zeros."""
    logits, _ = problem(rule)
    routed = ops.router_topk(logits, 4, **rule.options())
    names = ("score", "softmax_after_topk", "normalize", "epsilon", "routed_scaling_factor")
    of_weights = {name: rule.options()[name] for name in names}
    dweights, dscores = torch.randn(50, 4), torch.randn(50, 12)
    for missing in (0, 1):
        d: list[Tensor | None] = [dweights, dscores]
        zeros = list(d)
        d[missing], zeros[missing] = None, torch.zeros_like(d[missing])
        both = [ops.router_topk_backward(*g, *routed[:3], **of_weights) for g in (d, zeros)]
        torch.testing.assert_close(*both, rtol=0, atol=0)


@EACH
def test_replay(rule: RoutingRule) -> None:
    """Any experts, one of them twice; their gradients add up."""
    logits, bias = problem(rule)
    idx = torch.randint(12, (50, 4))
    idx[:, 3] = idx[:, 0]
    leaf, leaf64 = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got = router_topk(leaf, 4, given_idx=idx, selection_bias=bias, **rule.options())
    assert got.topk_idx is idx
    assert torch.equal(got.tokens_per_expert, torch.bincount(idx.flatten(), minlength=12))
    _, _, weights = exact(rule, leaf64, bias, 4, idx)
    assert relative_error(got.topk_weights.detach(), weights.detach()) < 1e-6
    by = torch.randn(50, 4)
    (d,) = torch.autograd.grad((got.topk_weights * by).sum(), leaf)
    (want,) = torch.autograd.grad((weights * by).sum(), leaf64)
    assert relative_error(d, want) < 1e-6


@EACH
def test_minus_one_names_no_expert(rule: RoutingRule) -> None:
    """Weights and gradients are those of the slots that name one; tokens that name none have 0."""
    logits, bias = problem(rule)
    idx = torch.rand(50, 12).topk(4).indices
    idx[:, 2] = -1
    idx[::7] = -1
    named, slots = torch.arange(50) % 7 != 0, [0, 1, 3]
    given: Given = rule.options()
    got = ops.router_topk(logits, 4, given_idx=idx, selection_bias=bias, **given)
    counts = torch.bincount(idx[named][:, slots].flatten(), minlength=12)
    assert torch.equal(got.tokens_per_expert, counts)
    leaf = logits.double().requires_grad_()
    kept = None if bias is None else bias
    _, _, weights = exact(rule, leaf, kept, 3, idx[:, slots].clamp(min=0))
    want = torch.zeros(50, 4, dtype=torch.float64)
    want[:, slots] = weights * named[:, None]
    assert relative_error(got.topk_weights, want.detach()) < 1e-6
    assert not got.topk_weights[idx < 0].any()
    by = torch.randn(50, 4)
    names = ("score", "softmax_after_topk", "normalize", "epsilon", "routed_scaling_factor")
    poisoned = by.masked_fill(idx < 0, torch.nan)
    d = ops.router_topk_backward(
        poisoned, None, got.scores, idx, got.topk_weights, **{name: given[name] for name in names}
    )
    (dwant,) = torch.autograd.grad((want * by).sum(), leaf)
    assert relative_error(d, dwant) < 1e-5


@EACH
def test_of_equals_the_lower_wins(rule: RoutingRule) -> None:
    """Whole tokens of ties, and ties among few values, -0 and 0 among them."""
    rule = replace(fitted(rule, 24), selection_bias=False)
    given: Given = rule.options()
    assert (ops.router_topk(torch.zeros(9, 24), 8, **given).topk_idx == torch.arange(8)).all()
    few = torch.tensor([-0.0, 0.0, 1.0])[torch.randint(3, (200, 24))]
    given = {**given, "select_by": "logits"}
    got = ops.router_topk(few, 8, **given).topk_idx
    want = torch.tensor([experts_of(rule, row, 8) for row in few.tolist()])
    assert torch.equal(got, want)


@pytest.mark.parametrize("sequences", [1, 3])
def test_no_tokens(sequences: int) -> None:
    logits = torch.zeros(0, 12, requires_grad=True)
    got = router_topk(logits, 4, sequences=sequences)
    assert [tuple(t.shape) for t in got] == [(0, 12), (0, 4), (0, 4), (12 * sequences,)]
    assert not got.tokens_per_expert.any()
    (got.topk_weights.sum() + got.scores.sum()).backward()
    assert logits.grad is not None


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_values_that_are_no_numbers(score: str) -> None:
    """NaN comes first, -inf last; experts of a token are distinct and exist whatever it holds."""
    logits = torch.zeros(5, 40)
    logits[0, 7] = math.nan
    logits[1] = math.nan
    logits[2] = -math.inf
    logits[3, 9] = math.inf
    logits[4, :38] = -math.inf
    for select_by, groups in itertools.product(("scores", "logits"), (1, 8)):
        best = {"num_groups": groups, "topk_groups": -(-groups // 2), "best_per_group": 2}
        got = ops.router_topk(logits, 12, score=score, select_by=select_by, **best)
        assert got.topk_idx.min() >= 0
        assert got.topk_idx.max() < 40
        assert all(len(set(row)) == 12 for row in got.topk_idx.tolist())
        assert got.tokens_per_expert.sum() == 60
        if select_by == "logits" or score != "softmax":
            assert got.topk_idx[0, 0] == 7
        if select_by == "logits":
            assert got.topk_idx[[3, 4, 4], [0, 0, 1]].tolist() == [9, 38, 39]
            if groups == 1:
                assert got.topk_idx[1].tolist() == got.topk_idx[2].tolist() == list(range(12))


@pytest.mark.parametrize("logit", [-1000.0, -128.0, -90.0, 30.0, 1000.0])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("normalize", [False, True])
def test_extreme_logits_have_finite_gradients(score: str, logit: float, normalize: bool) -> None:
    logits = torch.full((3, 8), logit, requires_grad=True)
    got = router_topk(logits, 2, score=score, normalize=normalize)
    (got.topk_weights.sum() + got.scores.sum()).backward()
    assert got.topk_weights.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@CPU_ONLY
def test_numpy_and_out() -> None:
    logits = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    got = ops.router_topk(logits, 2)
    want = ops.router_topk(torch.from_numpy(logits), 2)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b.numpy())
    out = ops.RouterTopk(*(torch.full_like(t, 7) for t in want))
    assert ops.router_topk(torch.from_numpy(logits), 2, out=out) is out
    for a, b in zip(out, want, strict=True):
        assert torch.equal(a, b)


@CPU_ONLY
def test_another_thread_count_changes_no_bit() -> None:
    logits = torch.randn(500, 60)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(ops.router_topk(logits, 6, score="sqrt_softplus"))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_no_second_derivative() -> None:
    logits = torch.randn(4, 6, requires_grad=True)
    weights = router_topk(logits, 2).topk_weights
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(weights.square().sum(), logits, create_graph=True)


def test_an_exported_program_takes_any_number_of_tokens() -> None:
    class Choice(torch.nn.Module):
        def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            routed = router_topk(logits, 3, score="sigmoid")
            return routed.topk_idx, routed.topk_weights, routed.tokens_per_expert

    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(Choice(), (torch.randn(9, 12),), dynamic_shapes=({0: tokens},))
    for count in (5, 40):
        logits = torch.randn(count, 12)
        assert all(map(torch.equal, program.module()(logits), Choice()(logits)))


def call(**changes: Any) -> ops.RouterTopk:
    """3 tokens, 12 experts, top 4, with changes; the outputs must stay as they are."""
    given: dict[str, Any] = {"logits": torch.zeros(3, 12), "top_k": 4, **changes}
    logits, top_k = given.pop("logits"), given.pop("top_k")
    out = ops.RouterTopk(
        torch.full((3, 12), 7.0),
        torch.full((3, 4), 7),
        torch.full((3, 4), 7.0),
        torch.full((12,), 7),
    )
    out = out._replace(**given.pop("out", {}))
    try:
        return ops.router_topk(logits, top_k, out=out, **given)
    finally:
        assert all((t == 7).all() for t in out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(3)}, "logits must have 2 dimensions"),
        ({"logits": torch.zeros(3, 12).double()}, "logits must be float32"),
        ({"logits": torch.zeros(3, 24)[:, ::2]}, "logits must be contiguous"),
        (
            {"logits": torch.zeros(3, 1025), "out": {"tokens_per_expert": torch.full((1025,), 7)}},
            r"experts must be in \[1, 1024\]; got 1025",
        ),
        (
            {"top_k": 13, "out": {"topk_weights": torch.full((3, 13), 7.0)}},
            r"top_k .* 12\]; got 13",
        ),
        ({"top_k": 5}, r"topk_idx must be \[3, 5\]; got \[3, 4\]"),
        ({"score": "relu"}, "score must be one of .* 'relu'"),
        ({"select_by": "bias"}, "select_by must .* 'bias'"),
        ({"num_groups": 5}, "num_groups must divide the 12 experts; got 5"),
        ({"num_groups": 4, "topk_groups": 5}, r"topk_groups must be in \[1, 4\]; got 5"),
        ({"num_groups": 4, "best_per_group": 4}, r"best_per_group must be in \[1, 3\]; got 4"),
        ({"closed_value": 1.0}, "closed_value must be 0 or -inf; got 1"),
        ({"epsilon": -1.0}, "epsilon must be finite and not negative; got -1"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor must be finite and not 0; got 0"),
        ({"selection_bias": torch.zeros(3)}, r"selection_bias must .*\[12\].*\[3\]"),
        ({"padding": torch.zeros(3)}, "padding must be"),
        ({"given_idx": torch.zeros(3, 4)}, "given_idx must be .*int64"),
        (
            {"sequences": 2, "out": {"tokens_per_expert": torch.full((24,), 7)}},
            "sequences must divide the number of tokens 3; got 2",
        ),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    """And writes nothing."""
    with pytest.raises(ValueError, match=rf"\[router_topk\] .*{message}"):
        call(**changes)


def test_the_gradient_refuses() -> None:
    scores, idx, weights = torch.rand(3, 12), torch.zeros(3, 4, dtype=torch.int64), torch.rand(3, 4)
    for given, message in (
        ((None, None, scores, idx, weights), "dweights or dscores is given; got neither"),
        ((weights[:2], None, scores, idx, weights), "dweights must"),
    ):
        with pytest.raises(ValueError, match=rf"\[router_topk_backward\] .*{message}"):
            ops.router_topk_backward(*given)


@CPU_ONLY
def test_ids_of_no_expert_are_refused() -> None:
    scores, idx, weights = torch.rand(3, 12), torch.zeros(3, 4, dtype=torch.int64), torch.rand(3, 4)
    with pytest.raises(ValueError, match=r"topk_idx must be in \[-1, 12\); got 12 at token 0"):
        call(given_idx=torch.full((3, 4), 12))
    with pytest.raises(ValueError, match=r"topk_idx must be in \[-1, 12\); got -2"):
        ops.router_topk_backward(weights, None, scores, idx - 2, weights)
