"""The expert block in bfloat16, in torch alone: what FP8 is compared with, and runs anywhere.

The same steps, the same names and the same deterministic sums as fp8.py, without FP8 and without
this library's kernels. On a GPU torch.compile fuses SwiGLU and the sums over slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass.autograd.compiled import compiled
from fp8moe_cutlass.autograd.weight_grad import Gradients, Wgrad


class Groups(NamedTuple):
    """Assignments grouped by expert, in token order; dropped ones come last."""

    order: Tensor  # [R] i64: the assignment (token * S + slot) of each row
    row_of: Tensor  # [T, S] i64: the row of each assignment; -1 where it is dropped
    offsets: Tensor  # [E] i32: the end of each expert's rows

    @property
    def token_of_row(self) -> Tensor:
        return self.order // self.row_of.shape[1]


def group(topk_idx: Tensor, num_experts: int, capacity: int | None = None) -> Groups:
    """Sort the assignments of topk_idx [T, S] by expert; -1 is dropped.

    There are capacity rows (T S if None); assignments that find none are dropped too.
    """
    if topk_idx.device.type == "cpu" and not torch.compiler.is_compiling():
        bad = (topk_idx < -1) | (topk_idx >= num_experts)
        if bool(bad.any()):
            value = int(topk_idx[bad][0])
            raise ValueError(f"[route] expert ids must lie in [-1, {num_experts}); got {value}")
    kept = (topk_idx >= 0) & (topk_idx < num_experts)
    # int32: a radix sort of half the passes that int64 takes.
    expert = torch.where(kept, topk_idx, num_experts).int().flatten()
    grouped, order = torch.sort(expert, stable=True)
    row_of = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.numel(), device=order.device)
    )
    ids = torch.arange(num_experts, dtype=expert.dtype, device=order.device)
    offsets = torch.searchsorted(grouped, ids, right=True, out_int32=True)
    row_of = row_of.view(topk_idx.shape)
    if capacity is not None and capacity < order.numel():
        order, offsets = order[:capacity], offsets.clamp(max=capacity)
        kept = kept & (row_of < capacity)
    return Groups(order, torch.where(kept, row_of, -1), offsets)


def forward(
    x: Tensor, probs: Tensor, groups: Groups, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """x [T, H] bf16, probs [T, S] f32 -> out [T, H] bf16 and the pre-activation z [A, 2I] bf16."""
    z = rows_times(x[groups.token_of_row], gate_up.mT, groups)
    h = swiglu(z, probs.flatten()[groups.order])
    y = rows_times(h, down.mT, groups)
    return sum_slots(y, groups.row_of), z


def backward(
    dout: Tensor,
    x: Tensor,
    z: Tensor | None,
    probs: Tensor,
    groups: Groups,
    gate_up: Tensor,
    down: Tensor,
    *,
    need_dx: bool = True,
) -> Gradients:
    """The gradients of `forward`, given that of its output, dout [T, H] bf16.

    z None: it is computed again from x.
    """
    token, p = groups.token_of_row, probs.flatten()[groups.order]
    x_rows = x[token]
    if z is None:
        z = rows_times(x_rows, gate_up.mT, groups)
    dy = dout[token]
    dh = rows_times(dy, down, groups)
    dz, row_dprobs, h = swiglu_backward(dh, z, p)
    dropped = groups.row_of < 0
    dprobs = row_dprobs[groups.row_of.clamp(min=0)].masked_fill(dropped, 0.0)

    def gate_up_wgrad(out: Tensor | None, accumulate: bool, dtype: str) -> Tensor:
        return _deliver(grouped_mm(dz.t(), x_rows, groups.offsets), out, accumulate)

    def down_wgrad(out: Tensor | None, accumulate: bool, dtype: str) -> Tensor:
        return _deliver(grouped_mm(dy.t(), h, groups.offsets), out, accumulate)

    dx = sum_slots(rows_times(dz, gate_up, groups), groups.row_of) if need_dx else None
    return Gradients(
        dx,
        dprobs,
        Wgrad(gate_up_wgrad, (dz, x_rows, groups)),
        Wgrad(down_wgrad, (dy, h, groups)),
    )


def rows_times(rows: Tensor, w: Tensor, groups: Groups) -> Tensor:
    """rows of expert e times w[e]; rows past the last expert's are unspecified."""
    return grouped_mm(rows, w, groups.offsets)


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """F.grouped_mm, summed in float32 and rounded once."""
    if a.device.type == "cpu":
        product: Tensor = _grouped_mm_of_float32(a, b, offsets)
        return product
    return F.grouped_mm(a, b, offs=offsets)


# On CPUs without AVX-512 torch takes 13 times as long for bfloat16 operands. An op of its own, as
# torch.compile's fake of _grouped_mm takes no others.
@torch.library.custom_op("fp8moe::_grouped_mm_of_float32", mutates_args=(), device_types="cpu")
def _grouped_mm_of_float32(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(a.float(), b.float(), offs=offsets).to(a.dtype)


@_grouped_mm_of_float32.register_fake
def _(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    experts = [] if b.ndim == 3 else [offsets.shape[0]]
    return a.new_empty(*experts, a.shape[0], b.shape[-1])


@compiled
def sum_slots(rows: Tensor, row_of: Tensor) -> Tensor:
    """out[t] = the sum over slots of rows[row_of[t, s]], in f32, rounded once; -1 adds nothing.
    Slot by slot: no tensor [T, S, H], and inductor's reduction over slots takes ten times the
    bytes' time."""
    total = rows.new_zeros(row_of.shape[0], rows.shape[1], dtype=torch.float32)
    for row in row_of.unbind(1):
        total += rows[row.clamp(min=0)].masked_fill_((row < 0)[:, None], 0.0)
    return total.to(rows.dtype)


@compiled
def swiglu(z: Tensor, p: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up * p[:, None]).to(z.dtype)


@compiled
def swiglu_backward(dh: Tensor, z: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dz [A, 2I], the rows' dprob [A] f32, and `swiglu` [A, I] again, from one pass over z."""
    gate, up = z.float().chunk(2, dim=-1)
    dh = dh.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dsilu = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dout = dh * p[:, None]
    dz = torch.cat([(dout * dsilu * up).to(z.dtype), (dout * silu).to(z.dtype)], dim=-1)
    h = silu * up
    return dz, (h * dh).sum(dim=-1), (h * p[:, None]).to(z.dtype)


def _deliver(dw: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    if out is None:
        return dw
    return out.add_(dw) if accumulate else out.copy_(dw)
