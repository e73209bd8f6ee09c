"""nn.shard_experts over NCCL: alone on one GPU, and on two beside fully_shard."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ranks
from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import clip_grad_norm_, shard_experts
from moe_problem import moved, problem
from ranks import Pool, results
from reference import relative_error
from test_shard_experts import Net, everything, whole

E, S, H, I, T = 8, 2, 256, 128, 512
FP8_AND_BF16 = pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])


def gradients(group: Any, recipe: Any) -> list[Tensor]:
    """Of one layer's weights, whole, on the CPU, over this rank's tokens."""
    rank = 0 if group is None else dist.get_rank(group)
    ranks = 1 if group is None else dist.get_world_size(group)
    p = moved(problem(T, S, E, H, I), f"cuda:{rank}")
    layer = p.experts(recipe=recipe, device=f"cuda:{rank}")
    if group is not None:
        shard_experts(layer, group)
        assert all(w.device_mesh.device_type == "cuda" for w in layer.parameters())
    x, idx, probs, dout = (t.chunk(ranks)[rank] for t in (p.x, p.topk_idx, p.probs, p.dout))
    layer(x, idx, probs).backward(dout)
    return [whole(w.grad).cpu() for w in layer.parameters()]


@FP8_AND_BF16
def test_a_group_of_one(recipe: Any, device: torch.device) -> None:
    want = gradients(None, recipe)
    store = Path(tempfile.mkdtemp()) / "store"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", f"file://{store}", rank=0, world_size=1)
    try:
        for got, its in zip(gradients(dist.group.WORLD, recipe), want, strict=True):
            assert torch.equal(got, its)
    finally:
        dist.destroy_process_group()


pool = ranks.pool(2, backend="nccl")


@FP8_AND_BF16
def test_gradients_are_averages(pool: Pool, recipe: Any, device: torch.device) -> None:
    want = gradients(None, recipe)
    for found in results(pool.run(2, gradients, recipe)):
        for got, its in zip(found, want, strict=True):
            if recipe is not None:
                assert torch.equal(got, its / 2)
            else:  # torch's grouped_mm may choose its tiles by the sizes
                assert relative_error(got, its / 2) < 0.005


def steps(net: Any, optimizer: Any, count: int) -> list[float]:
    losses = []
    for step in range(count):
        p = moved(problem(T, S, 8, 128, 64, dtype=torch.float32, seed=step), "cuda")
        x, idx, probs, dout = (
            t.chunk(2)[dist.get_rank()] for t in (p.x, p.topk_idx, p.probs, p.dout)
        )
        loss = (net(x, idx, probs) - dout).square().mean()
        loss.backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def sharded() -> tuple[Any, Any]:
    net = Net(device="cuda").cuda()
    fully_shard(net, ignored_params=shard_experts(net, dist.group.WORLD))
    assert all(isinstance(p, DTensor) for p in net.parameters())
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)


def saved_and_loaded(_: Any, path: str) -> None:
    """One fused optimizer of all; a checkpoint goes on to the bit."""
    net, optimizer = sharded()
    steps(net, optimizer, 2)
    weights, moments = get_state_dict(net, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    through = steps(net, optimizer, 2)
    other, its = sharded()
    weights, moments = get_state_dict(other, its)
    state = {"model": weights, "optimizer": moments}
    state_dict_loader.load(state, checkpoint_id=path)
    set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert steps(other, its, 2) == through
    for name, t in everything(net, [optimizer]).items():
        assert torch.equal(everything(other, [its])[name], t), name


def test_checkpoints(pool: Pool, tmp_path: Path) -> None:
    results(pool.run(2, saved_and_loaded, str(tmp_path / "checkpoint")))
