"""Operands of a router's gate, and what comes of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# What is multiplied in float32: dtype of the tokens, how many, experts.
IN_FLOAT32 = [
    (torch.float16, 300, 24),
    (torch.float32, 300, 24),
    (torch.bfloat16, 1, 24),
    (torch.bfloat16, 300, 1),
]


def operands(
    t: int = 64, h: int = 96, e: int = 12, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H] bf16 and weight [E, H] f32, both with gradients; dlogits [T, E] f32."""
    x = torch.randn(t, h, device=device).bfloat16().requires_grad_()
    weight = ((torch.rand(e, h, device=device) * 2 - 1) / math.sqrt(h)).requires_grad_()
    return x, weight, torch.randn(t, e, device=device)


def gradients(
    f: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, dlogits: Tensor
) -> list[Tensor]:
    """logits of f(x, weight), dx, dweight."""
    logits = f(x, weight)
    return [logits.detach(), *torch.autograd.grad(logits, (x, weight), dlogits)]
