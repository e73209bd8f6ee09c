"""TransformerEngine's row_id_map and pad_offsets: from a RoutingPlan, and back to one.

Mask map, int32 [T, 2E+1]: for a token with n experts, columns [0, n) hold its rows in descending
order, counted without padding; [E, E+n) the expert of each; column 2E holds n. pad_offsets [E]
int64 are the padding rows before each expert: the row in memory is row + pad_offsets[expert].
Index map, int32 [K*T]: element k*T + t is the row of slot k of token t, -1 where it was dropped.

What is in a map's other cells is unspecified. Everything runs on the device, without a host read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8moe_cutlass.routing import RoutingPlan, empty_plan


class Origin(NamedTuple):
    """What a map was made from, kept on the tensor itself."""

    plan: RoutingPlan
    padded: bool
    version: int  # of the map's memory: a map written to since is read again


_ORIGIN = "_fp8moe_origin"


def _attach(row_id_map: Tensor, plan: RoutingPlan, padded: bool = False) -> Tensor:
    """The map, with its plan remembered for unpermute."""
    version = 0 if row_id_map.is_inference() else row_id_map._version
    setattr(row_id_map, _ORIGIN, Origin(plan, padded, version))
    return row_id_map


def _attached(row_id_map: Tensor, padded: bool, rows: int) -> RoutingPlan | None:
    """The plan the map was made from, if the map still says the same and fits these rows."""
    origin: Origin | None = getattr(row_id_map, _ORIGIN, None)
    if origin is None or (origin.padded, origin.plan.rows) != (padded, rows):
        return None
    written = not row_id_map.is_inference() and row_id_map._version != origin.version
    return None if written else origin.plan


# ---- mask maps ----------------------------------------------------------------------------------


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
    return _attach(out, plan, padded=pad_offsets is not None)


def plan_of_mask_map(
    row_id_map: Tensor, pad_offsets: Tensor | None, rows: int
) -> tuple[RoutingPlan, bool]:
    """The plan of a map, for permuted operands of `rows` rows, and whether its align is too small.

    A map that lost its plan does not tell the align: a plan of align 1 is made, whose experts may
    have more padding than that.
    """
    padded = pad_offsets is not None
    if (plan := _attached(row_id_map, padded, rows)) is not None:
        return plan, False
    tokens, experts = row_id_map.shape[0], (row_id_map.shape[1] - 1) // 2
    used = torch.arange(experts, device=row_id_map.device) < row_id_map[:, -1:]
    expert = torch.where(used, row_id_map[:, experts:-1], experts).long()
    row = row_id_map[:, :experts]
    if pad_offsets is not None:
        row = row + pad_offsets.int()[expert.clamp(max=experts - 1)]
    # Unused cells go to a column past the last expert.
    row_of = row.new_full((tokens, experts + 1), -1).scatter_(1, expert, row)[:, :experts]

    counts = (row_of >= 0).sum(dim=0)
    first = counts.cumsum(0) - counts
    if pad_offsets is not None:
        first = first + pad_offsets
    return _plan_of(row_of, counts, first, rows), padded


def repack(plan: RoutingPlan, rows: int) -> RoutingPlan:
    """The same plan for operands of exactly `rows` rows, all those its experts have."""
    experts, align = plan.experts, plan.align
    # The capacity for which R = align * floor((A + min(E, A) (align - 1)) / align) is `rows`.
    blocks = rows // align
    capacity = blocks if blocks <= experts else rows - experts * (align - 1)
    new = _empty(plan.buffer, (plan.tokens, plan.slots, experts, align, capacity))
    # Up to token_of_row, sections do not depend on the rows.
    head = plan.token_of_row.storage_offset() - plan.buffer.storage_offset()
    new.buffer[:head] = plan.buffer[:head]
    new.token_of_row.copy_(plan.token_of_row[:rows])
    new.slot_of_row.copy_(plan.slot_of_row[:rows])
    new.row_of.copy_(plan.row_of)
    blocks = min(len(new.col_blocks), len(plan.col_blocks))
    new.col_blocks[:blocks] = plan.col_blocks[:blocks]
    _no_expert(new.col_blocks[blocks:])
    return new


# ---- index maps ---------------------------------------------------------------------------------


def index_map(plan: RoutingPlan) -> Tensor:
    """[K*T] int32 of a plan routed by topk_idx [T, K]."""
    return _attach(plan.row_of.t().reshape(-1), plan)


def plan_of_index_map(row_id_map: Tensor, slots: int, rows: int) -> RoutingPlan:
    """The plan of a map, for permuted operands of `rows` rows and tokens of `slots` slots."""
    plan = _attached(row_id_map, False, rows)
    if plan is not None and plan.slots == slots:
        return plan
    # The experts are not in the map, and moving rows back needs none: all rows are one expert's.
    row_of = row_id_map.view(slots, -1).t()
    count = (row_of >= 0).sum().view(1)
    return _plan_of(row_of, count, torch.zeros_like(count), rows)


# ---- both ---------------------------------------------------------------------------------------


def _plan_of(row_of: Tensor, counts: Tensor, first: Tensor, rows: int) -> RoutingPlan:
    """A plan of align 1 whose experts begin at `first` [E]; the last one ends at `rows`."""
    (tokens, slots), experts = row_of.shape, counts.shape[0]
    plan = _empty(row_of, (tokens, slots, experts, 1, rows))
    plan.status.zero_()
    plan.tokens_per_expert.copy_(counts)
    plan.row_offsets[:-1] = first
    plan.row_offsets[-1] = rows
    plan.col_offsets[0] = 0
    plan.col_offsets[1:] = ((counts + 127) // 128 * 128).cumsum(0)
    _no_expert(plan.col_blocks)  # nothing is transposed by this plan
    kept = (row_of >= 0) & (row_of < rows)
    plan.row_of.copy_(torch.where(kept, row_of, -1))

    row = torch.where(kept, row_of, rows).long().flatten()  # the others go to an extra row
    assignment = torch.arange(tokens * slots, device=row.device)
    of_row = row.new_full((rows + 1,), -1).scatter_(0, row, assignment)[:rows]
    plan.token_of_row.copy_(of_row.div(slots, rounding_mode="floor"))
    plan.slot_of_row.copy_(torch.where(of_row < 0, -1, of_row % slots))
    return plan


def _no_expert(col_blocks: Tensor) -> None:
    col_blocks.zero_()
    col_blocks[:, 3] = -1


def _empty(like: Tensor, sizes: tuple[int, int, int, int, int]) -> RoutingPlan:
    return empty_plan(
        lambda words: torch.empty(words, dtype=torch.int32, device=like.device), sizes
    )
