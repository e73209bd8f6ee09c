"""The layer in torch's DistributedDataParallel and fully_shard. Under fully_shard its weights are
DTensors between forwards; each forward quantizes what is gathered for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import ranks
from fp8moe_cutlass.autograd import experts
from fp8moe_cutlass.nn import MoE, MoEExperts, Router, reuse_fp8_weights, shard_experts
from moe_problem import Problem, problem
from ranks import Failure, Pool, results

pool = ranks.pool(2)


class Net(nn.Module):
    """The experts with one rank's tokens, below the module that fully_shard is given."""

    def __init__(self, p: Problem, **options: Any) -> None:
        super().__init__()
        self.experts = p.experts(**options)

    def forward(self, p: Problem) -> torch.Tensor:
        return self.experts(p.x, p.topk_idx, p.probs)


def of_rank(seed: int = 0) -> Problem:
    """Weights that are the same on all ranks, tokens that are not."""
    p, other = problem(64, dtype=torch.float32), problem(64, seed=10 * seed + dist.get_rank() + 1)
    p.x, p.topk_idx, p.dout = other.x, other.topk_idx, other.dout
    return p


def whole(net: Net) -> list[torch.Tensor]:
    return [w.full_tensor() for w in net.parameters()]


def alone(p: Problem, weights: list[torch.Tensor]) -> torch.Tensor:
    """What one process makes of these weights."""
    p.gate_up, p.down = weights
    with torch.no_grad():
        return Net(p)(p)


def scaled(net: Net) -> None:
    with torch.no_grad():
        for w in net.parameters():
            w.mul_(1.5)


def foreach(net: Net) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(net.parameters()), 1.5)  # counts no version of a DTensor


def data_of_the_shards(net: Net) -> None:
    for w in net.parameters():
        w.to_local().data.mul_(1.5)


def loaded(net: Net) -> None:
    net.load_state_dict({k: v * 1.5 for k, v in net.state_dict().items()})


def assigned(net: Net) -> None:
    net.load_state_dict({k: v * 1.5 for k, v in net.state_dict().items()}, assign=True)


def loaded_whole(net: Net) -> None:
    state = {k: v.full_tensor() * 1.5 for k, v in net.state_dict().items()}
    set_model_state_dict(net, state, options=StateDictOptions(full_state_dict=True))


def stepped(net: Net) -> None:
    for w in net.parameters():
        w.grad = torch.ones_like(w)
    torch.optim.AdamW(net.parameters(), lr=0.1, fused=True).step()


CHANGES = [scaled, foreach, data_of_the_shards, loaded, assigned, loaded_whole, stepped]


def a_change(_: Any, change: Callable[[Net], None]) -> None:
    p = of_rank()
    net = Net(p)
    fully_shard(net, reshard_after_forward=True)
    with torch.no_grad():
        before = net(p)
        change(net)
        after = net(p)
    assert not torch.equal(after, before)
    assert torch.equal(after, alone(p, whole(net)))


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_of_the_shards_is_noticed(change: Callable[[Net], None], pool: Pool) -> None:
    results(pool.run(2, a_change, change))


def two_microbatches(_: Any, options: dict[str, Any]) -> None:
    batches = of_rank(0), of_rank(1)
    net, twin = Net(batches[0], **options), Net(batches[0], **options)
    fully_shard(net, reshard_after_forward=True)
    outs, elsewhere = [], []
    for p in batches:
        outs.append(net(p))
        elsewhere += [torch.empty(w.shape) for w in net.parameters()]  # where the gathered were
    for out, p in zip(outs, batches, strict=True):
        out.backward(p.dout)
        twin(p).backward(p.dout)
    for sharded, one in zip(net.parameters(), twin.parameters(), strict=True):
        dist.all_reduce(one.grad, op=dist.ReduceOp.SUM)
        torch.testing.assert_close(sharded.grad.full_tensor(), one.grad / 2)


@pytest.mark.parametrize(
    "options", [{}, {"transposed_weights": "recompute"}, {"recipe": None}], ids=str
)
def test_two_forwards_before_their_backwards(options: dict[str, Any], pool: Pool) -> None:
    results(pool.run(2, two_microbatches, options))


class Foreign(nn.Module):
    """An experts function over parameters that no MoEExperts owns."""

    def __init__(self, p: Problem) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(p.gate_up.clone()), nn.Parameter(p.down.clone())

    def forward(self, p: Problem) -> torch.Tensor:
        return experts(p.x, p.topk_idx, p.probs, self.gate_up, self.down)


def foreign(_: Any) -> None:
    p = of_rank()
    net = Foreign(p)
    fully_shard(net, reshard_after_forward=True)
    for change in (foreach, data_of_the_shards, loaded, stepped):
        net(p).backward(p.dout)
        change(net)
        with torch.no_grad():
            got = net(p)
        assert torch.equal(got, alone(p, whole(net)))


def test_foreign_parameters_of_shards(pool: Pool) -> None:
    results(pool.run(2, foreign))


def replicated(_: Any) -> None:
    """DistributedDataParallel as it comes: there is no buffer for it to send."""
    p = of_rank()
    net, twin = Net(p), Net(p)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model = nn.parallel.DistributedDataParallel(net)
        for _ in range(2):
            model(p).backward(p.dout)
            twin(p).backward(p.dout)
    for averaged, one in zip(net.parameters(), twin.parameters(), strict=True):
        dist.all_reduce(one.grad, op=dist.ReduceOp.SUM)
        torch.testing.assert_close(averaged.grad, one.grad / 2)


def test_ddp_by_default(pool: Pool) -> None:
    results(pool.run(2, replicated))


def from_meta(_: Any) -> None:
    torch.manual_seed(dist.get_rank())
    p = of_rank()
    with torch.device("meta"):
        net = Net(p)
    fully_shard(net, reshard_after_forward=True)
    net.to_empty(device="cpu")
    with torch.no_grad():
        for w in net.parameters():
            w.fill_(7.0)
    net.experts.reset_parameters()
    drawn = whole(net)
    for w in drawn:
        bound = w.shape[-1] ** -0.5
        assert 0.99 * bound < w.abs().max() <= bound
        assert not torch.equal(w[0], w[-1])
        others = w.clone()
        dist.broadcast(others, 0)
        assert torch.equal(w, others)
    outs = [net(p), net(p)]
    assert torch.equal(outs[0], alone(p, drawn))
    for out in outs:
        out.backward(p.dout)


def test_meta_device_and_reset_parameters(pool: Pool) -> None:
    results(pool.run(2, from_meta))


@pytest.mark.parametrize("options", [{}, {"transposed_weights": "recompute"}], ids=str)
def test_compiled_steps(options: dict[str, Any], pool: Pool) -> None:
    results(pool.run(2, compiled, options))


def compiled(_: Any, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    p = of_rank()
    net = Net(p, **options)
    fully_shard(net, reshard_after_forward=True)
    fast = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        want = alone(p, whole(net))
        out = fast(p)
        assert torch.equal(out, want)
        out.backward(p.dout)
        optimizer.step()


def given(_: Any) -> None:
    """quantize_weights() of shards is collective, and a forward takes what it makes."""
    p = of_rank()
    net = Net(p)
    fully_shard(net, reshard_after_forward=True)
    weights, want = net.experts.quantize_weights(), net(p)
    scaled(net)
    net.unshard()
    assert torch.equal(net.experts(p.x, p.topk_idx, p.probs, weights=weights), want)


def test_weights_of_shards_are_a_value(pool: Pool) -> None:
    results(pool.run(2, given))


def refused(_: Any) -> None:
    p = of_rank()
    net = Net(p)
    fully_shard(net)
    with pytest.raises(RuntimeError, match="must be whole in a forward"):
        net.experts(p.x, p.topk_idx, p.probs)
    with (
        pytest.raises(RuntimeError, match=r"got a DTensor \(fully_shard\), in experts"),
        reuse_fp8_weights(net),
    ):
        pass
    net = Net(p, delay_wgrad=True)
    fully_shard(net)
    net(p).backward(p.dout)
    with pytest.raises(RuntimeError, match="needs the parameters that forward saw"):
        net.experts.backward_dw()


def main_grads(_: Any) -> None:
    """Before fully_shard, and after."""
    p, refused = of_rank(), "main_grad must be None under fully_shard"
    net = Net(p)
    for w in net.parameters():
        w.main_grad = torch.zeros(w.shape)
    with pytest.raises(RuntimeError, match=refused):
        fully_shard(net)
    net = Net(p)
    fully_shard(net)
    for w in net.parameters():
        w.main_grad = torch.zeros(w.to_local().shape)
    with pytest.raises(RuntimeError, match=refused):
        net(p)


def test_main_grad_is_refused(pool: Pool) -> None:
    results(pool.run(2, main_grads))


def test_what_is_refused(pool: Pool) -> None:
    results(pool.run(2, refused))


def float32_gate(_: Any) -> None:
    moe = MoE(Router(128, 2, 2), MoEExperts(2, 128, 128))
    fully_shard(moe)
    moe(torch.ones(1, 128, dtype=torch.bfloat16))


@pytest.mark.xfail(
    strict=True,
    raises=Failure,
    reason="fully_shard gathers experts in FP8: FSDP expects uniform original parameter dtype",
)
def test_a_float32_gate_beside_bfloat16_experts(pool: Pool) -> None:
    results(pool.run(2, float32_gate))


def router_first(group: Any, shared: bool) -> None:
    moe = MoE(Router(128, 2, 2), MoEExperts(2, 128, 128))
    net = nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16), moe)
    ignored = shard_experts(net, group) if shared else None
    fully_shard(moe.router)
    fully_shard(net, ignored_params=ignored)
    net(torch.ones(1, 128, dtype=torch.bfloat16)).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())


@pytest.mark.parametrize("shared", [False, True])
def test_a_router_of_its_own_in_a_bfloat16_model(shared: bool, pool: Pool) -> None:
    results(pool.run(2, router_first, shared))
