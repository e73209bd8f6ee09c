"""The expert block in bfloat16, in torch alone: what FP8 is compared with, and runs anywhere.

The same steps, the same names and the same deterministic sums as fp8.py, without FP8 and without
this library's kernels. On a GPU torch.compile fuses the activation and the sums over slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass.autograd.activation import backward_of, forward_of
from fp8moe_cutlass.autograd.arguments import as_counts
from fp8moe_cutlass.autograd.body import (
    Biases,
    Counters,
    ForwardWeights,
    Gradients,
    Need,
    Options,
    by_slot,
)
from fp8moe_cutlass.autograd.compiled import compiled
from fp8moe_cutlass.autograd.streams import now_on
from fp8moe_cutlass.autograd.weights import is_turned
from fp8moe_cutlass.ops._words import shape_of
from fp8moe_cutlass.routing import RoutingPlan


class Plan(NamedTuple):
    """The rows of assignments, by expert, in token order; dropped ones come last. A plan of rows
    that came grouped has `offsets` alone, and `padding` where there is any."""

    offsets: Tensor  # [E] i32: the end of each expert's rows
    order: Any = None  # [R] i64: the assignment (token * S + slot) of each row
    row_of: Any = None  # [T, S] i64: the row of each assignment; -1 where it is dropped
    padding: Any = None  # [R] bool: rows between the experts' own; None: there are none

    def rows_of(self, tokens: Tensor) -> Tensor:
        """tokens [T, C] -> their rows [R, C]."""
        return tokens if self.order is None else tokens[self.order // self.row_of.shape[1]]

    def without_padding(self, rows: Tensor) -> Tensor:
        """rows [R, ...], zero where they are padding."""
        if self.padding is None:
            return rows
        return rows.masked_fill(self.padding.view(-1, *[1] * (rows.ndim - 1)), 0.0)

    def expert_of(self, rows: Tensor) -> Tensor:
        """[R] the expert of each of rows [R, ...]; the last one past all experts' rows."""
        return expert_of(self.offsets, rows)

    def sums_of(self, rows: Tensor) -> Tensor:
        """rows [R, C] -> the sum of each token's [T, C]."""
        return rows if self.row_of is None else sum_slots(rows, self.row_of)


SAVED_TENSORS = 11  # of Saved.tensors()
ROWS_APART = ()  # of these, rows that may lie apart


class Saved(NamedTuple):
    """The tensors that the backward reads of the forward."""

    offsets: Tensor  # the fields of Plan
    order: Tensor | None
    row_of: Tensor | None
    padding: Tensor | None
    x: Tensor  # [T, H] bf16
    z: Tensor | None  # [R, 2I] bf16; None: computed again
    probs: Tensor | None
    gate_up: Tensor  # the parameters
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def sizes(self) -> None:
        """None: fp8.Saved has the sizes of a plan here."""

    def tensors(self) -> list[Tensor | None]:
        """The fields."""
        return list(self)

    @staticmethod
    def of(tensors: Sequence[Any], sizes: Any, recipe: None, grouped: bool) -> Saved:
        """The same again: sizes, recipe and grouped are for FP8."""
        return Saved(*tensors)


class Wgrad(NamedTuple):
    """The gradient of one weight, still to be computed: left^T right over the rows of each
    expert."""

    left: Tensor  # [R, N]
    right: Tensor  # [R, K], or [T, K] with `gather`
    plan: Plan
    gather: bool = False
    scale: float = 1.0  # of the result

    def scaled(self, by: float) -> Wgrad:
        """`by` times this gradient; a power of two goes into the smaller operand, exactly."""
        if math.frexp(by)[0] == 0.5:
            return self._replace(right=self.right * by)
        return self._replace(scale=self.scale * by)

    def run(
        self, out: Tensor | None, accumulate: bool, dtype: str, *of_fp8: Any, turned: bool = False
    ) -> Tensor:
        """dW [E, N, K], written (accumulate: added) to `out`; None: a new bf16 tensor. of_fp8: what
        fp8_wgrad.Wgrad takes besides. turned: as it has it."""
        right = self.plan.rows_of(self.right) if self.gather else self.right
        if turned:
            dw = grouped_mm(right.t(), self.left, self.plan.offsets).mT
        else:
            dw = grouped_mm(self.left.t(), right, self.plan.offsets)
        if self.scale != 1.0:
            dw *= self.scale
        if out is None:
            return dw
        return out.add_(dw) if accumulate else out.copy_(dw)


def enter(t: Tensor, recipe: None, *, gradient: bool = False, grouped: bool = False) -> Tensor:
    """t in bfloat16, dense."""
    t = t.bfloat16()  # an empty one is contiguous to torch, whose GEMM then refuses its strides
    return t.contiguous() if t.numel() else t.new_empty(t.shape)


def make_plan(topk_idx: Tensor, num_experts: int, capacity: int | None = None) -> Plan:
    """Sort the assignments of topk_idx [T, S] by expert; -1 is dropped.

    There are capacity rows (T S if None); assignments that find none are dropped too.
    """
    shape_of("route", "topk_idx", topk_idx, 2)
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"[route] topk_idx must be one of int32, int64; got {topk_idx.dtype}")
    if topk_idx.device.type == "cpu":
        bad = (topk_idx < -1) | (topk_idx >= num_experts)
        if bool(bad.any()):
            value = int(topk_idx[bad][0])
            raise ValueError(f"[route] topk_idx must lie in [-1, {num_experts}); got {value}")
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
    return Plan(offsets, order, torch.where(kept, row_of, -1))


def grouped_plan(counts: Tensor | Sequence[int] | RoutingPlan, rows: Tensor) -> Plan:
    """The plan of rows [R, H] that came grouped, from Grouped's counts."""
    if isinstance(counts, RoutingPlan):
        padding = counts.token_of_row < 0 if counts.align > 1 else None
        return Plan(counts.row_offsets[1:].clone(), padding=padding)
    counts = now_on(rows.device, as_counts("grouped_plan", counts).int())
    return Plan(counts.cumsum(0, dtype=torch.int32))


def dropped(topk_idx: Tensor, plan: Plan) -> Tensor:
    """[1] how many entries found no place in the plan's capacity."""
    found: Tensor = (topk_idx >= 0).sum() - (plan.row_of >= 0).sum()
    return found[None]


def weights(
    gate_up: Tensor, down: Tensor, given: None, options: Options, need: Need | None
) -> ForwardWeights:
    """The parameters in bfloat16."""
    return ForwardWeights((_weight(gate_up), _weight(down)), (gate_up, down))


def _weight(w: Tensor) -> Tensor:
    """w [E, N, K] in bfloat16, dense; on a GPU one way or the other."""
    # On some CPUs the order of torch's sums depends on the way.
    return w.bfloat16() if w.is_cuda and is_turned(w) else enter(w, None)


def forward(
    x: Tensor,
    probs: Tensor | None,
    plan: Plan,
    weights: ForwardWeights,
    options: Options,
    need: Need | None,
    counters: Counters | None = None,
    into: None = None,
    biases: Biases | None = None,
) -> tuple[Tensor, Saved | None]:
    """x [T, H] bf16, probs [T, S] f32 -> out [T, H] bf16, and what `backward` reads, if there is a
    `need`. Grouped: x [R, H], probs [R] or None -> out [R, H]."""
    gate_up, down = weights.multiplied
    x, probs = plan.without_padding(x), None if probs is None else plan.without_padding(probs)
    z = _preactivation(x, gate_up, plan, None if biases is None else biases.gate_up)
    row_probs = _row_probs(probs, z, plan)
    y = grouped_mm(forward_of(options.activation)(z, row_probs), down.mT, plan.offsets)
    if biases is not None:
        y = plus_weighted(y, biases.down, plan.expert_of(y), row_probs)
    out = plan.sums_of(y)
    if need is None:
        return out, None
    kept = None if options.preactivation == "recompute" else z
    return out, Saved(*plan, x, kept, probs, *weights.source, *(biases or ()))


def backward(
    dout: Tensor,
    saved: Saved,
    options: Options,
    need: Need,
    counters: Counters | None = None,
    into: None = None,
) -> Gradients:
    """The gradients of `forward`, given that of its output, of x's form, in bf16."""
    plan = Plan(*saved[:4])
    x, z, probs, gate_up, down, gate_up_bias, down_bias = saved[4:]
    gate_up, down = _weight(gate_up), _weight(down)
    dout = plan.without_padding(dout)
    if z is None:
        z = _preactivation(x, gate_up, plan, gate_up_bias)
    dy = plan.rows_of(dout)
    dh = grouped_mm(dy, down, plan.offsets)
    row_probs = _row_probs(probs, z, plan)
    dz, row_dprobs, h = backward_of(options.activation)(dh, z, row_probs)
    if down_bias is not None and need.probs:
        row_dprobs = row_dprobs + _dots(dy, down_bias, plan.expert_of(dy))
    dprobs = None
    if need.probs:
        dprobs = row_dprobs if plan.row_of is None else by_slot(row_dprobs, plan.row_of)
    of_biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if down_bias is not None and need.biases:
        of_biases = _sums(dz, torch.ones_like(row_probs), plan), _sums(dy, row_probs, plan)
    return Gradients(
        plan.sums_of(grouped_mm(dz, gate_up, plan.offsets)) if need.x else None,
        dprobs,
        Wgrad(dz, x, plan, gather=True) if need.gate_up else None,
        Wgrad(dy, h, plan) if need.down else None,
        biases=of_biases,
    )


def _preactivation(x: Tensor, gate_up: Tensor, plan: Plan, bias: Tensor | None) -> Tensor:
    """z [R, 2I] bf16."""
    z = grouped_mm(plan.rows_of(x), gate_up.mT, plan.offsets)
    return z if bias is None else plus(z, bias, plan.expert_of(z))


def expert_of(ends: Tensor, rows: Tensor) -> Tensor:
    """[R] the expert of each of rows [R, ...], whose experts' rows end at ends [E]; the last one
    past all of them."""
    at = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    return torch.searchsorted(ends, at, right=True).clamp_(max=ends.shape[0] - 1)


@compiled
def plus(rows: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
    """rows [R, N] + bias[expert] of bias [E, N] and expert [R], in f32, rounded once."""
    return (rows.float() + bias[expert].float()).to(rows.dtype)


@compiled
def plus_weighted(rows: Tensor, bias: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
    """The same with weights[row] * bias[expert]; weights [R] f32."""
    return (rows.float() + bias[expert].float() * weights[:, None]).to(rows.dtype)


@compiled
def _dots(rows: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
    return (rows.float() * bias[expert].float()).sum(dim=-1)


def _sums(rows: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """The gradient of a bias [E, N] in bf16: the sum of weights[row] * rows[row] of each expert, in
    one order."""
    u = weights.bfloat16()[:, None].repeat(1, 8)  # what torch multiplies at least
    return grouped_mm(u.t(), rows, plan.offsets)[:, 0].contiguous()


def _row_probs(probs: Tensor | None, z: Tensor, plan: Plan) -> Tensor:
    if probs is None:
        return z.new_ones(z.shape[0], dtype=torch.float32)
    return probs if plan.order is None else probs.flatten()[plan.order]


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """F.grouped_mm: rows of expert e times b[e], summed in float32 and rounded once. Rows past the
    last expert's are unspecified."""
    if a.device.type == "cpu":  # without AVX-512 torch takes 13 times as long for bfloat16
        return F.grouped_mm(a.float(), b.float(), offs=offsets).to(a.dtype)
    return F.grouped_mm(_aligned(a), _aligned(b), offs=offsets)


def _aligned(t: Tensor) -> Tensor:
    """t from a multiple of 16 bytes on, as torch's kernel reads it."""
    return t if t.data_ptr() % 16 == 0 else t.clone()


@compiled
def sum_slots(rows: Tensor, row_of: Tensor) -> Tensor:
    """out[t] = the sum over slots of rows[row_of[t, s]], in f32, rounded once; -1 adds nothing.
    Slot by slot: no tensor [T, S, H], and inductor's reduction over slots takes ten times the
    bytes' time."""
    total = rows.new_zeros(row_of.shape[0], rows.shape[1], dtype=torch.float32)
    for row in row_of.unbind(1):
        total += rows[row.clamp(min=0)].masked_fill_((row < 0)[:, None], 0.0)
    return total.to(rows.dtype)
