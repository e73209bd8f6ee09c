"""fully_shard over NCCL gathers experts in FP8: the bits of gathering bfloat16, and less memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import ranks
from fp8moe_cutlass.nn import MoEExperts
from moe_problem import moved
from ranks import Pool, results
from test_nn_fsdp_gather import Net, along, as_they_are, loss_of, sharded, tokens

pool = ranks.pool(2, backend="nccl")


def steps(group: Any, how: dict[str, Any], compiled: bool) -> None:
    torch._dynamo.reset()
    here, mesh = f"cuda:{dist.get_rank()}", DeviceMesh.from_group(group, "cuda")
    offloaded = "offload_policy" in how
    nets = as_they_are(Net(5, intermediate=256)), Net(5, intermediate=256)
    losses: list[list[torch.Tensor]] = [[], []]
    for net, found in zip(nets, losses, strict=True):
        sharded(net if offloaded else net.to(here), mesh, **how)
        if compiled:
            for layer in net.layers:
                layer.compile(fullgraph=True)
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=not offloaded)
        for step in range(3):
            loss = loss_of(net, moved(tokens(step, 5), here))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(a.to_local(), b.to_local())


@pytest.mark.parametrize("compiled", [False, True])
def test_same_bits(compiled: bool, pool: Pool) -> None:
    results(pool.run(2, steps, {"reshard_after_forward": True}, compiled))


@pytest.mark.parametrize("dims", [(1, 1), (1, 2)], ids=str)
def test_parts_of_whole_blocks(dims: tuple[int, int], pool: Pool) -> None:
    results(pool.run(2, steps, {"shard_placement_fn": partial(along, dims)}, False))


def test_cpu_offload(pool: Pool) -> None:
    results(pool.run(2, steps, {"offload_policy": CPUOffloadPolicy()}, False))


def peak(group: Any) -> None:
    """Four layers of 128 MB in bf16: at most two are whole at a time, in half the bytes."""
    here, mesh = f"cuda:{dist.get_rank()}", DeviceMesh.from_group(group, "cuda")
    peaks = []
    for kind in (as_they_are, lambda net: net):
        net = nn.Module()
        net.layers = nn.ModuleList(MoEExperts(16, 2048, 704, device=here) for _ in range(4))
        kind(net)
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
        x = torch.randn(64, 2048, device=here, dtype=torch.bfloat16, requires_grad=True)
        ids, probs = torch.randint(16, (64, 2), device=here), torch.rand(64, 2, device=here)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        h = x
        with torch.no_grad():
            for layer in net.layers:
                h = h + layer(h, ids, probs)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - held)
        del net, layer, h
    assert peaks[1] < 0.6 * peaks[0]


def test_memory_of_a_forward(pool: Pool) -> None:
    results(pool.run(2, peak))
