"""The activations that tests run, and their formulas in torch, of any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8moe_cutlass import Activation

ACTIVATIONS = {
    "swiglu": Activation(),
    "swiglu limited": Activation(limit=1.3),
    "swiglu interleaved": Activation(interleaved=True),
    "gpt-oss": Activation(alpha=1.702, offset=1.0, limit=1.5),
    "gpt-oss interleaved": Activation(alpha=1.702, offset=1.0, limit=7.0, interleaved=True),
    "limit after": Activation("swiglu_limit_after", limit=0.9),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu2": Activation("relu2"),
}
GATED = [name for name, activation in ACTIVATIONS.items() if activation.gated]


def formula(z: Tensor, activation: Activation) -> Tensor:
    """h [..., I] of z, by torch's own functions; beyond a limit the gradient is torch.clamp's."""
    a = activation
    if a.kind == "relu2":
        return torch.nn.functional.relu(z).square()
    gate, up = (z[..., ::2], z[..., 1::2]) if a.interleaved else z.chunk(2, -1)
    if a.kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    limit = torch.inf if a.limit is None else a.limit
    if a.kind == "swiglu_limit_after":
        return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(a.alpha * gate) * (up + a.offset)
