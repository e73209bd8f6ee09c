"""Rows between the ranks of a group through each other's memory (peers.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.distributed.peers import Needed, Peers, Place
from fp8moe_cutlass.distributed.rank_agreement import Terms
from fp8moe_cutlass.distributed.sizes import (
    SUMMED,
    Announced,
    Returning,
    Sizes,
    Told,
    Words,
    sum_here,
)
from fp8moe_cutlass.routing import RoutingPlan


class ThroughPeers:
    """Does what Collectives does, by the same methods, through peers' memory. A message is [ranks,
    words], told by each to all: its terms, what goes to each rank and, with a rank capacity, how
    often each rank has differed."""

    def __init__(self, peers: Peers, segment: int) -> None:
        self.peers, self.ranks, self.rank = peers, peers.ranks, peers.rank
        self.segment = segment
        self.begin = peers.begin  # within: to announce the sizes of an exchange, and to store rows
        self._counts = [segment + 1] * self.ranks

    def announce(self, counts: Tensor, terms: Words, differed: Tensor) -> Announced:
        """Tell the sizes, within `begin`."""
        more = torch.cat([counts.view(-1, 1), differed]) if self.segment else counts
        return self.peers.tell(terms.once, more)

    def read(self, announced: Announced) -> list[list[int]]:
        """The message as lists, once it is there."""
        if announced.work is not None:
            announced.work.synchronize()
        words: list[list[int]] = announced.message.tolist()
        return words

    def told(self, message: list[list[int]], terms: int) -> Told:
        self.peers.check()
        here, differed = terms + 2 * self.rank, terms + 2 * self.ranks
        rows = [of[terms:differed:2] for of in message]  # of each rank to each
        return Told(
            rows[self.rank],
            [of[here] for of in message],
            sum(of[here + 1] for of in message),
            list(zip(*(of[:terms] for of in message), strict=True)),
            message[self.rank][differed:],
            [sum(of[r] for of in rows[: self.rank]) for r in range(self.ranks)],
            max(map(max, rows)),
            max(map(sum, zip(*rows, strict=True))),
        )

    def make_room(self, terms: Terms, told: Told) -> None:
        """Room for an exchange of sizes that were read now, collective."""
        of_one, in_all = told.of_one, told.in_all
        if self.segment:
            of_one, in_all = self.segment + 1, self.ranks * (self.segment + 1)
        width = ops.packed_row_bytes(terms.hidden_size, terms.slots)
        probs = 4 * (terms.slots + -terms.slots % SUMMED[torch.float32])
        needed = Needed(of_one * width, in_all * 2 * terms.hidden_size, in_all * probs)
        self.peers.make_room(needed, fixed=self.segment > 0)

    def place(self, terms: Terms) -> Place | None:
        """Where quantize_pack stores rows; None: there is no memory yet."""
        return self.peers.place(ops.packed_row_bytes(terms.hidden_size, terms.slots))

    def place_of_grad(self, sizes: Sizes) -> Place | None:
        """Where it stores gradients, one rank's behind another's."""
        return self.peers.place(ops.packed_row_bytes(sizes.terms.hidden_size, 0), sizes.first)

    def moved_on(self, place: Place | None) -> bool:
        """Whether the place that was given is no more."""
        return not self.peers.has(place)

    def into(self, sizes: Sizes) -> Tensor:
        """Where the sums are to be written."""
        return self.peers.sums(sizes.rows, sizes.terms.hidden_size)

    def into_of_grad(self, sizes: Sizes) -> tuple[Tensor, Tensor | None]:
        """Likewise of dx and dprobs; None: anywhere."""
        rows, terms = sizes.rows, sizes.terms
        if not terms.probs_grad or terms.slots % SUMMED[torch.float32]:
            return self.into(sizes), None
        return self.into(sizes), self.peers.sums(rows, terms.slots, torch.float32)

    def dispatch(
        self, rows: Tensor, sizes: Sizes, mark: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The rows that have come, of as many bytes as `rows`; mark [ranks, 4] i32, with a rank
        capacity: what each rank tells."""
        told = self.peers.arrive(None if mark is None else mark[0])
        return self.peers.copied(rows.shape[1], sizes.received or self._counts), told

    def dispatch_grad(
        self, rows: Tensor, sizes: Sizes, mark: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Likewise, to be read until sums are started."""
        told = self.peers.arrive(None if mark is None else mark[0])
        return self.peers.there(rows.shape[1], sizes.rows), told

    def start_sums(
        self, parts: list[Tensor | None], plan: RoutingPlan, sizes: Sizes, beside: bool
    ) -> list[Returning | None]:
        """beside: beside what is queued until they are waited for. The narrow rows of dprobs are
        never worth it."""
        ready = [part if part is None else self._ready(part, sizes) for part in parts]
        self.peers.ready()
        if not beside:
            return ready
        return [
            self._fetch(r, plan, sizes) if r is not None and r.rows.dtype == torch.bfloat16 else r
            for r in ready
        ]

    def _ready(self, part: Tensor, sizes: Sizes) -> Returning:
        """The part where its owners read it; most bodies have written it there."""
        if self.peers.holds(part):
            return Returning(part, None, part, here=False)
        columns = part.shape[1]
        there = self.peers.sums(sizes.rows, columns + -columns % SUMMED[part.dtype], part.dtype)
        there[:, :columns].copy_(part)  # the rest is added up for nobody
        return Returning(there, None, part, here=False)

    def _fetch(self, ready: Returning, plan: RoutingPlan, sizes: Sizes) -> Returning:
        assert sizes.begins is not None
        counts = sizes.sent or self._counts
        return self.peers.fetch(ready.rows, plan.rows, counts, sizes.begins)

    def finish_sums(
        self, returning: list[Returning | None], plan: RoutingPlan, sizes: Sizes
    ) -> list[Tensor | None]:
        sums: list[Tensor | None] = []
        for r in returning:
            if r is None:
                sums.append(None)
            elif r.here:
                sums.append(sum_here(r, plan))
            else:
                total = self.peers.sum(r.rows, plan, sizes.first)
                columns = r.source.shape[1]
                sums.append(total if total.shape[1] == columns else total[:, :columns])
        self.peers.done()
        return sums
