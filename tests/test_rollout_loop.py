"""Reinforcement learning: log-probabilities of a rollout and of training, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe, nn

VOCABULARY, HIDDEN, INNER, EXPERTS, TOP_K = 50, 128, 64, 8, 2
LENGTHS = [17, 1, 30, 9]
LONGEST = max(LENGTHS)


class Layer(torch.nn.Module):
    """A causal mean over the sequence and MoE, both normalized and added. What is dense is computed
    in float64 and rounded once, so that it does not depend on the batch."""

    def __init__(self, recipe: Fp8Recipe, device: Any) -> None:
        super().__init__()
        self.mix = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN, device=device) / HIDDEN**0.5)
        router = nn.Router(HIDDEN, EXPERTS, TOP_K, device=device)
        experts = nn.MoEExperts(EXPERTS, HIDDEN, INNER, recipe=recipe, device=device)
        self.router, self.experts = router, experts

    def forward(self, x: Tensor, sequences: list[slice], replayed: Any) -> Any:
        """replayed: ids and weights of a rollout, or None."""
        mean = torch.zeros_like(x, dtype=torch.float64)
        for s in sequences:
            count = torch.arange(1, s.stop - s.start + 1, device=x.device)[:, None]
            mean[s] = x[s].double().cumsum(0) / count
        x = x + (mean @ self.mix.double()).to(x.dtype)
        d = x.double()
        normal = (d * (d.square().mean(1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
        if replayed is None:
            routing = self.router(normal)
            weights = routing.topk_weights
        else:
            routing = self.router(normal, topk_idx=replayed[0])
            own = routing.topk_weights
            weights = replayed[1] + (own - own.detach())  # their values, this router's gradients
        ids = routing.topk_idx
        return x + self.experts(normal, ids, weights), (ids, weights.detach())


class Model(torch.nn.Module):
    """Log-probabilities of tokens [N], those of each sequence in a slice of them."""

    def __init__(self, recipe: Fp8Recipe, device: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN, device=device))
        self.layers = torch.nn.ModuleList(Layer(recipe, device) for _ in range(2))
        self.head = torch.nn.Parameter(torch.randn(HIDDEN, VOCABULARY, device=device) / HIDDEN)

    def forward(self, tokens: Tensor, sequences: list[slice], replayed: Any = None) -> Any:
        x, routed = self.embed[tokens].bfloat16(), []
        for n, layer in enumerate(self.layers):
            x, routing = layer(x, sequences, None if replayed is None else replayed[n])
            routed.append(routing)
        return torch.log_softmax(x.double() @ self.head.double(), dim=1).float(), routed


def packed() -> list[slice]:
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [slice(end - n, end) for n, end in zip(LENGTHS, ends, strict=True)]


def padded() -> list[slice]:
    return [slice(n * LONGEST, n * LONGEST + length) for n, length in enumerate(LENGTHS)]


def at(sequences: list[slice]) -> Tensor:
    """The places of all sequences' tokens, in their order."""
    return torch.cat([torch.arange(s.start, s.stop) for s in sequences])


LAYOUTS = {"packed": packed(), "padded": padded()}


def laid_out(tokens: Tensor, layout: str, device: Any, fill: int = 0) -> Tensor:
    """tokens [sum(LENGTHS), ...] as the layout has them."""
    size = LONGEST * len(LENGTHS) if layout == "padded" else len(tokens)
    wide = torch.full((size, *tokens.shape[1:]), fill, dtype=tokens.dtype)
    return wide.index_copy(0, at(LAYOUTS[layout]), tokens.cpu()).to(device)


# A rollout's layout, that of training, and whether training replays the rollout's ids and weights.
# The router's own logits are of one GEMM over all tokens, which may depend on what else is there.
LOOPS = [
    ("packed", "packed", False),
    ("padded", "padded", False),
    ("packed", "packed", True),
    ("packed", "padded", True),
    ("padded", "packed", True),
]


RECIPES = {"default": Fp8Recipe(), **{e: Fp8Recipe.rollout(e) for e in ("sglang", "vllm")}}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("rollout", "training", "replay"), LOOPS)
def test_log_probabilities_are_equal(
    rollout: str, training: str, replay: bool, name: str, device: torch.device
) -> None:
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=g)
    model = Model(RECIPES[name], device)
    with torch.no_grad():
        theirs, routed = model(laid_out(tokens, rollout, device), LAYOUTS[rollout])
    replayed = None
    if replay:
        kept = at(LAYOUTS[rollout])
        replayed = [
            (
                laid_out(ids.cpu()[kept], training, device, -1),
                laid_out(weights.cpu()[kept], training, device),
            )
            for ids, weights in routed
        ]
    ours, _ = model(laid_out(tokens, training, device), LAYOUTS[training], replayed)
    difference = ours.cpu()[at(LAYOUTS[training])] - theirs.cpu()[at(LAYOUTS[rollout])]
    assert difference.abs().max() == 0
    ours[at(LAYOUTS[training])].square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()
