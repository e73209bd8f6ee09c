"""The optimizers and averages that the page on several GPUs names, over shared experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import ranks
from fp8moe_cutlass.nn import shard_experts
from ranks import Failure, Pool, results
from reference import relative_error
from test_shard_experts import Net, backward, mesh_of, whole

TAKE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    **{name: {} for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")},
    **{name: {} for name in ("Adagrad", "Adadelta", "RMSprop", "ASGD")},
}
FUSED = {"Adam", "AdamW"}


pool = ranks.pool(2, timeout=20.0)


def stepped(group: Any, how: str, name: str, fused: bool) -> list[Tensor]:
    """The weights after two steps."""
    net = Net()
    if group is not None:
        shared = shard_experts(net, group)
        if how == "ddp":
            model: Any = nn.parallel.DistributedDataParallel(net, process_group=group)
        else:
            model = fully_shard(net, mesh=mesh_of(group), ignored_params=shared)
    else:
        model = net
    kinds = [{"params": list(m.parameters())} for m in (net.linears, net.experts)]
    options = TAKE.get(name, {}) | ({"fused": True} if fused else {})
    optimizer = getattr(torch.optim, name)(kinds, **options)
    for step in range(2):
        backward(model, group, step)
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p) for p in net.experts.parameters()]


@pytest.mark.parametrize("name", TAKE)
def test_optimizers_take_the_shares(pool: Pool, name: str) -> None:
    """In one layout or the other, as one process but for roundings, which a first step that
    divides gradients by themselves makes as large as a step: those elements are few."""
    want = stepped(None, "", name, False)
    start = [whole(p) for p in Net().experts.parameters()]
    for how in ("ddp", "fully_shard"):
        for fused in {False, name in FUSED}:
            for found in results(pool.run(2, stepped, how, name, fused)):
                for got, its, before in zip(found, want, start, strict=True):
                    assert relative_error(got - before, its - before) < 0.3, (how, fused)


@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_other_optimizers_raise(pool: Pool, name: str) -> None:
    for failed in pool.run(2, stepped, "fully_shard", name, False):
        assert isinstance(failed, Failure)
        assert "in-place operations that require placement changes" in failed.message


def test_adafactor_beside_ddp_takes_norms_of_each_rank(pool: Pool) -> None:
    """torch's own fault (`.item()` of a DTensor's norm): once it is mended, so is the page."""
    want = stepped(None, "", "Adafactor", False)
    start = [whole(p) for p in Net().experts.parameters()]
    [first, _] = results(pool.run(2, stepped, "ddp", "Adafactor", False))
    assert relative_error(first[0] - start[0], want[0] - start[0]) > 0.1


def averaged(group: Any, multi: bool) -> list[Tensor]:
    net = Net()
    if group is not None:
        shard_experts(net, group)
    how = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if multi else {"avg_fn": get_ema_avg_fn(0.9)}
    average = AveragedModel(net, **how)
    for _ in range(2):
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(2.0)
        average.update_parameters(net)
    return [whole(p) for p in average.parameters()]


def test_averaged_model_takes_avg_fn(pool: Pool) -> None:
    for found in results(pool.run(2, averaged, False)):
        for got, want in zip(found, averaged(None, False), strict=True):
            assert torch.equal(got, want)
    for failed in pool.run(2, averaged, True):
        assert isinstance(failed, Failure)
        assert "mixed torch.Tensor and DTensor" in failed.message
