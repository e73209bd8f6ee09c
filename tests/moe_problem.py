"""A small expert block with its inputs, what the layer's tests share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass.nn import MoEExperts
from reference import Result, moe_experts_grads


@dataclass
class BiasedResult(Result):
    """Of a layer with biases."""

    dgate_up_bias: Tensor
    ddown_bias: Tensor


@dataclass
class Problem:
    """Gaussian tokens, weights and output gradient; uniform probs; a routing."""

    x: Tensor  # [T, H]
    topk_idx: Tensor  # [T, S]
    probs: Tensor  # [T, S] f32
    gate_up: Tensor  # [E, 2I, H]
    down: Tensor  # [E, H, I]
    dout: Tensor  # [T, H]

    def to(self, device: Any) -> Problem:
        """With every tensor there."""
        return moved(self, device)

    def experts(self, **options: Any) -> MoEExperts:
        """A layer with these weights, where they are."""
        e, h, i = self.down.shape
        given = {"dtype": self.gate_up.dtype, "device": self.x.device, **options}
        return self.fill(MoEExperts(e, h, i, **given))

    @torch.no_grad()
    def fill(self, layer: MoEExperts) -> MoEExperts:
        """The layer, with these weights of its experts, and biases of about 1, if it has any."""
        mine, g = slice(layer.local_experts.start, layer.local_experts.stop), torch.Generator()
        layer.gate_up_proj.copy_(self.gate_up[mine])
        layer.down_proj.copy_(self.down[mine])
        for n, bias in enumerate(layer.local_biases() or ()):
            bias.copy_(torch.randn(len(self.down), bias.shape[1], generator=g.manual_seed(n))[mine])
        return layer

    def run(self, layer: Any, **call: Any) -> Result:
        """Output and gradients of the layer; the weights' are what .grad then holds."""
        x, probs = self.x.clone().requires_grad_(), self.probs.clone().requires_grad_()
        out = layer(x, self.topk_idx, probs, **call)
        out.backward(self.dout.to(out.dtype))
        grads = x.grad, probs.grad, layer.gate_up_proj.grad, layer.down_proj.grad
        biases = [getattr(layer, name).grad for name in getattr(layer, "bias_names", ())]
        return (BiasedResult if biases else Result)(out.detach(), *grads, *biases)

    def truth(self) -> Result:
        """The float64 reference."""
        return moe_experts_grads(
            self.x, self.topk_idx, self.probs, self.gate_up, self.down, self.dout
        )


def problem(
    tokens: int = 256,
    slots: int = 2,
    experts: int = 4,
    hidden: int = 256,
    intermediate: int = 128,
    *,
    topk_idx: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Problem:
    """Random routing to distinct experts unless topk_idx [tokens, slots] is given."""
    g = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    if topk_idx is None:
        topk_idx = torch.rand(tokens, experts, generator=g).topk(slots).indices
    return Problem(
        gaussian(tokens, hidden),
        topk_idx,
        torch.rand(topk_idx.shape, generator=g),
        gaussian(experts, 2 * intermediate, hidden) / hidden**0.5,
        gaussian(experts, hidden, intermediate) / intermediate**0.5,
        gaussian(tokens, hidden),
    )


def moved(thing: Any, device: Any) -> Any:
    """A Problem or Result with every tensor on `device`."""
    return replace(thing, **{name: t.to(device) for name, t in vars(thing).items()})


def unaligned(t: Tensor) -> Tensor:
    """t as a view from the middle of a flat buffer, an element past a multiple of 16 bytes."""
    return torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view(t.shape)


def run_unaligned(p: Problem, layer: Any) -> Result:
    """p.run(layer) on such views; the layer's parameters become such views."""
    for w in layer.parameters():
        w.data = unaligned(w)
    x, probs = unaligned(p.x).requires_grad_(), unaligned(p.probs).requires_grad_()
    out = layer(x, unaligned(p.topk_idx), probs)
    out.backward(unaligned(p.dout))
    return Result(out.detach(), x.grad, probs.grad, layer.gate_up_proj.grad, layer.down_proj.grad)


def assert_same(got: Result, want: Result) -> None:
    """Every tensor of the two results is bit-equal."""
    for name in vars(want):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
