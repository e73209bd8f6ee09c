"""How many calls of this package's Python a step makes on the host. Fewer is simpler and faster."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8moe_cutlass
import ranks
from fp8moe_cutlass import nn
from ranks import Pool, results

PACKAGE = str(Path(fp8moe_cutlass.__file__).parent)

pool = ranks.pool(2)


def calls(moe: nn.MoE) -> int:
    """Of a second step; comprehensions count, as Python 3.11 makes functions of them."""
    count = 0

    def seen(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    for _ in range(2):
        x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
        for p in moe.parameters():
            p.grad = None
        count = 0
        threading.setprofile(seen)
        sys.setprofile(seen)
        moe(x).float().square().mean().backward()
        sys.setprofile(None)
        threading.setprofile(None)
    return count


def layer(**options: Any) -> nn.MoE:
    router = nn.Router(256, num_experts=8, top_k=2, **options)
    return nn.MoE(router, nn.MoEExperts(num_experts=8, hidden_size=256, intermediate_size=128))


def test_one_process_with_a_balancing_loss() -> None:
    assert calls(layer(coefficients=nn.LossCoefficients(balancing=0.01))) <= 121


def operators(moe: nn.MoE) -> int:
    """Of torch, without their own operators: what a view and a copy of a few words cost the host
    is more than a call of this package's Python."""
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        moe(x).float().square().mean().backward()
    of = [(e.name, e.cpu_parent.name if e.cpu_parent else "") for e in profile.events()]
    return sum(name.startswith("aten::") > parent.startswith("aten::") for name, parent in of)


def on_a_rank(group: Any, transport: str) -> tuple[int, int]:
    moe = layer()
    nn.shard_experts(moe, dist.group.WORLD, transport=transport)
    return calls(moe), operators(moe)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "most"), [("nccl", (175, 134)), ("peer", (289, 113))])
def test_two_ranks_with_exact_sizes(pool: Pool, transport: str, most: tuple[int, int]) -> None:
    for found in results(pool.run(2, on_a_rank, transport)):
        assert found[0] <= most[0], found
        assert found[1] <= most[1], found
