"""The experts of a rank in bfloat16: the same exchange, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8moe_cutlass.autograd import bf16
from fp8moe_cutlass.autograd.ctx_io import Saved
from fp8moe_cutlass.autograd.weight_grad import Gradients
from fp8moe_cutlass.distributed.exchange import Exchange, Sizes
from fp8moe_cutlass.distributed.rank_agreement import Terms


class Plan(NamedTuple):
    """What ops.dispatch_plan makes, in plain torch: slot r of a token is rank r."""

    row_of: Tensor  # [T, ranks] i64, -1: the token has no row for this rank
    token_of_row: Tensor  # [R] i64, -1: the row has no token
    status: Tensor  # [2] i64: rows dropped past a segment, expert ids out of range

    @property
    def rows(self) -> int:
        return self.token_of_row.shape[0]


def dispatch_plan(
    topk_idx: Tensor, num_experts: int, ranks: int, segment: int
) -> tuple[Plan, Tensor]:
    """ops.dispatch_plan: topk_idx [T, S] -> the plan and counts [ranks, 2] i32."""
    tokens, slots = topk_idx.shape
    bad = (topk_idx < -1) | (topk_idx >= num_experts)
    if topk_idx.device.type == "cpu" and bool(bad.any()):
        value = int(topk_idx[bad][0])
        raise ValueError(f"[dispatch_plan] expert ids must lie in [-1, {num_experts}); got {value}")
    rank = torch.arange(ranks, device=topk_idx.device)
    owner = topk_idx.masked_fill(bad, -1).div(num_experts // ranks, rounding_mode="floor")
    entries = (owner == rank[:, None, None]).sum(dim=2)  # [ranks, T]; -1 // n is nobody's
    hit = entries > 0
    # One scan of ranks * T: along T alone a thread per rank would walk from token to token.
    row = hit.flatten().cumsum(0).view(ranks, tokens) - 1
    total = hit.sum(dim=1)
    bound = ranks * segment if segment else tokens * min(slots, ranks)
    kept = hit
    if segment:
        within = row - (total.cumsum(0) - total)[:, None]
        kept = hit & (within < segment)
        row = rank[:, None] * segment + within
    token = torch.arange(tokens, device=topk_idx.device).expand(ranks, tokens)
    at = torch.where(kept, row, bound).flatten()  # the row past the last is for the others
    token_of_row = at.new_full((bound + 1,), -1).scatter_(0, at, token.flatten())[:bound]
    row_of = torch.where(kept, row, -1).t().contiguous()
    counts = torch.stack([kept.sum(dim=1), (entries * kept).sum(dim=1)], dim=1).int()
    status = torch.stack([total.sum() - kept.sum(), bad.sum()])
    return Plan(row_of, token_of_row, status), counts


@dataclass(frozen=True)
class Bf16Block:
    """bf16.forward and bf16.backward between two exchanges: a Block (experts.py).

    A row of the wire, bytes: H bf16 | S i32 ids, of all experts | S f32 probs, rounded up to 16;
    of a gradient, H bf16.
    """

    gate_up: Tensor  # [E / ranks, 2I, H], the parameter
    down: Tensor  # [E / ranks, H, I], the parameter
    keep: str = "none"
    recipe: None = None

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down

    def ready(self, terms: Terms, trained: bool) -> Bf16Block:
        return self if trained else replace(self, keep="none")

    def spent(self) -> Bf16Block:
        return self

    def plan(self, topk_idx: Tensor, exchange: Exchange) -> tuple[Plan, Tensor]:
        return dispatch_plan(topk_idx, exchange.num_experts, exchange.ranks, exchange.segment)

    def pack(
        self,
        x: Tensor,
        probs: Tensor,
        topk_idx: Tensor,
        plan: Plan,
        exchange: Exchange,
        sizes: Callable[[], Sizes],
    ) -> Tensor:
        tokens, hidden = x.shape
        width = (2 * hidden + 8 * topk_idx.shape[1] + 15) // 16 * 16
        # Every token as its row of the wire, and one that goes nowhere.
        packed = torch.empty(tokens + 1, width, dtype=torch.uint8, device=x.device)
        rows, ids, weights = _parts(packed, hidden, topk_idx.shape[1])
        rows[:tokens], ids[:tokens], weights[:tokens] = x, topk_idx, probs
        rows[tokens], ids[tokens], weights[tokens] = 0, -1, 0
        token = plan.token_of_row[: sizes().rows_sent]
        return packed[torch.where(token < 0, tokens, token)]

    def forward(
        self, rows: Tensor, slots: int, plan: Plan, exchange: Exchange, sizes: Sizes
    ) -> tuple[Tensor, tuple[Saved, ...]]:
        x, topk_idx, probs = _parts(rows, self.down.shape[1], slots)
        mine = exchange.local_experts
        topk_idx = topk_idx - mine.start
        topk_idx = topk_idx.masked_fill((topk_idx < 0) | (topk_idx >= len(mine)), -1)
        groups = bf16.group(topk_idx, len(mine), sizes.assignments)
        exchange.count(plan.status, (topk_idx >= 0).sum() - (groups.row_of >= 0).sum())
        out, z = bf16.forward(x, probs, groups, self.gate_up.bfloat16(), self.down.bfloat16())
        kept = z if self.keep == "bf16" else None
        return out, (x, kept, probs, groups, self.gate_up, self.down)

    def pack_gradient(self, dout: Tensor, plan: Plan, sizes: Sizes) -> Tensor:
        if dout.shape[0] == 0:
            return dout.new_zeros(sizes.rows_sent, dout.shape[1], dtype=torch.bfloat16)
        return dout.bfloat16()[plan.token_of_row[: sizes.rows_sent].clamp(min=0)]

    def backward(
        self,
        rows: Tensor,
        saved: list[Any],
        **need: bool,
    ) -> Gradients:
        x, z, probs, groups, gate_up, down = saved
        grads = bf16.backward(
            rows,
            x,
            z,
            probs,
            groups,
            gate_up.bfloat16(),
            down.bfloat16(),
            need_dx=need["need_dx"],
        )
        return grads if need["need_dprobs"] else replace(grads, dprobs=None)

    def combine(self, rows: Tensor, plan: Plan) -> Tensor:
        return bf16.sum_slots(rows, plan.row_of)


def _parts(packed: Tensor, hidden: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of packed rows [R, bytes]: x [R, H] bf16, topk_idx [R, S] i32, probs [R, S] f32."""
    ends = (2 * hidden, 2 * hidden + 4 * slots, 2 * hidden + 8 * slots)
    return (
        packed[:, : ends[0]].view(torch.bfloat16),
        packed[:, ends[0] : ends[1]].view(torch.int32),
        packed[:, ends[1] : ends[2]].view(torch.float32),
    )
