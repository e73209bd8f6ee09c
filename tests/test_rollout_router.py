"""The router beside those of inference engines: their choices, and replay of what they chose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe, nn
from reference_engines import route_deepseek_v3, route_qwen3

V3 = nn.RoutingRule(
    score="sigmoid", selection_bias=True, num_groups=8, topk_groups=4, best_per_group=2
)


def identity_router(experts: int, top_k: int, rule: nn.RoutingRule, device: Any) -> nn.Router:
    """A router whose logits are its tokens, exactly."""
    router = nn.Router(experts, experts, top_k, rule, device=device)
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
    return router


def logits_of(experts: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Of bfloat16 many are equal."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2000, experts, generator=g).to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_deepseek_v3(seed: int, dtype: torch.dtype, device: torch.device) -> None:
    """The same choices, ties included; weights within 4 ulp."""
    logits = logits_of(256, seed, dtype)
    bias = torch.randn(256, generator=torch.Generator().manual_seed(seed + 9)).mul(0.1)
    ids, weights = route_deepseek_v3(logits, bias, 8, 8, 4)
    router = identity_router(256, 8, V3, device)
    router.selection_bias.copy_(bias)
    found = router(logits.to(device))
    mine = found.topk_idx.cpu()
    same = (mine == ids).all(1)
    assert same.float().mean() > 0.999  # elsewhere two scores are nearer than an ulp of a sigmoid
    error = (found.topk_weights.cpu() - weights).abs() / weights
    assert error[same].max() < 5e-7


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_qwen3(dtype: torch.dtype, engine: str, device: torch.device) -> None:
    logits = logits_of(128, 5, dtype)
    ids, weights = route_qwen3(logits, 8, engine)
    found = identity_router(128, 8, nn.RoutingRule(), device)(logits.to(device))
    mine = found.topk_idx.cpu()
    same = (mine == ids).all(1)
    assert same.float().mean() > 0.999
    error = (found.topk_weights.cpu() - weights).abs() / weights
    assert error[same].max() < 1e-6


def test_replay_of_ids_and_weights(device: torch.device) -> None:
    """The forward's bits are those of the engine's weights, the gradients go to the router."""
    torch.manual_seed(0)
    rule = nn.RoutingRule(routed_scaling_factor=2.5)
    router = nn.Router(128, 8, 2, rule, device=device)
    experts = nn.MoEExperts(8, 128, 128, recipe=Fp8Recipe(weighting="output"), device=device)
    x = torch.randn(64, 128, device=device).bfloat16()
    ids = torch.rand(64, 8, device=device).topk(2).indices
    theirs = torch.rand(64, 2, device=device)
    own = router(x, topk_idx=ids).topk_weights
    weights = theirs + (own - own.detach())
    assert torch.equal(weights, theirs)
    out = experts(x, ids, weights)
    assert torch.equal(out, experts(x, ids, theirs))
    out.float().square().sum().backward()
    (through,) = torch.autograd.grad(
        router(x, topk_idx=ids).topk_weights,
        router.weight,
        _gradient_of(experts, x, ids, theirs),
    )
    assert torch.equal(router.weight.grad, through)


def _gradient_of(experts: nn.MoEExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    leaf = weights.clone().requires_grad_()
    (grad,) = torch.autograd.grad(experts(x, ids, leaf).float().square().sum(), leaf)
    return grad
