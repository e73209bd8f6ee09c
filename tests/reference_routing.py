"""Routing in plain Python, written from the rules alone: a loop over each expert's assignments."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Routing:
    """What a plan says, as lists. rows[i] is the (token, slot) of row i, None on padding."""

    row_of: list[list[int]]
    rows: list[tuple[int, int] | None] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    row_offsets: list[int] = field(default_factory=lambda: [0])
    col_offsets: list[int] = field(default_factory=lambda: [0])
    col_blocks: list[list[int]] = field(default_factory=list)
    overflow: int = 0


def route(ids: Tensor, experts: int, align: int, capacity: int) -> Routing:
    """ids [T, S], -1: none. Expert by expert, in token then slot order, the first `capacity`."""
    tokens, slots = ids.shape
    chosen = ids.tolist()
    plan = Routing([[-1] * slots for _ in range(tokens)])
    kept = 0
    for e in range(experts):
        mine = [(t, s) for t in range(tokens) for s in range(slots) if chosen[t][s] == e]
        plan.overflow += max(0, kept + len(mine) - capacity) - max(0, kept - capacity)
        fitting = mine[: max(0, capacity - kept)]
        kept += len(mine)
        for t, s in fitting:
            plan.row_of[t][s] = len(plan.rows)
            plan.rows.append((t, s))
        while len(plan.rows) % align:
            plan.rows.append(None)
        first, last = plan.row_offsets[-1], len(plan.rows)
        for at in range(first, first + len(fitting), 128):
            held = min(128, first + len(fitting) - at)
            plan.col_blocks.append([at, held, min(128, last - at), e])
        plan.counts.append(len(fitting))
        plan.row_offsets.append(len(plan.rows))
        plan.col_offsets.append(plan.col_offsets[-1] + -(-len(fitting) // 128) * 128)
    return plan


def ids_of_map(routing_map: Tensor) -> Tensor:
    """A mask [T, E] as ids [T, E]: slot e names expert e, or none."""
    expert = torch.arange(routing_map.shape[1]).expand(routing_map.shape)
    return torch.where(routing_map != 0, expert, -1)
