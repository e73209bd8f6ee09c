"""The same expert layer in bf16 torch, as fast as torch goes: a baseline of the layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe_cutlass import Activation
from fp8moe_cutlass.autograd.activation import forward_of
from fp8moe_cutlass.autograd.compiled import compiled
from fp8moe_cutlass.nn import MoEExperts


class TorchExperts(nn.Module):
    """grouped_mm, a compiled activation, gathers in both directions: no host sync, and no atomics
    but of biases. It shares the layer's parameters. On the CPU nothing is compiled."""

    def __init__(self, layer: MoEExperts) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = layer.gate_up_proj, layer.down_proj
        self.biases = nn.ParameterList(layer.local_biases() or ())
        plain = layer.activation == Activation()
        self.hidden = swiglu if plain else forward_of(layer.activation)

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor) -> Tensor:
        expert, order = torch.sort(topk_idx.flatten(), stable=True)
        rows = torch.arange(order.numel(), device=order.device)
        row_of = torch.empty_like(order).scatter_(0, order, rows).view(topk_idx.shape)
        experts = torch.arange(len(self.down_proj), device=order.device)
        ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
        x_rows, p = self.to_rows(x, probs, order, row_of)
        z = F.grouped_mm(x_rows, self.gate_up_proj.transpose(1, 2), offs=ends)
        if self.biases:
            z = plus(z, self.biases[0], expert)
        h = self.hidden(z, p)
        y = F.grouped_mm(h, self.down_proj.transpose(1, 2), offs=ends)
        if self.biases:
            y = plus(y, self.biases[1], expert, p)
        return self.to_tokens(y, order, row_of)

    def to_rows(self, x: Tensor, probs: Tensor, order: Tensor, row_of: Tensor) -> Any:
        return _ToRows.apply(x, probs, order, row_of)  # type: ignore[no-untyped-call]

    def to_tokens(self, y: Tensor, order: Tensor, row_of: Tensor) -> Tensor:
        out: Tensor = _ToTokens.apply(y, order, row_of)  # type: ignore[no-untyped-call]
        return out


@compiled
def swiglu(z: Tensor, p: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up * p[:, None]).to(z.dtype)


@compiled
def plus(rows: Tensor, bias: Tensor, expert: Tensor, p: Tensor | None = None) -> Tensor:
    of_rows = bias[expert].float()
    return (rows.float() + (of_rows if p is None else of_rows * p[:, None])).to(rows.dtype)


@compiled
def sum_slots(rows: Tensor, row_of: Tensor) -> Tensor:
    """Slot by slot: inductor's reduction over slots takes up to eight times as long."""
    first, *others = row_of.unbind(1)
    total = rows[first].float()
    for row in others:
        total = total + rows[row].float()
    return total.to(rows.dtype)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, order: Tensor, row_of: Tensor) -> Any:
        ctx.save_for_backward(row_of)
        return x[order // row_of.shape[1]], probs.flatten()[order]

    @staticmethod
    def backward(ctx: Any, dx_rows: Tensor, dp: Tensor) -> tuple[Tensor | None, ...]:
        (row_of,) = ctx.saved_tensors
        return sum_slots(dx_rows, row_of), dp[row_of], None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(order, row_of)
        return sum_slots(y.detach(), row_of)  # detached: compiled once for both passes

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        order, row_of = ctx.saved_tensors
        return dout[order // row_of.shape[1]], None, None
