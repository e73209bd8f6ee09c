"""MoE: gradients against float64, and that a forward leaves nothing on the module."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import (
    LossCoefficients,
    MoE,
    MoEExperts,
    Router,
    RoutingRule,
    SharedExpert,
    z_loss,
)
from reference import moe_experts, relative_error

BALANCED = LossCoefficients(balancing=0.5, balancing_per_sequence=0.25, z=0.1)


def moe_of(
    coefficients: LossCoefficients = BALANCED,
    shared: SharedExpert | None = None,
    rule: RoutingRule | None = None,
    **options: Any,
) -> MoE:
    """Of small sizes, in float32."""
    router = Router(64, 4, 2, rule or RoutingRule(), coefficients=coefficients)
    return MoE(router, MoEExperts(4, 64, 32, **{"dtype": torch.float32, **options}), shared)


def reference(moe: MoE, x: Tensor, idx: Tensor) -> Tensor:
    """The whole layer in x's dtype for given experts (choosing them is not differentiable)."""
    to = {name: w.to(x.dtype) for name, w in moe.named_parameters()}
    scores = torch.sigmoid(x @ to["router.weight"].T).gather(1, idx)
    weights = scores / scores.sum(dim=-1, keepdim=True) * moe.router.rule.routed_scaling_factor
    out = moe_experts(x, idx, weights, to["experts.gate_up_proj"], to["experts.down_proj"])
    if moe.shared_expert is not None:
        gate, up = (x @ to["shared_expert.gate_up_proj.weight"].T).chunk(2, dim=-1)
        other = (F.silu(gate) * up) @ to["shared_expert.down_proj.weight"].T
        if moe.shared_expert.output_gate is not None:
            other = other / (1 + torch.exp(-(x @ to["shared_expert.output_gate.weight"].T)))
        out = out + other
    return out


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
@pytest.mark.parametrize("shared", [None, "plain", "gated"])
def test_moe_against_float64(recipe: Fp8Recipe | None, shared: str | None) -> None:
    torch.manual_seed(0)
    f32: Any = {"dtype": torch.float32}
    moe = MoE(
        Router(256, 6, 2, RoutingRule(score="sigmoid", routed_scaling_factor=2.0)),
        MoEExperts(6, 256, 128, recipe=recipe, **f32),
        SharedExpert(256, 192, output_gate=shared == "gated", **f32) if shared else None,
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
    moe = moe_of(LossCoefficients(balancing=0.01), SharedExpert(64, 32, dtype=torch.float32))
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2, fused=True)
    x = torch.randn(256, 64)
    target = torch.randn(256, 64) * 0.1
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out, routing = moe(x, return_routing=True)
        assert out.dtype == torch.bfloat16
        assert int(routing.tokens_per_expert.sum()) == 512
        loss = F.mse_loss(out.float(), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
    assert moe.router.weight.grad.any()
    with torch.no_grad():
        want = moe(x)
        for twin in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
            assert torch.equal(twin(x), want)
        out, routing = moe(x[:0], return_routing=True)
        assert out.shape == (0, 64)
        assert all(loss.item() == 0 for loss in routing.losses.values())
    other = moe_of(shared=SharedExpert(64, 32, dtype=torch.float32))
    other.load_state_dict(moe.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), want)


def by_hand(moe: MoE, x: Tensor) -> Tensor:
    """What BALANCED adds to the loss."""
    routing = moe.router(x.flatten(0, -2))
    sequences = len(x) if x.ndim == 3 else 1
    total = 0.5 * moe.router.balancing_loss(routing) + 0.1 * z_loss(routing)
    return total + 0.25 * moe.router.balancing_loss(routing, sequences=sequences)


def gradients(moe: MoE) -> list[Tensor]:
    found = [w.grad for w in moe.parameters()]
    moe.zero_grad()
    return found


def test_coefficients_are_losses_added_by_hand() -> None:
    """For x [sequences, length, H] per sequence, with the layer used twice in one backward."""
    moe = moe_of(recipe=None)
    x, y = torch.randn(3, 8, 64), torch.randn(2, 5, 64)
    (moe(x).sum() + moe(y).sum()).backward()
    got = gradients(moe)
    moe.router.coefficients = LossCoefficients()
    (moe(x).sum() + moe(y).sum() + by_hand(moe, x) + by_hand(moe, y)).backward()
    torch.testing.assert_close(got, gradients(moe))


@pytest.mark.parametrize("reentrant", [True, False])
def test_losses_under_a_checkpoint(reentrant: bool) -> None:
    moe = moe_of()
    x = torch.randn(16, 64, requires_grad=True)
    moe(x).sum().backward()
    want = [*gradients(moe), x.grad]
    x.grad = None
    checkpoint(moe, x, use_reentrant=reentrant).sum().backward()
    assert all(map(torch.equal, [*gradients(moe), x.grad], want))


def biased(checkpointed: bool, early: bool) -> list[Tensor]:
    """Gradients of a step whose selection bias moves before its backward, or behind it."""
    torch.manual_seed(0)
    rule = RoutingRule(score="sigmoid", selection_bias=True)
    moe = MoE(Router(64, 8, 2, rule=rule), MoEExperts(8, 64, 32))
    x = torch.randn(16, 64)
    out = checkpoint(moe, x, use_reentrant=False) if checkpointed else moe(x)
    load = moe.router(x).tokens_per_expert
    if early:
        moe.router.update_selection_bias(load, rate=1.0)
    out.sum().backward()
    if not early:
        moe.router.update_selection_bias(load, rate=1.0)
    assert moe.router.selection_bias is not None
    return [*gradients(moe), moe.router.selection_bias]


def test_a_selection_bias_moves_after_all_backwards() -> None:
    """As routers.md says: a checkpointed forward would route by the new bias in its backward."""
    assert all(map(torch.equal, biased(True, False), biased(False, False)))
    assert not torch.equal(biased(True, True)[1], biased(False, True)[1])


def test_an_evaluation_and_other_microbatches_change_nothing() -> None:
    """Two forwards in flight, backwards in either order, an evaluation between forward and loss."""
    moe = moe_of()
    x, y = torch.randn(2, 16, 64), torch.randn(2, 16, 64)
    alone = []
    for some in (x, y):
        moe(some).square().sum().backward()
        alone.append(gradients(moe))
    for first in (0, 1):
        outs = [moe(x), moe(y)]
        with torch.no_grad():
            moe.eval()(torch.randn(40, 64))
        moe.train()
        for n in (first, 1 - first):
            outs[n].square().sum().backward()
            assert all(map(torch.equal, gradients(moe), alone[n]))


def test_threads() -> None:
    """Each of two threads sees the losses and the gradient of its own tokens."""
    moe = moe_of(recipe=None)
    batches = [torch.randn(24, 64) for _ in range(2)]

    def step(x: Tensor) -> list[Tensor]:
        out, routing = moe(x, return_routing=True)
        loss = out.square().sum() + moe.router.balancing_loss(routing)
        return [*torch.autograd.grad(loss, list(moe.parameters())), routing.losses["balancing"]]

    want = [step(x) for x in batches]
    same: list[bool] = []

    def run(n: int) -> None:
        for _ in range(20):
            same.append(all(map(torch.equal, step(batches[n]), want[n])))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert same == [True] * 40


def test_a_forward_leaves_nothing_behind() -> None:
    """No attribute, and no graph: what the graph saved dies with the output."""
    moe = moe_of()
    before = {name: dict(vars(m)) for name, m in moe.named_modules()}
    saved: list[weakref.ref[Tensor]] = []

    def pack(t: Tensor) -> Tensor:
        t = t.detach()
        saved.append(weakref.ref(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out, routing = moe(torch.randn(16, 64), return_routing=True)
    assert any(ref() is not None for ref in saved)
    assert {name: dict(vars(m)) for name, m in moe.named_modules()} == before
    del out, routing
    gc.collect()
    held = {id(t) for t in moe.state_dict().values()}
    assert all(ref() is None or id(ref()) in held for ref in saved)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_replay_of_any_integers(dtype: torch.dtype) -> None:
    """As rollout engines write them: small integers, and -1 for no expert."""
    moe, x = moe_of(), torch.randn(12, 64)
    ids = moe.router(x).topk_idx
    assert torch.equal(moe(x, topk_idx=ids.to(dtype)), moe(x))
    if dtype == torch.uint8:
        return
    some = ids.clone()
    some[::3] = -1
    some[1, 1] = -1
    out, routing = moe(x, topk_idx=some.to(dtype), return_routing=True)
    assert not out[::3].any()
    assert torch.equal(out[2], moe(x)[2])
    assert routing.topk_weights[1].tolist() == [1.0, 0.0]
    assert int(routing.tokens_per_expert.sum()) == int((some >= 0).sum())


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_padding_need_not_be_routed(recipe: Any) -> None:
    """No row of it reaches the experts, whatever it holds; the other tokens keep their bits."""
    moe, x = moe_of(recipe=recipe), torch.randn(3, 8, 64)
    padding = torch.rand(3, 8) < 0.4
    given: list[Tensor] = []
    moe.experts.register_forward_pre_hook(lambda _, args: given.append(args[1]))

    def step(**how: Any) -> list[Tensor]:
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        out = moe(leaf, padding=padding, **how)
        out[~padding].square().sum().backward()
        return [out.detach(), leaf.grad, *(w.grad for w in moe.experts.parameters())]

    want, got = step(), step(route_padding=False)
    assert torch.equal(got[0][~padding], want[0][~padding])
    assert not got[0][padding].any()
    for a, b in zip(got[1:], want[1:], strict=True):
        assert relative_error(a, b) < 0.05  # columns are quantized with fewer rows beside them
    assert (given[1] == -1).all(dim=1).tolist() == padding.flatten().tolist()
    with pytest.raises(ValueError, match=r"\[MoE\] padding \(bool, True for padding\) must be"):
        moe(x, route_padding=False)
    with pytest.raises(ValueError, match=r"\[MoE\] route_padding must be"):
        moe(x, padding=padding, route_padding=1)


def test_replay_and_padding_reach_the_router() -> None:
    moe = moe_of(recipe=None)
    x = torch.randn(2, 6, 64)
    _, routing = moe(x, return_routing=True)
    idx = (routing.topk_idx.view(2, 6, 2) + 1) % 4
    out, replayed = moe(x, topk_idx=idx, return_routing=True)
    assert replayed.replayed
    assert torch.equal(replayed.topk_idx, idx.view(12, 2))
    weights = routing.scores.gather(1, idx.view(12, 2))
    weights = weights / weights.sum(dim=1, keepdim=True)
    assert torch.equal(out.view(12, 64), moe.experts(x.view(12, 64), idx.view(12, 2), weights))
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 3:] = True
    out, marked = moe(x, padding=padding, return_routing=True)
    assert torch.equal(out, moe(x))
    assert int(marked.tokens_per_expert.sum()) == 18
    assert marked.losses["balancing"] != routing.losses["balancing"]


def test_any_module_is_a_shared_expert() -> None:
    moe = moe_of(recipe=None, shared=torch.nn.Linear(64, 64))
    x = torch.randn(5, 64)
    want = moe.shared_expert(x)
    moe.experts.down_proj.data.zero_()
    assert torch.equal(moe(x), want)


def test_delayed_weight_gradients() -> None:
    moe = moe_of(preactivation="recompute", delay_wgrad=True)
    moe(torch.randn(16, 64)).sum().backward()
    assert moe.experts.down_proj.grad is None
    moe.experts.backward_dw()
    assert moe.experts.down_proj.grad.any()


@pytest.mark.parametrize(
    ("router", "shared", "message"),
    [
        ((128, 4, 2), None, r"\[MoE\] hidden_size must be that of the experts, 64; got 128"),
        ((64, 8, 2), None, r"\[MoE\] num_experts must be that of the experts, 4; got 8"),
        ((64, 4, 2), 128, r"\[MoE\] shared_expert must have hidden_size 64; got 128"),
    ],
)
def test_sizes_that_differ(router: tuple[int, int, int], shared: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoE(Router(*router), MoEExperts(4, 64, 32), shared and SharedExpert(shared, 32))


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def another_default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("another_default_dtype")
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_dtypes_do_not_depend_on_the_default(recipe: Fp8Recipe | None) -> None:
    moe = moe_of(
        shared=SharedExpert(64, 32, output_gate=True),
        rule=RoutingRule(selection_bias=True),
        recipe=recipe,
        dtype=torch.bfloat16,
    )
    assert moe.router.weight.dtype == moe.router.selection_bias.dtype == torch.float32
    assert {p.dtype for p in moe.experts.parameters()} == {torch.bfloat16}
    x = torch.randn(10, 64, dtype=torch.bfloat16, requires_grad=True)
    out = moe(x)
    out.sum().backward()
    assert out.dtype == x.dtype
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in moe.parameters())


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 3, 4, 64)])
def test_sizes_before_the_last_one(shape: tuple[int, ...]) -> None:
    """topk_idx and padding have x's, and are no other tokens' that reshape alike."""
    moe = moe_of(recipe=None)
    x = torch.randn(shape)
    out, routing = moe(x, return_routing=True)
    idx = routing.topk_idx.view(*shape[:-1], 2)
    padding = torch.zeros(shape[:-1], dtype=torch.bool)
    assert torch.equal(moe(x, topk_idx=idx, padding=padding), out)
    assert torch.equal(out.view(-1, 64), moe(x.view(-1, 64)))
    assert not out._is_view()  # of which fully_shard warns
    for wrong in (idx.transpose(0, -2), idx.view(-1, 2)) if len(shape) > 2 else (idx[None],):
        with pytest.raises(ValueError, match=r"\[MoE\] topk_idx must be .* leading sizes \(.*got"):
            moe(x, topk_idx=wrong)
    for wrong in (padding.mT, padding.flatten()) if len(shape) > 2 else (padding[None],):
        with pytest.raises(ValueError, match=r"\[MoE\] padding must be .* x's leading"):
            moe(x, padding=wrong)
