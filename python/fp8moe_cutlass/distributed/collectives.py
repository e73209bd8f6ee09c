"""Rows between the ranks of a group by the collectives of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.distributed.rank_agreement import Terms
from fp8moe_cutlass.distributed.sizes import Announced, Returning, Sizes, Told
from fp8moe_cutlass.routing import RoutingPlan


class Collectives:
    """All-to-alls: of the sizes [2, ranks, words], told to each rank and told by each, of rows that
    lie packed, and back. segment: rows of a pair of ranks, of which a last one, not counted, has
    the sender's terms; 0: exact."""

    def __init__(self, group: Any, ranks: int, segment: int) -> None:
        self.group, self.ranks, self.segment = group, ranks, segment

    def announce(
        self, counts: Tensor, mark: Tensor, terms: Tensor, differed: Tensor, read: bool
    ) -> Announced:
        """counts [ranks, 2]; terms and mark [ranks, .], the same to each; differed [ranks, 1]."""
        message = counts.new_empty(2, self.ranks, 3 + terms.shape[1])
        torch.cat([counts, terms, differed], dim=1, out=message[0])
        work: Any = dist.all_to_all_single(message[1], message[0], group=self.group, async_op=True)
        return Announced(message, work)

    def told(self, message: Any, terms: int) -> Told:
        """Of a message as lists."""
        sent, received = message
        return Told(sent, received, 0, 0)

    def make_room(self, terms: Terms, of_one: int, in_all: int) -> None:
        """Every exchange makes its own."""

    def placed(self, sizes: Sizes, announced: Announced | None) -> Sizes:
        return sizes

    def place(self, terms: Terms, slots: int) -> None:
        """Rows are packed where they are sent from."""

    def into(self, sizes: Sizes) -> None:
        """And sums."""

    def announce_grad(self, mark: Tensor) -> None:
        """Sizes are known, and marks travel with the rows."""

    def dispatch(self, rows: Tensor, sizes: Sizes, mark: Tensor) -> Tensor:
        """The first sizes.rows_sent of rows [., C] -> those this rank gets [sizes.rows, C]."""
        got = rows.new_empty(sizes.rows, rows.shape[1])
        sent = rows[: sizes.rows_sent]
        if self.segment:
            self._marks(sent).copy_(mark)
        dist.all_to_all_single(got, sent, sizes.received, sizes.sent, group=self.group)
        return got

    def marks(self, got: Tensor, announced: Announced | None) -> Tensor:
        """[ranks, 4] i32, with a rank capacity: the terms in short, of each rank."""
        return self._marks(got)

    def _marks(self, rows: Tensor) -> Tensor:
        """The first bytes of the last row of each segment."""
        last = rows.view(self.ranks, self.segment + 1, -1)[:, -1]
        return last.view(torch.uint8)[:, :16].view(torch.int32)

    def back(self, rows: Tensor, bound: int, sizes: Sizes, *, beside: bool = False) -> Returning:
        """Start to send rows [sizes.rows, C] to where they came from, the first of [bound, C].
        beside: beside what is queued until it is waited for."""
        rows = rows.contiguous()
        got = rows.new_empty(bound, rows.shape[1])
        into = got[: sizes.rows_sent]
        work: Any = dist.all_to_all_single(
            into, rows, sizes.sent, sizes.received, group=self.group, async_op=beside
        )
        return Returning(got, work, rows)

    def start_sums(
        self, parts: list[Tensor | None], plan: RoutingPlan, sizes: Sizes, beside: bool
    ) -> list[Returning | None]:
        """Start to add up each token's rows at all ranks, of each part [sizes.rows, C]."""
        return [p if p is None else self.back(p, plan.rows, sizes, beside=beside) for p in parts]

    def finish_sums(
        self, returning: list[Returning | None], plan: RoutingPlan, sizes: Sizes
    ) -> list[Tensor | None]:
        """The sums [T, C]. On a GPU it is the current stream that waits."""
        return [None if r is None else _sum(r, plan) for r in returning]


def _sum(returning: Returning, plan: RoutingPlan) -> Tensor:
    if returning.work is not None:
        returning.work.wait()
    columns = returning.rows.shape[1]
    out: Tensor = ops.unpermute_unpad(F.pad(returning.rows, (0, -columns % 16)), plan)
    return out[:, :columns]
