"""MoE and its router's losses on CUDA: what the CPU does, in a graph, compiled, and replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import LossCoefficients, MoE, MoEExperts, Router, RoutingRule, SharedExpert
from reference import relative_error

BALANCED = LossCoefficients(balancing=0.5, balancing_per_sequence=0.25, z=0.1)
V3 = RoutingRule(
    score="sigmoid", selection_bias=True, num_groups=4, topk_groups=2, best_per_group=2
)
RULES = pytest.mark.parametrize("rule", [RoutingRule(), V3], ids=["softmax", "v3"])


def moe_of(device: torch.device, rule: RoutingRule = V3, **options: Any) -> MoE:
    torch.manual_seed(0)
    moe = MoE(
        Router(256, 16, 4, rule, coefficients=BALANCED),
        MoEExperts(16, 256, 128, **options),
        SharedExpert(256, 128, output_gate=True),
    )
    return moe.to(device)


def tokens(device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 100, 256, generator=generator).bfloat16().to(device)


def step(moe: MoE, x: Tensor, f: Any = None) -> list[Tensor]:
    """Output, losses and gradients; no graph."""
    moe.zero_grad(set_to_none=True)
    out, routing = (moe if f is None else f)(x, return_routing=True)
    out.float().square().sum().backward()
    return [out.detach(), *routing.losses.values(), *(w.grad for w in moe.parameters())]


@RULES
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_captures_after_an_eager_step(
    rule: RoutingRule, recipe: Fp8Recipe | None, device: torch.device
) -> None:
    """An eager step on the default stream, then a capture; replayed on other tokens."""
    moe, x = moe_of(device, rule, recipe=recipe), tokens(device)
    first = step(moe, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(moe, x)
    for seed in (1, 2):
        x.copy_(tokens(device, seed))
        graph.replay()
        got = [t.clone() for t in captured]
        want = step(moe, x)
        assert all(map(torch.equal, got, want))
    assert not torch.equal(first[0], got[0])


@RULES
def test_losses_and_replay_are_those_of_the_cpu(rule: RoutingRule, device: torch.device) -> None:
    here = torch.device("cpu")
    x = tokens(here).flatten(0, 1).float()
    padding = torch.arange(300) % 7 == 0
    idx = torch.randint(16, (300, 4))
    results = []
    for place in (here, device):
        router = moe_of(place, rule).router
        for given in (None, idx.to(place)):
            router.zero_grad()
            routing = router(x.to(place), topk_idx=given, padding=padding.to(place), sequences=3)
            routing.topk_weights.square().sum().backward()
            results.append([*routing.losses.values(), routing.topk_weights, router.weight.grad])
            assert routing.losses.keys() == vars(BALANCED).keys()
    for cpu, cuda in zip(results[:2], results[2:], strict=True):
        for a, b in zip(cpu, cuda, strict=True):
            assert relative_error(b.detach().cpu(), a.detach()) < 1e-5


def test_make_graphed_callables(device: torch.device) -> None:
    """The output and the gradients, losses by coefficients included."""
    moe, x = moe_of(device), tokens(device)

    def run(f: Any) -> list[Tensor]:
        out = f(x)
        grads = torch.autograd.grad(out.float().square().sum(), list(moe.parameters()))
        return [out.detach().clone(), *grads]

    want = run(moe)
    got = run(torch.cuda.make_graphed_callables(moe, (tokens(device, 1),)))
    assert all(map(torch.equal, got, want))


def test_compiled(device: torch.device) -> None:
    """By inductor: the same experts, losses and gradients but for roundings."""
    moe, x = moe_of(device), tokens(device)
    want = step(moe, x)
    got = step(moe, x, torch.compile(moe, fullgraph=True))
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 0.05
