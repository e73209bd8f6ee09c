"""TransformerEngine's row_id_map and pad_offsets from a RoutingPlan.

Mask map, int32 [T, 2E+1]: for a token with n experts, columns [0, n) hold its rows in descending
order, counted without padding; [E, E+n) the expert of each; column 2E holds n. pad_offsets [E]
int64 are the padding rows before each expert: the row in memory is row + pad_offsets[expert].
Index map, int32 [K*T]: element k*T + t is the row of slot k of token t, -1 where it was dropped.

What is in a map's other cells is unspecified. Everything runs on the device, without a host read.
ops.plan_from_row_id_map reads both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8moe_cutlass.routing import RoutingPlan, buffer_words


def pad_offsets_of(plan: RoutingPlan) -> Tensor:
    """[E] int64: padding rows before each expert."""
    counts = plan.tokens_per_expert.long()
    offsets: Tensor = plan.row_offsets[:-1] - (counts.cumsum(0) - counts)
    return offsets


def mask_map(plan: RoutingPlan, pad_offsets: Tensor | None) -> Tensor:
    """[T, 2E+1] int32 of a plan routed by a mask (S == E, slot e being expert e)."""
    experts = plan.experts
    rows = plan.row_of
    if pad_offsets is not None:
        rows = torch.where(rows >= 0, rows - pad_offsets.int(), -1)
    out = torch.empty(plan.tokens, 2 * experts + 1, dtype=torch.int32, device=rows.device)
    # Rows grow with the expert: descending rows are descending experts, and -1 comes last.
    out[:, :experts], out[:, experts:-1] = rows.sort(dim=1, descending=True)
    out[:, -1] = (rows >= 0).sum(dim=1)
    return out


def index_map(plan: RoutingPlan) -> Tensor:
    """[K*T] int32 of a plan routed by topk_idx [T, K]."""
    rows: Tensor = plan.row_of
    return rows.t().reshape(-1)


def repack(plan: RoutingPlan, rows: int) -> RoutingPlan:
    """The same plan for operands of exactly `rows` rows, all those its experts have."""
    experts, align = plan.experts, plan.align
    # The capacity for which R = align * floor((A + min(E, A) (align - 1)) / align) is `rows`.
    blocks = rows // align
    capacity = blocks if blocks <= experts else rows - experts * (align - 1)
    sizes = (plan.tokens, plan.slots, experts, align, capacity)
    new = RoutingPlan(plan.buffer.new_empty(buffer_words(*sizes)), *sizes)
    # Up to token_of_row, sections do not depend on the rows.
    head = plan.token_of_row.storage_offset() - plan.buffer.storage_offset()
    new.buffer[:head] = plan.buffer[:head]
    new.token_of_row.copy_(plan.token_of_row[:rows])
    new.slot_of_row.copy_(plan.slot_of_row[:rows])
    new.row_of.copy_(plan.row_of)
    blocks = min(len(new.col_blocks), len(plan.col_blocks))
    new.col_blocks[:blocks] = plan.col_blocks[:blocks]
    rest = new.col_blocks[blocks:]
    rest.zero_()
    rest[:, 3] = -1  # of no expert
    return new
