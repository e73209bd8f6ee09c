"""What the scripts of layers run: random inputs, and a module with a step over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8moe_cutlass.nn import MoEExperts

Shape = dict[str, int]
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def block(tokens: int, experts: int, slots: int, hidden: int, intermediate: int) -> Shape:
    return {"T": tokens, "E": experts, "S": slots, "H": hidden, "I": intermediate}


def caller(module: nn.Module, reuse: bool) -> Call:
    """How a step calls `module`: the FP8 layer quantizes its weights in every forward or, with
    `reuse`, multiplies FP8 weights that were made before. Other modules have no such choice."""
    if not reuse or not isinstance(module, MoEExperts) or module.recipe is None:
        return module
    weights = module.quantize_weights()
    return lambda x, topk_idx, probs: module(x, topk_idx, probs, weights=weights)


def routing(kind: str, tokens: int, experts: int, slots: int, device: torch.device) -> Tensor:
    """topk_idx [T, S] int64: "random" distinct experts; "zipf": distinct, expert e drawn with a
    weight of 1 / (e + 1); "one-hot": every assignment to expert 0."""
    if kind == "one-hot":
        return torch.zeros(tokens, slots, dtype=torch.int64, device=device)
    weights = torch.ones(experts, device=device)
    if kind == "zipf":
        weights /= torch.arange(1, experts + 1, device=device)
    return torch.multinomial(weights.expand(tokens, -1), slots)


@dataclass
class Inputs:
    """Leaves that take gradients, the routing, and the gradient of the output."""

    x: Tensor  # [T, H] bf16
    topk_idx: Tensor  # [T, S] i64
    probs: Tensor  # [T, S] f32
    dout: Tensor  # [T, H] bf16

    @classmethod
    def random(cls, shape: Shape, device: torch.device, kind: str = "random") -> Inputs:
        t, s, h = shape["T"], shape["S"], shape["H"]
        return cls(
            torch.randn(t, h, device=device).bfloat16().requires_grad_(),
            routing(kind, t, shape["E"], s, device),
            torch.rand(t, s, device=device).softmax(dim=-1).requires_grad_(),
            torch.randn(t, h, device=device).bfloat16(),
        )


class Contender:
    """A module over inputs, and what one step of it does. reuse: see `caller`."""

    def __init__(self, module: nn.Module, inputs: Inputs, reuse: bool = True) -> None:
        self.module, self.inputs = module, inputs
        self.call = caller(module, reuse)

    def clear(self) -> None:
        for leaf in (self.inputs.x, self.inputs.probs, *self.module.parameters()):
            leaf.grad = None

    def forward(self) -> Tensor:
        return self.call(self.inputs.x, self.inputs.topk_idx, self.inputs.probs)

    def backward(self, out: Tensor) -> None:
        torch.autograd.backward(out, self.inputs.dout)

    def step(self) -> None:
        """Forward and backward."""
        self.clear()
        self.backward(self.forward())
