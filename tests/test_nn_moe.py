"""MoE: gradients against float64, and where its options go."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import LossCoefficients, MoE, RoutingRule, z_loss
from reference import moe_experts, relative_error


def reference(moe: MoE, x: Tensor, idx: Tensor) -> Tensor:
    """The whole layer in x's dtype for given experts (choosing them is not differentiable)."""
    to = {name: w.to(x.dtype) for name, w in moe.named_parameters()}
    scores = torch.sigmoid(x @ to["router.weight"].T).gather(1, idx)
    weights = scores / scores.sum(dim=-1, keepdim=True) * moe.router.rule.routed_scaling_factor
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
        RoutingRule(score="sigmoid", routed_scaling_factor=2.0),
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


def test_coefficients_reach_the_gate_through_the_layer() -> None:
    """Without aux_loss, and for x [sequences, length, H] per sequence, used twice in a backward."""
    moe = MoE(64, 32, 4, 2, recipe=None, dtype=torch.float32)
    x, y = torch.randn(3, 8, 64), torch.randn(2, 5, 64)
    moe.router.coefficients = LossCoefficients(balancing=0.5, balancing_per_sequence=0.25, z=0.1)
    (moe(x).sum() + moe(y).sum()).backward()
    got = moe.router.weight.grad.clone()
    moe.zero_grad()
    moe.router.coefficients = LossCoefficients()
    total = moe(x).sum() + moe(y).sum()
    for t in (x, y):
        routing = moe.router(t.flatten(0, 1))
        each = moe.router.balancing_loss(routing, sequences=len(t))
        total = total + 0.5 * moe.router.balancing_loss(routing) + 0.25 * each
        total = total + 0.1 * z_loss(routing)
    total.backward()
    torch.testing.assert_close(got, moe.router.weight.grad)


def test_moe_passes_options_to_its_experts() -> None:
    moe = MoE(128, 128, 4, 2, preactivation="recompute", delay_wgrad=True)
    assert moe.experts.preactivation == "recompute"
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
    moe = MoE(
        *(64, 32, 4, 2, RoutingRule(selection_bias=True)),
        shared_intermediate_size=32,
        recipe=recipe,
    )
    assert moe.router.weight.dtype == moe.router.selection_bias.dtype == torch.float32
    assert {p.dtype for p in moe.experts.parameters()} == {torch.bfloat16}
    x = torch.randn(10, 64, dtype=torch.bfloat16, requires_grad=True)
    out = moe(x)
    (out.sum() + moe.aux_loss).backward()
    assert out.dtype == x.dtype
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in moe.parameters())
