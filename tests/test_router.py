"""Router: choices and weights against a loop over tokens, losses against float64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass.nn import LossCoefficients, Router, Routing, RoutingRule, z_loss
from reference import relative_error
from reference_router import AFTER, RULES, V3, experts_of, scores_of, weights_of

EACH = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def router_of(rule: RoutingRule) -> Router:
    """With no two parameters or biases alike."""
    router = Router(32, 12, 4, rule)
    with torch.no_grad():
        for t in (router.bias, router.selection_bias, router.input_scale, router.expert_scale):
            if t is not None:
                t.normal_()
    return router


def logits_of(router: Router, x: Tensor) -> Tensor:
    """[T, E] in float64 from the router's parameters in float64, by the definition."""
    if router.rule.input_norm_eps is not None:
        mean = (x * x).mean(dim=1, keepdim=True)
        x = x / torch.sqrt(mean + router.rule.input_norm_eps) * router.input_scale.double()
        x = x / math.sqrt(router.hidden_size)
    logits = x @ router.weight.double().T
    return logits if router.bias is None else logits + router.bias.double()


def balancing_loss_of(scores: Tensor, top_k: int) -> Tensor:
    """E / (k T) sum_e n_e mean_t p_te, n_e by unbiased scores without groups."""
    tokens, experts = scores.shape
    counts = [0] * experts
    for row in scores.tolist():
        for e in experts_of(RoutingRule(), row, top_k):
            counts[e] += 1
    p = scores / scores.sum(dim=1, keepdim=True)
    return experts / (top_k * tokens) * sum(n * p[:, e].mean() for e, n in enumerate(counts))


@EACH
def test_choices_weights_and_gradients_against_float64(rule: RoutingRule) -> None:
    router = router_of(rule)
    x = torch.randn(50, 32, requires_grad=True)
    routing = router(x)
    x64 = x.detach().double().requires_grad_()
    logits = logits_of(router, x64)
    scores = scores_of(rule, logits)
    compared = (scores if rule.select_by == "scores" else logits).detach()
    if router.selection_bias is not None:
        compared = compared + router.selection_bias.double()
    want = torch.tensor([experts_of(rule, row, 4) for row in compared.tolist()])
    assert torch.equal(routing.topk_idx, want)
    assert torch.equal(routing.tokens_per_expert, torch.bincount(want.flatten(), minlength=12))
    weights = weights_of(rule, logits, scores, want)
    if router.expert_scale is not None:
        weights = weights * router.expert_scale.double()[want]
    pairs = ((routing.logits, logits), (routing.scores, scores), (routing.topk_weights, weights))
    for got, exact in pairs:
        assert relative_error(got.detach(), exact.detach()) < 1e-6

    by = torch.randn(50, 4)
    leaves = list(router.parameters())
    got = torch.autograd.grad((routing.topk_weights * by).sum(), [x, *leaves], retain_graph=True)
    exact = torch.autograd.grad((weights * by).sum(), [x64, *leaves])
    for a, b in zip(got, exact, strict=True):
        assert relative_error(a, b) < 1e-6


@EACH
@pytest.mark.parametrize("sequences", [1, 5])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_losses_against_float64(rule: RoutingRule, sequences: int, padded: bool) -> None:
    router = router_of(rule)
    x = torch.randn(50, 32)
    padding = torch.rand(50) < 0.3 if padded else None
    routing = router(x, padding=padding)
    real = torch.ones(50, dtype=torch.bool) if padding is None else ~padding
    logits = logits_of(router, x.double())
    parts = [
        scores_of(rule, some[keep])
        for some, keep in zip(logits.chunk(sequences), real.chunk(sequences), strict=True)
    ]
    losses = {
        "balancing": (
            router.balancing_loss(routing, sequences=sequences),
            sum(balancing_loss_of(part, 4) for part in parts) / sequences,
        ),
        "z": (z_loss(routing), (torch.logsumexp(logits[real], dim=1) ** 2).mean()),
    }
    assert int(routing.tokens_per_expert.sum()) == 4 * int(real.sum())
    for name, (got, want) in losses.items():
        assert abs(got.item() / want.item() - 1) < 1e-6, name
        a, b = (torch.autograd.grad(t, router.weight, retain_graph=True)[0] for t in (got, want))
        assert relative_error(a, b) < 2e-6, name


def test_a_loss_per_sequence_is_the_mean_of_a_call_per_sequence() -> None:
    router = router_of(V3)
    x = torch.randn(60, 32)
    each = [router.balancing_loss(router(part)) for part in x.split(20)]
    whole = router.balancing_loss(router(x), sequences=3)
    torch.testing.assert_close(whole, torch.stack(each).mean())
    with pytest.raises(ValueError, match="sequences must divide the number of tokens 60; got 7"):
        router.balancing_loss(router(x), sequences=7)


def test_a_sequence_of_padding_has_no_loss() -> None:
    router = Router(32, 12, 4)
    x = torch.randn(40, 32)
    padding = torch.arange(40) >= 20
    routing = router(x, padding=padding)
    alone = router.balancing_loss(router(x[:20]))
    torch.testing.assert_close(router.balancing_loss(routing, sequences=2), alone / 2)
    torch.testing.assert_close(router.balancing_loss(routing), alone)
    assert z_loss(router(x, padding=padding | True)) == 0


ALL_LOSSES = LossCoefficients(balancing=0.5, balancing_per_sequence=0.25, z=0.125)


def losses_by_hand(router: Router, routing: Routing, sequences: int) -> dict[str, Tensor]:
    return {
        "balancing": router.balancing_loss(routing),
        "balancing_per_sequence": router.balancing_loss(routing, sequences=sequences),
        "z": z_loss(routing),
    }


@EACH
def test_coefficients_are_the_losses_added_by_hand(rule: RoutingRule) -> None:
    router = router_of(rule)
    twin = copy.deepcopy(router)
    twin.coefficients = ALL_LOSSES
    x, padding, by = torch.randn(50, 32), torch.rand(50) < 0.3, torch.randn(50, 4)
    routing = router(x, padding=padding)
    assert routing.losses == {}
    losses = losses_by_hand(router, routing, 5)
    added = sum(getattr(ALL_LOSSES, name) * loss for name, loss in losses.items())
    ((routing.topk_weights * by).sum() + added).backward()
    got = twin(x, padding=padding, sequences=5)
    assert torch.equal(got.topk_weights, routing.topk_weights)
    assert set(got.losses) == set(losses)
    for name, loss in got.losses.items():
        assert not loss.requires_grad
        assert torch.equal(loss, losses[name]), name
    (got.topk_weights * by).sum().backward()
    for a, b in zip(twin.parameters(), router.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_coefficients_without_gradients() -> None:
    """Under no_grad, frozen, and with no token there is nothing to add to, and no error."""
    router = Router(32, 12, 4, coefficients=ALL_LOSSES)
    with torch.no_grad():
        assert set(router(torch.randn(6, 32)).losses) == set(vars(ALL_LOSSES))
    router(torch.zeros(0, 32)).topk_weights.sum().backward()
    assert not router.weight.grad.any()
    assert not router.requires_grad_(False)(torch.randn(6, 32)).topk_weights.requires_grad
    with pytest.raises(ValueError, match=r"z must be finite and not negative; got -1"):
        LossCoefficients(z=-1.0)


@EACH
def test_replay_takes_the_experts_and_this_routers_weights(rule: RoutingRule) -> None:
    """Weights and gradients against float64; the losses count this router's own top k."""
    router = router_of(rule)
    x, by = torch.randn(50, 32), torch.randn(50, 4)
    idx = torch.rand(50, 12).topk(4).indices
    routing = router(x, topk_idx=idx)
    assert routing.topk_idx is idx
    assert torch.equal(routing.tokens_per_expert, torch.bincount(idx.flatten(), minlength=12))
    logits = logits_of(router, x.double())
    weights = weights_of(rule, logits, scores_of(rule, logits), idx)
    if router.expert_scale is not None:
        weights = weights * router.expert_scale.double()[idx]
    torch.testing.assert_close(routing.topk_weights.double(), weights, rtol=1e-5, atol=1e-6)
    leaves = list(router.parameters())
    got = torch.autograd.grad((routing.topk_weights * by).sum(), leaves, retain_graph=True)
    for a, b in zip(got, torch.autograd.grad((weights * by).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    own = losses_by_hand(router, router(x), 5)
    for name, loss in losses_by_hand(router, routing, 5).items():
        assert torch.equal(loss, own[name]), name


def test_replay_of_the_choice_itself_changes_no_bit() -> None:
    router = router_of(V3)
    x = torch.randn(50, 32)
    first = router(x)
    again = router(x, topk_idx=first.topk_idx)
    for a, b in zip(first[:5], again[:5], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["softmax", "deepseek_v3"])
def test_counts_of_earlier_microbatches(name: str) -> None:
    """Two microbatches with the counts of both: the loss of the whole batch, and its gradient."""
    router = router_of(RULES[name])
    x = torch.randn(60, 32)
    whole = router.balancing_loss(router(x))
    parts = [router(part) for part in x.split([20, 40])]
    counts = sum(router.count(part) for part in parts)
    losses = [router.balancing_loss(part, counts=counts) for part in parts]
    together = losses[0] / 3 + 2 * losses[1] / 3
    torch.testing.assert_close(together, whole)
    a, b = (torch.autograd.grad(t, router.weight)[0] for t in (together, whole))
    torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="counts must come without sequences; got 2"):
        router.balancing_loss(parts[0], counts=counts, sequences=2)


def routed(rule: RoutingRule, top_k: int, logits: list[float]) -> tuple[Router, Routing, Tensor]:
    """One token with these logits, and the logits as a leaf."""
    router = Router(1, len(logits), top_k, rule)
    with torch.no_grad():
        router.weight.copy_(torch.tensor(logits)[:, None])
    return router, router(torch.ones(1, 1)), router.weight


def test_the_group_of_the_best_expert_as_in_deepseek_v2() -> None:
    logits = [math.log(p) for p in (0.45, 0.01, 0.27, 0.27)]
    for best, expert in ((1, 0), (2, 2)):
        rule = RoutingRule(num_groups=2, topk_groups=1, best_per_group=best, normalize=False)
        assert routed(rule, 1, logits)[1].topk_idx.tolist() == [[expert]]


def test_groups_by_logits_as_in_megatron() -> None:
    rule = RoutingRule(**AFTER, num_groups=2, topk_groups=1, best_per_group=2)
    assert sorted(routed(rule, 2, [4, -9, 2, 2.9])[1].topk_idx[0].tolist()) == [2, 3]


def test_a_loss_with_a_selection_bias_counts_unbiased_scores() -> None:
    rule = RoutingRule(score="sigmoid", selection_bias=True, normalize=False)
    router, _, logits = routed(rule, 1, [math.log(1.5), math.log(2 / 3)])  # sigmoids .6, .4
    router.selection_bias.copy_(torch.tensor([0.0, 1.0]))
    routing = router(torch.ones(1, 1))
    assert routing.topk_idx.item() == 1
    loss = router.balancing_loss(routing)
    loss.backward()
    assert abs(loss.item() - 1.2) < 1e-6
    torch.testing.assert_close(logits.grad.flatten(), torch.tensor([0.192, -0.192 * 1.5]))


def test_one_expert_by_sigmoid_or_sqrt_softplus() -> None:
    _, routing, logits = routed(RoutingRule(score="sigmoid", normalize=False), 1, [0, 1])
    routing.topk_weights.sum().backward()
    assert abs(routing.topk_weights.item() - 0.7311) < 1e-4
    assert abs(logits.grad[1].item() - 0.1966) < 1e-4
    rule = RoutingRule(score="sqrt_softplus", normalize=False)
    assert abs(routed(rule, 1, [0, 1])[1].topk_weights.item() - 1.14598) < 1e-5


@pytest.mark.parametrize(
    "rule", [RoutingRule(), RoutingRule(score="sigmoid"), RoutingRule(**AFTER)], ids=str
)
def test_a_constant_weight_is_refused_unless_asked_for(rule: RoutingRule) -> None:
    with pytest.raises(ValueError, match=r"top_k must be at least 2 .* gives the gate no grad"):
        Router(64, 4, 1, rule)
    asked = {**vars(rule), "constant_weights": True}
    assert (Router(64, 4, 1, RoutingRule(**asked))(torch.randn(5, 64)).topk_weights == 1).all()


def test_the_selection_bias_stays_float32() -> None:
    router = Router(16, 2, 1, RoutingRule(selection_bias=True, normalize=False))
    router.selection_bias[0] = 1 + 2**-20
    for cast in (torch.nn.Module.bfloat16, torch.nn.Module.half, torch.nn.Module.double):
        twin = cast(copy.deepcopy(router))
        assert twin.weight.dtype != torch.float32
        assert twin.selection_bias.dtype == torch.float32
        assert torch.equal(twin.selection_bias, router.selection_bias)
        assert twin.state_dict()["selection_bias"].data_ptr() == twin.selection_bias.data_ptr()
    router = Router(16, 2, 1, RoutingRule(selection_bias=True, normalize=False)).bfloat16()
    for _ in range(2000):
        router.update_selection_bias(torch.tensor([0, 1]))
    torch.testing.assert_close(router.selection_bias, torch.tensor([2.0, -2.0]), atol=1e-3, rtol=0)
    assert router.to("meta").bfloat16().selection_bias.is_meta
    assert router.to_empty(device="cpu").selection_bias.dtype == torch.float32


@EACH
def test_a_router_of_no_tokens(rule: RoutingRule) -> None:
    router = router_of(rule)
    x = torch.zeros(0, 32, requires_grad=True)
    routing = router(x)
    assert routing.topk_idx.shape == routing.topk_weights.shape == (0, 4)
    assert not routing.tokens_per_expert.any()
    loss = router.balancing_loss(routing) + router.balancing_loss(routing, sequences=2)
    loss = loss + z_loss(routing)
    assert loss == 0
    (routing.topk_weights.sum() + loss).backward()
    assert x.grad is not None
    assert not router.weight.grad.any()


def test_balanced_routing_has_loss_one_and_collapse_num_experts() -> None:
    router = Router(8, 8, 1, RoutingRule(normalize=False))
    with torch.no_grad():
        router.weight.copy_(torch.eye(8) * 100)
    assert abs(router.balancing_loss(router(torch.eye(8))).item() - 1) < 1e-5
    one = router(torch.eye(8)[:1].expand(8, 8))
    assert abs(router.balancing_loss(one).item() - 8) < 1e-4
    assert one.tokens_per_expert.tolist() == [8, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_a_token_that_no_expert_wants_has_a_finite_loss(score: Any) -> None:
    router = Router(32, 8, 2, RoutingRule(score=score, normalize=score == "sigmoid"))
    with torch.no_grad():
        router.weight.fill_(-1.0)
    x = torch.full((4, 32), 4.0, requires_grad=True)  # scores of -128, 0 in float32
    routing = router(x)
    assert routing.topk_weights.max() < 1e-18
    loss = router.balancing_loss(routing)
    assert loss.isfinite()
    (routing.topk_weights.sum() + loss).backward()
    assert x.grad.isfinite().all()
    assert router.weight.grad.isfinite().all()


def test_balancing_loss_pushes_towards_balance() -> None:
    router = Router(16, 4, 1, RoutingRule(normalize=False))
    x = torch.randn(256, 16) + 1
    with torch.no_grad():
        router.weight[0] += 0.5
    first = router(x)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.5)
    for _ in range(50):
        optimizer.zero_grad()
        router.balancing_loss(router(x)).backward()
        optimizer.step()
    last = router(x)
    assert router.balancing_loss(last) < router.balancing_loss(first)
    assert last.tokens_per_expert.max() < first.tokens_per_expert.max()


def test_selection_bias_moves_against_the_load() -> None:
    router = Router(8, 4, 2, RoutingRule(selection_bias=True))
    router.update_selection_bias(torch.tensor([10, 2, 0, 4]), rate=0.5)
    assert router.selection_bias.tolist() == [-0.5, 0.5, 0.5, 0.0]
    assert "selection_bias" in router.state_dict()
    with pytest.raises(ValueError, match="selection_bias=True"):
        Router(8, 4, 2).update_selection_bias(torch.zeros(4))


@pytest.mark.parametrize("name", ["softmax_after_groups", "gemma4", "deepseek_v3"])
def test_compiles_to_the_same_bits(name: str) -> None:
    torch._dynamo.reset()
    router = router_of(RULES[name])
    router.coefficients = ALL_LOSSES
    padding = torch.arange(40) > 30

    def step(x: Tensor) -> list[Tensor]:
        routing = router(x, padding=padding, sequences=2)
        replayed = router(x, topk_idx=routing.topk_idx.flip(0))
        return [*routing[:5], *routing.losses.values(), replayed.topk_weights]

    x = torch.randn(40, 32)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    grads = []
    for got, want in zip(compiled(x), step(x), strict=True):
        assert torch.equal(got, want)
    for run in (compiled, step):
        router.zero_grad()
        out = run(x)
        (out[1].square().sum() + out[-1].square().sum()).backward()
        grads.append([p.grad for p in router.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "relu"}, "score must be one of .* 'relu'"),
        ({"select_by": "bias"}, "select_by must be one of .* 'bias'"),
        ({"closed_value": 1.0}, "closed_value must be one of .* 1.0"),
        ({"num_groups": 0}, "num_groups must be at least 1; got 0"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups .* 5"),
        ({"num_groups": 4, "topk_groups": 2}, "best_per_group must be given .* got None"),
        ({"softmax_after_topk": True}, "softmax_after_topk must .* 'scores'"),
        ({**AFTER, "score": "sigmoid"}, "softmax_after_topk must .* 'sigmoid'"),
        ({**AFTER, "selection_bias": True}, "selection_bias must .* 'logits'"),
        ({"epsilon": -1.0}, "epsilon must .* -1.0"),
    ],
)
def test_bad_rule(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingRule(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1; got 0"),
        ({"num_experts": 0}, "num_experts must be at least 1; got 0"),
        ({"top_k": 0}, r"top_k must be in \[1, 12\]; got 0"),
        ({"rule": RoutingRule(num_groups=5, topk_groups=5)}, "num_groups .* 5"),
        ({"rule": RULES["best_of_a_group"], "top_k": 7}, r"top_k .* \[1, 6\]; got 7"),
        (
            {"rule": RoutingRule(num_groups=6, topk_groups=3, best_per_group=3)},
            r"best_per_group must be in \[1, 2\]; got 3",
        ),
    ],
)
def test_bad_router(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(**{"hidden_size": 16, "num_experts": 12, "top_k": 4, **options})


@pytest.mark.parametrize("shape", [(3, 8), (16,), (2, 3, 16)])
def test_a_router_refuses_other_tokens(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"x must be \[T, 16\]; got"):
        Router(16, 12, 4)(torch.zeros(shape))


@pytest.mark.parametrize("padding", [torch.zeros(3), torch.zeros(4, dtype=torch.bool)], ids=str)
def test_a_router_refuses_other_padding(padding: Tensor) -> None:
    rule = r"padding must be bool \[3\], True for padding \(attention_mask == 0\); got"
    with pytest.raises(ValueError, match=rule):
        Router(16, 12, 4)(torch.zeros(3, 16), padding=padding)


@pytest.mark.parametrize(
    "idx", [torch.zeros(3, 4), torch.zeros(3, 3, dtype=torch.int64)], ids=["dtype", "shape"]
)
def test_a_router_refuses_other_experts(idx: Tensor) -> None:
    with pytest.raises(ValueError, match=r"topk_idx must be integers \[3, 4\]; got"):
        Router(16, 12, 4)(torch.zeros(3, 16), topk_idx=idx)


@pytest.mark.parametrize("wrong", [-2, 12])
def test_a_router_refuses_experts_that_do_not_exist(wrong: int) -> None:
    idx = torch.zeros(3, 4, dtype=torch.int64)
    idx[1, 2] = wrong
    with pytest.raises(ValueError, match=rf"topk_idx must be in \[-1, 12\); got {wrong}"):
        Router(16, 12, 4)(torch.zeros(3, 16), topk_idx=idx)


def test_a_replayed_token_may_name_an_expert_twice() -> None:
    router, x = Router(16, 12, 2, RoutingRule(normalize=False)), torch.randn(3, 16)
    routing = router(x, topk_idx=torch.tensor([[5, 5]] * 3))
    assert torch.equal(routing.topk_weights, routing.scores[:, [5, 5]])
    assert int(routing.tokens_per_expert[5]) == 6


# ---- padding that is not finite ------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_padding_that_is_not_finite_influences_nothing(rule: RoutingRule, bad: float) -> None:
    """Losses and gradients as of padding of zeros."""
    router = router_of(rule)
    router.coefficients = LossCoefficients(balancing=1.0, balancing_per_sequence=1.0, z=1.0)
    x, padding = torch.randn(12, 32), torch.zeros(12, dtype=torch.bool)
    padding[4:6] = padding[11] = True

    def step(fill: float) -> list[Tensor]:
        tokens = x.clone()
        tokens[5, 7] = tokens[11] = fill
        routing = router(tokens, padding=padding, sequences=2)
        kept = routing.topk_weights[~padding].square().sum() + z_loss(routing)
        grads = torch.autograd.grad(kept, [*router.parameters()], allow_unused=True)
        return [*routing.losses.values(), kept.detach(), *(g for g in grads if g is not None)]

    zeros = x.clone()
    zeros[5] = zeros[11] = 0.0
    x = zeros
    assert all(map(torch.equal, step(bad), step(0.0)))
    assert all(t.isfinite().all() for t in step(bad))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_gradients_of_weights_of_padding_go_nowhere(rule: RoutingRule) -> None:
    """As experts make them of tokens that are not finite."""
    router, x = router_of(rule), torch.randn(12, 32)
    padding = torch.arange(12) % 5 == 3
    dweights = torch.randn(12, router.top_k)

    def grads(fill: float) -> list[Tensor]:
        d = dweights.masked_fill(padding[:, None], fill)
        weights = router(x, padding=padding).topk_weights
        found = torch.autograd.grad(weights, [*router.parameters()], d, allow_unused=True)
        return [g for g in found if g is not None]

    assert all(map(torch.equal, grads(math.nan), grads(0.0)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_of_logits_that_are_not_finite_in_padding(bad: float) -> None:
    """Of a Routing that another router made."""
    router = Router(32, 4, 2)
    routing = router(torch.randn(6, 32), padding=torch.arange(6) == 3)
    of = routing.logits, routing.scores

    def losses() -> list[Tensor]:
        made = [z_loss(routing), router.balancing_loss(routing)]
        pairs = zip(made, of, strict=True)
        return made + [torch.autograd.grad(a, b, retain_graph=True)[0] for a, b in pairs]

    want = losses()
    for t in of:
        t.detach()[3] = bad
    assert all(map(torch.equal, losses(), want))


# ---- what is refused when made -------------------------------------------------------------------

WRONG_RULES: dict[str, tuple[Any, ...]] = {
    "num_groups": (1.5, "1", True, None, torch.ones(2)),
    "topk_groups": (1.0, "1", False),
    "best_per_group": (1.0, "1", True),
    "selection_bias": ("yes", 1, None),
    "gate_bias": ("yes", 1),
    "softmax_after_topk": (0,),
    "normalize": (1, None),
    "expert_scale": ("no",),
    "constant_weights": (1,),
    "score": (None, 1, True, torch.ones(2), ["softmax"]),
    "select_by": (None, torch.ones(2)),
    "closed_value": (False, "0", None, torch.zeros(2)),
    "epsilon": ("1e-20", None, True, math.inf, math.nan, torch.ones(2)),
    "input_norm_eps": (-1.0, False, "1e-6", math.nan),
    "routed_scaling_factor": ("2.5", None, math.nan, -1.0),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_rule_refuses_wrong_types_when_made(name: str) -> None:
    for value in WRONG_RULES[name]:
        with pytest.raises(ValueError, match=rf"^\[RoutingRule\] {name} must be .*; got"):
            RoutingRule(**{name: value})


def test_sizes_beyond_the_operator_are_refused_when_made() -> None:
    Router(16, 1024, 32)
    with pytest.raises(ValueError, match=r"\[Router\] num_experts must be at most 1024; got 1025"):
        Router(16, 1025, 2)
    with pytest.raises(ValueError, match=r"\[Router\] top_k must be at most 32; got 33"):
        Router(16, 64, 33)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("meta", [True, False])
def test_a_selection_bias_is_loaded_as_float32(
    dtype: torch.dtype, assign: bool, meta: bool
) -> None:
    rule = RoutingRule(selection_bias=True)
    state = Router(16, 4, 2, rule).state_dict() | {"selection_bias": torch.arange(4).to(dtype)}
    router = Router(16, 4, 2, rule, device="meta" if meta else None)
    if meta and not assign:
        router.to_empty(device="cpu")
    model = torch.nn.Sequential(router)
    model.load_state_dict({f"0.{name}": t for name, t in state.items()}, assign=assign)
    assert router.selection_bias.dtype == torch.float32
    router.update_selection_bias(torch.tensor([9, 1, 9, 1]), rate=2**-20)
    assert router.selection_bias.tolist() == [-(2**-20), 1 + 2**-20, 2 - 2**-20, 3 + 2**-20]
    router(torch.randn(3, 16))
