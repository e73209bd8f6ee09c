"""The Mixture-of-Experts block in plain torch, differentiable by torch's own autograd.

Written from the definition, expert by expert and without any of the library's code; in float64 it
is the truth the layer is measured against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def moe_experts(
    x: Tensor, topk_idx: Tensor, probs: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """out[t] = sum over s of probs[t,s] * down_e (silu(gate) * up), [gate | up] = gate_up_e x[t].

    x [T, H], topk_idx [T, S] (-1: none), probs [T, S], gate_up [E, 2I, H], down [E, H, I].
    """
    out = x.new_zeros(x.shape)
    for e in range(gate_up.shape[0]):
        token, slot = (topk_idx == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[e].T).chunk(2, dim=-1)
        y = (F.silu(gate) * up * probs[token, slot, None]) @ down[e].T
        out = out.index_add(0, token, y)
    return out


@dataclass
class Result:
    """The block's output and its gradients for one gradient of the output."""

    out: Tensor
    dx: Tensor
    dprobs: Tensor
    dgate_up: Tensor
    ddown: Tensor


def moe_experts_grads(
    x: Tensor, topk_idx: Tensor, probs: Tensor, gate_up: Tensor, down: Tensor, dout: Tensor
) -> Result:
    """moe_experts and its gradients in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, probs, gate_up, down)]
    out = moe_experts(leaves[0], topk_idx, *leaves[1:])
    return Result(out.detach(), *torch.autograd.grad(out, leaves, dout.double()))


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| (Frobenius, float64); 0 when both vanish."""
    got, want = got.double(), want.double()
    if want.norm() == 0:
        return float(got.norm())
    return float((got - want).norm() / want.norm())
