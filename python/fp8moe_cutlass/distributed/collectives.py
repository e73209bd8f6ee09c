"""Rows between the ranks of a group by the collectives of torch.distributed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8moe_cutlass.distributed.rank_agreement import Terms
from fp8moe_cutlass.distributed.sizes import Announced, Returning, Sizes, Told, Words, sum_here
from fp8moe_cutlass.routing import RoutingPlan


class Collectives:
    """All-to-alls: of the sizes [2, ranks, words], told to each rank and told by each, of rows that
    lie packed, and back. segment: rows of a pair of ranks, of which a last one, not counted, has
    the sender's terms; 0: exact."""

    def __init__(self, group: Any, ranks: int, segment: int) -> None:
        self.group, self.ranks, self.segment = group, ranks, segment

    def announce(self, counts: Tensor, terms: Words, differed: Tensor) -> Announced:
        """counts [ranks, 2]; differed [ranks, 1]."""
        message = counts.new_empty(2, self.ranks, 3 + terms.of_each.shape[1])
        torch.cat([counts, terms.of_each, differed], dim=1, out=message[0])
        work: Any = dist.all_to_all_single(message[1], message[0], group=self.group, async_op=True)
        return Announced(message, work)

    def read(self, announced: Announced) -> Any:
        """The message as lists, once it is there. On a GPU a stream of its own copies it: the host
        does not wait for what was queued meanwhile, and so can queue the dispatch behind it in
        time."""
        message, work = announced
        if not message.is_cuda:
            work.wait()
            return message.tolist()
        beside = torch.cuda.Stream(message.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(beside):
            work.wait()
            found = message.to("cpu", non_blocking=True)
        beside.synchronize()
        return found.tolist()

    def told(self, message: Any, terms: int) -> Told:
        sent, received = list(zip(*message[0], strict=True)), list(zip(*message[1], strict=True))
        assignments = sum(received[1])
        to, by = list(sent[0]), list(received[0])
        return Told(to, by, assignments, received[2:-1], sent[-1], None, 0, 0)

    def make_room(self, terms: Terms, told: Told) -> None:
        """Rows go into tensors of their own."""

    begin = staticmethod(nullcontext)

    def place(self, terms: Terms) -> None:
        """Rows are packed into a tensor."""

    def place_of_grad(self, sizes: Sizes) -> None:
        """Likewise."""

    def moved_on(self, place: Any) -> bool:
        return place is not None

    def into(self, sizes: Sizes) -> None:
        """Sums are written anywhere."""

    into_of_grad = into

    def dispatch(
        self, rows: Tensor, sizes: Sizes, mark: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The first sizes.rows_sent of rows [., C] -> those this rank gets [sizes.rows, C]. mark
        [ranks, 4] i32, with a rank capacity: what to tell each rank -> what each has told."""
        got = rows.new_empty(sizes.rows, rows.shape[1])
        sent = rows[: sizes.rows_sent]
        if mark is not None:
            self._marks(sent).copy_(mark)
        dist.all_to_all_single(got, sent, sizes.received, sizes.sent, group=self.group)
        return got, None if mark is None else self._marks(got)

    dispatch_grad = dispatch

    def _marks(self, rows: Tensor) -> Tensor:
        """[ranks, 4] i32, with a rank capacity: the first bytes of the last row of each segment."""
        last = rows.view(self.ranks, self.segment + 1, -1)[:, -1]
        return last.view(torch.uint8)[:, :16].view(torch.int32)

    def start_sums(
        self, parts: list[Tensor | None], plan: RoutingPlan, sizes: Sizes, beside: bool
    ) -> list[Returning | None]:
        """Start to send the rows of each part [sizes.rows, C] to where they came from, to be added
        up there. beside: beside what is queued until they are waited for."""
        started: list[Returning | None] = []
        size = plan.rows
        for part in parts:
            if part is None:
                started.append(None)
                continue
            rows = part.contiguous()
            got = rows.new_empty(size, rows.shape[1])
            into = got[: sizes.rows_sent]
            work: Any = dist.all_to_all_single(
                into, rows, sizes.sent, sizes.received, group=self.group, async_op=beside
            )
            started.append(Returning(got, work, rows))
        return started

    def finish_sums(
        self, returning: list[Returning | None], plan: RoutingPlan, sizes: Sizes
    ) -> list[Tensor | None]:
        """The sums [T, C]."""
        sums: list[Tensor | None] = []
        for r in returning:
            sums.append(None if r is None else sum_here(r, plan))
        return sums
