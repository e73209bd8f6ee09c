"""Router and MoE: choices against a loop over tokens, gradients against float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import MoE, Router
from reference import moe_experts, relative_error

CHOICES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax_raw": {"normalize": False, "routed_scaling_factor": 2.5},
    "sigmoid": {"score_function": "sigmoid"},
    "bias": {"score_function": "sigmoid", "selection_bias": True},
    "groups": {"num_groups": 4, "topk_groups": 2},
    "groups_of_one": {"num_groups": 12, "topk_groups": 5},
    "deepseek": {
        "score_function": "sigmoid",
        "selection_bias": True,
        "num_groups": 3,
        "topk_groups": 2,
        "routed_scaling_factor": 2.5,
    },
}


def route_token(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    *,
    score_function: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    normalize: bool = True,
    routed_scaling_factor: float = 1.0,
    selection_bias: bool = False,
) -> tuple[list[int], list[Tensor]]:
    """One token's experts, best first, and weights, by the definition."""
    if score_function == "softmax":
        scores = torch.softmax(logits, 0)
    else:
        scores = 1 / (1 + torch.exp(-logits))
    choice = [float(s) + (float(bias[e]) if bias is not None else 0) for e, s in enumerate(scores)]
    size = len(choice) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    best = [sum(sorted((choice[e] for e in group), reverse=True)[:2]) for group in groups]
    open_groups = sorted(range(num_groups), key=lambda g: -best[g])[:topk_groups]
    candidates = [e for g in open_groups for e in groups[g]]
    experts = sorted(candidates, key=lambda e: -choice[e])[:top_k]
    weights = [scores[e] for e in experts]
    if normalize:
        total = sum(weights)
        weights = [w / total for w in weights]
    return experts, [w * routed_scaling_factor for w in weights]


@pytest.mark.parametrize("name", CHOICES)
def test_router_against_a_loop(name: str) -> None:
    torch.manual_seed(0)
    options = CHOICES[name]
    router = Router(32, 12, 4, **options)
    if router.selection_bias is not None:
        router.selection_bias.normal_()
    x = torch.randn(50, 32)
    routing = router(x)
    logits = x.double() @ router.weight.detach().double().T
    counts = torch.zeros(12, dtype=torch.long)
    probability = torch.zeros(12, dtype=torch.float64)
    for t in range(50):
        experts, weights = route_token(logits[t], 4, router.selection_bias, **options)
        assert routing.topk_idx[t].tolist() == experts
        torch.testing.assert_close(
            routing.topk_weights[t].double(), torch.stack(weights), rtol=1e-5, atol=1e-6
        )
        for e in experts:
            counts[e] += 1
        sigmoid = options.get("score_function") == "sigmoid"
        scores = torch.sigmoid(logits[t]) if sigmoid else torch.softmax(logits[t], 0)
        probability += scores / scores.sum() / 50
    assert torch.equal(routing.tokens_per_expert, counts)
    loss = 12 * (counts / 200 * probability).sum()
    torch.testing.assert_close(routing.aux_loss.double(), loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CHOICES)
def test_a_router_of_no_tokens(name: str) -> None:
    router = Router(32, 12, 4, **CHOICES[name])
    x = torch.zeros(0, 32, requires_grad=True)
    routing = router(x)
    assert routing.topk_idx.shape == routing.topk_weights.shape == (0, 4)
    assert not routing.tokens_per_expert.any()
    assert routing.aux_loss == 0
    (routing.topk_weights.sum() + routing.aux_loss).backward()
    assert x.grad is not None
    assert not router.weight.grad.any()


def test_balanced_routing_has_loss_one_and_collapse_num_experts() -> None:
    router = Router(8, 8, 1)
    with torch.no_grad():
        router.weight.copy_(torch.eye(8) * 100)
    assert abs(router(torch.eye(8)).aux_loss.item() - 1) < 1e-5
    one = router(torch.eye(8)[:1].expand(8, 8))
    assert abs(one.aux_loss.item() - 8) < 1e-4
    assert one.tokens_per_expert.tolist() == [8, 0, 0, 0, 0, 0, 0, 0]


def test_a_token_that_no_expert_wants_has_a_finite_loss() -> None:
    router = Router(32, 8, 2, score_function="sigmoid")
    with torch.no_grad():
        router.weight.fill_(-1.0)
    x = torch.full((4, 32), 4.0, requires_grad=True)  # sigmoids of -128, 0 in float32
    routing = router(x)
    assert not routing.topk_weights.any()
    assert routing.aux_loss == 0
    (routing.topk_weights.sum() + routing.aux_loss).backward()
    assert not x.grad.any()
    assert not router.weight.grad.any()


def test_aux_loss_pushes_towards_balance() -> None:
    torch.manual_seed(0)
    router = Router(16, 4, 1)
    x = torch.randn(256, 16) + 1
    with torch.no_grad():
        router.weight[0] += 0.5
    first = router(x)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.5)
    for _ in range(50):
        optimizer.zero_grad()
        router(x).aux_loss.backward()
        optimizer.step()
    last = router(x)
    assert last.aux_loss < first.aux_loss
    assert last.tokens_per_expert.max() < first.tokens_per_expert.max()


def test_selection_bias_moves_against_the_load() -> None:
    router = Router(8, 4, 1, selection_bias=True)
    router.update_selection_bias(torch.tensor([10, 2, 0, 4]), rate=0.5)
    assert router.selection_bias.tolist() == [-0.5, 0.5, 0.5, 0.0]
    assert "selection_bias" in router.state_dict()
    with pytest.raises(ValueError, match="selection_bias=True"):
        Router(8, 4, 1).update_selection_bias(torch.zeros(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_function": "relu"}, "relu"),
        ({"hidden_size": 0}, "hidden_size must be at least 1; got 0"),
        ({"num_experts": 0}, "num_experts must be at least 1; got 0"),
        ({"num_groups": 5}, "num_groups .* 5"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups .* 5"),
        ({"num_groups": 4, "topk_groups": 1}, r"top_k .* \[1, 3\]; got 4"),
    ],
)
def test_bad_router(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(**{"hidden_size": 16, "num_experts": 12, "top_k": 4, **options})


@pytest.mark.parametrize("shape", [(3, 8), (16,), (2, 3, 16)])
def test_a_router_refuses_other_tokens(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"x must be \[T, 16\]; got"):
        Router(16, 12, 4)(torch.zeros(shape))


# ---- MoE ----------------------------------------------------------------------------------------


def reference(moe: MoE, x: Tensor, idx: Tensor) -> Tensor:
    """The whole layer in x's dtype for given experts (choosing them is not differentiable)."""
    to = {name: w.to(x.dtype) for name, w in moe.named_parameters()}
    scores = torch.sigmoid(x @ to["router.weight"].T).gather(1, idx)
    weights = scores / scores.sum(dim=-1, keepdim=True) * moe.router.routed_scaling_factor
    out = moe_experts(x, idx, weights, to["experts.gate_up_proj"], to["experts.down_proj"])
    if moe.shared_expert is not None:
        gate, up = (x @ to["shared_expert.gate_up_proj.weight"].T).chunk(2, dim=-1)
        out = out + (F.silu(gate) * up) @ to["shared_expert.down_proj.weight"].T
    return out


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
@pytest.mark.parametrize("shared", [None, 192])
def test_moe_against_float64(recipe: Fp8Recipe | None, shared: int | None) -> None:
    torch.manual_seed(0)
    moe = MoE(
        256,
        128,
        6,
        2,
        score_function="sigmoid",
        routed_scaling_factor=2.0,
        shared_intermediate_size=shared,
        recipe=recipe,
        dtype=torch.float32,
    )
    x = torch.randn(4, 128, 256, requires_grad=True)
    dout = torch.randn(4, 128, 256)
    out = moe(x)
    grads = torch.autograd.grad(out, [x, *moe.parameters()], dout)

    twin = copy.deepcopy(moe).double()
    x64 = x.detach().double().flatten(0, 1).requires_grad_()
    idx = moe.router(x.detach().flatten(0, 1)).topk_idx
    want = reference(twin, x64, idx)
    want_grads = torch.autograd.grad(want, [x64, *twin.parameters()], dout.double().flatten(0, 1))

    limit = 0.07 if recipe else 0.006
    assert relative_error(out.detach().flatten(0, 1), want.detach()) < limit
    names = ["x", *(name for name, _ in moe.named_parameters())]
    for name, got, exact in zip(names, grads, want_grads, strict=True):
        # The router's gradient is a difference of the experts' dprobs, which magnifies their error.
        slack = 2 if name == "router.weight" else 1
        assert relative_error(got.view(exact.shape), exact) < slack * limit, name


def test_moe_trains_checkpoints_and_copies() -> None:
    torch.manual_seed(0)
    moe = MoE(128, 128, 4, 2, shared_intermediate_size=128, dtype=torch.float32)
    optimizer = torch.optim.AdamW(moe.parameters(), lr=3e-3, fused=True)
    x = torch.randn(256, 128)
    target = torch.randn(256, 128) * 0.1
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = moe(x)
        assert out.dtype == torch.bfloat16
        loss = F.mse_loss(out.float(), target) + 0.01 * moe.aux_loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
    assert moe.router.weight.grad.any()
    assert int(moe.tokens_per_expert.sum()) == 512
    twin = copy.deepcopy(moe)  # although aux_loss hangs on a graph
    with torch.no_grad():
        assert torch.equal(twin(x), moe(x))
        assert moe(x[:0]).shape == (0, 128)
        assert moe.aux_loss.item() == 0
    other = MoE(128, 128, 4, 2, shared_intermediate_size=128, dtype=torch.float32)
    other.load_state_dict(moe.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), moe(x))


def test_moe_passes_options_to_its_experts() -> None:
    moe = MoE(128, 128, 4, 2, recompute="expert", delay_wgrad=True)
    assert moe.experts.recompute == "expert"
    x = torch.randn(64, 128).bfloat16()
    moe(x).sum().backward()
    assert moe.experts.down_proj.grad is None
    moe.backward_dw()
    assert moe.experts.down_proj.grad.any()
    with pytest.raises(NotImplementedError, match="biases"):
        MoE(128, 128, 4, 2, bias=True)


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def another_default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("another_default_dtype")
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_dtypes_do_not_depend_on_the_default(recipe: Fp8Recipe | None) -> None:
    moe = MoE(64, 32, 4, 2, selection_bias=True, shared_intermediate_size=32, recipe=recipe)
    assert moe.router.weight.dtype == moe.router.selection_bias.dtype == torch.float32
    assert {p.dtype for p in moe.experts.parameters()} == {torch.bfloat16}
    x = torch.randn(10, 64, dtype=torch.bfloat16, requires_grad=True)
    out = moe(x)
    (out.sum() + moe.aux_loss).backward()
    assert out.dtype == x.dtype
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in moe.parameters())
