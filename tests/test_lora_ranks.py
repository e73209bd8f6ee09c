"""LoRA on experts that ranks share: the layer of one process, part by part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ranks
from fp8moe_cutlass import nn
from fp8moe_cutlass.nn.lora import factors
from ranks import Pool, results
from test_distributed import MEMBERS, rank_of

pool = ranks.pool(8, MEMBERS, timeout=240.0)

E, H, I = 4, 128, 128


def layer_of(kind: str, group: Any) -> nn.MoEExperts:
    torch.manual_seed(0)
    whole = nn.MoEExperts(E, H, I)
    tensors = dict(whole.fp8_tensors(fused=True))
    if kind == "values":
        layer = nn.MoEExperts(E, H, I, group=group)
        mine = layer.local_experts
        with torch.no_grad():
            for name in ("gate_up_proj", "down_proj"):
                getattr(layer, name).copy_(getattr(whole, name)[mine.start : mine.stop])
    elif kind == "codes":
        layer = nn.MoEExperts.from_fp8(tensors, num_experts=E, group=group)
    else:
        layer = nn.MoEExperts.from_fp8(tensors, num_experts=E) if kind == "sharded codes" else whole
        if group is not None:
            nn.shard_experts(layer, group)
    layer.add_lora(16, alpha=32)
    layer.load_state_dict(layer_state(), strict=False)  # of all experts
    return layer


def layer_state() -> dict[str, Any]:
    torch.manual_seed(1)
    made = nn.MoEExperts(E, H, I)
    made.add_lora(16, alpha=32)
    for b in factors(made)[1::2]:
        torch.nn.init.normal_(b, std=0.05)
    return {name: t for name, t in made.state_dict().items() if "lora" in name}


def step(layer: nn.MoEExperts, rank: int, world: int, wrap: Any = None) -> list[Any]:
    torch.manual_seed(2)
    x, ids, probs = torch.randn(40, H).bfloat16(), torch.randint(E, (40, 2)), torch.rand(40, 2)
    mine = slice(40 // world * rank, 40 // world * (rank + 1))
    x, probs = x[mine].requires_grad_(), probs[mine].requires_grad_()
    out = (wrap or (lambda f: f))(layer)(x, ids[mine], probs)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, probs.grad, *(p.grad for p in factors(layer))]


def shared(group: Any, kind: str, compiled: bool) -> list[Any]:
    wrap = None
    if compiled:
        torch._dynamo.reset()
        wrap = lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")  # noqa: E731
    layer = layer_of(kind, group)
    made = step(layer, rank_of(group), dist.get_world_size(group), wrap)
    state = layer.state_dict()
    return [*made, [state[name] for name in layer_state()], list(layer.local_experts)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["codes", "values", "sharded codes", "sharded values"])
def test_ranks_make_the_layer_of_one_process(pool: Pool, kind: str, compiled: bool) -> None:
    alone = layer_of(kind, None)
    out, dx, dprobs, *grads = step(alone, 0, 1)
    if kind.startswith("sharded"):
        grads = [grad * 0.5 for grad in grads]
    whole = layer_state()
    for rank, found in enumerate(results(pool.run(2, shared, kind, compiled))):
        half = slice(20 * rank, 20 * rank + 20)
        *got, state, local = found
        for mine, want in zip(got[:3], (out, dx, dprobs), strict=True):
            assert (mine.float() - want[half].float()).norm() < 0.01 * want[half].float().norm()
        for mine, want in zip(got[3:], grads, strict=True):
            want = want[local[0] : local[-1] + 1]
            assert mine.shape == want.shape
            assert (mine.float() - want.float()).norm() < 0.02 * want.float().norm()
        for mine, (name, want) in zip(state, whole.items(), strict=True):
            if "lora_A" in name:
                assert torch.equal(mine, want.view(E, 16, -1)[local].flatten(0, 1))
            else:
                assert torch.equal(mine, want.view(len(want), 16, E)[..., local].flatten(1))


def under_fully_shard(group: Any, kind: str) -> list[Any]:
    layer = layer_of(kind, None)
    fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
    found = []
    for _ in range(2):  # a second gather fills the same memory
        layer.zero_grad()
        out, dx, dprobs, *grads = step(layer, rank_of(group), 2)
        found = [out, dx, dprobs, *(grad.full_tensor() for grad in grads)]
    return found


def fully_sharded_shares(group: Any, kind: str) -> None:
    layer = layer_of(kind, group)
    mesh = DeviceMesh.from_group(group, "cpu")
    with pytest.raises(
        RuntimeError, match=r"\[add_lora\] fully_shard must ignore the LoRA of shar"
    ):
        fully_shard(layer, mesh=mesh, ignored_params={layer.gate_up_proj, layer.down_proj})
    layer = layer_of(kind, group)
    want = step(layer, rank_of(group), 2)
    layer.zero_grad()
    fully_shard(layer, mesh=mesh, ignored_params={*layer.parameters()})
    assert all(map(torch.equal, step(layer, rank_of(group), 2), want))


@pytest.mark.parametrize("kind", ["sharded codes", "sharded values"])
def test_fully_shard_ignores_the_terms_of_shared_experts(pool: Pool, kind: str) -> None:
    results(pool.run(2, fully_sharded_shares, kind))


@pytest.mark.parametrize("kind", ["codes", "values"])
def test_under_fully_shard_gradients_are_averages(pool: Pool, kind: str) -> None:
    halves = [step(layer_of(kind, None), rank, 2) for rank in range(2)]
    for rank, found in enumerate(results(pool.run(2, under_fully_shard, kind))):
        for got, want in zip(found[:3], halves[rank][:3], strict=True):
            assert torch.equal(got, want)
        for n, got in enumerate(found[3:]):
            want = sum(half[3 + n].float() for half in halves) / 2
            assert (got.float() - want).norm() < 0.01 * want.norm()
