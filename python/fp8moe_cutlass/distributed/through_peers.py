"""Rows between the ranks of a group through each other's memory (peers.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.distributed.peers import Needed, Peers, Place
from fp8moe_cutlass.distributed.rank_agreement import Terms
from fp8moe_cutlass.distributed.sizes import Announced, Returning, Sizes, Told
from fp8moe_cutlass.routing import RoutingPlan

_MARK = 4  # words


class ThroughPeers:
    """Does what Collectives does, by the same methods, through peers' memory. A message is [ranks,
    words], told by each to all: its mark, what goes to each rank, its terms, and how often each
    rank has differed."""

    def __init__(self, peers: Peers, segment: int) -> None:
        self.peers, self.ranks, self.rank = peers, peers.ranks, peers.rank
        self.segment = segment

    def announce(
        self, counts: Tensor, mark: Tensor, terms: Tensor, differed: Tensor, read: bool
    ) -> Announced:
        words = torch.cat([mark[0], counts.flatten(), terms[0], differed.flatten()])
        message = self.peers.begin(words)
        if not (read and message.is_cuda):
            return Announced(message, None)
        return Announced(message, torch.cuda.current_stream(message.device).record_event())

    def told(self, message: list[list[int]], terms: int) -> Told:
        self.peers.check()
        said, here = _MARK + 2 * self.ranks, _MARK + 2 * self.rank
        differed = said + terms
        rows = [of[_MARK:said:2] for of in message]  # of each rank to each
        return Told(
            rows[self.rank],
            [of[here] for of in message],
            sum(of[here + 1] for of in message),
            list(zip(*(of[said:differed] for of in message), strict=True)),
            message[self.rank][differed:],
            max(map(max, rows)),
            max(map(sum, zip(*rows, strict=True))),
        )

    def make_room(self, terms: Terms, of_one: int, in_all: int) -> None:
        if self.segment:
            of_one, in_all = self.segment + 1, self.ranks * (self.segment + 1)
        width = ops.packed_row_bytes(terms.hidden_size, terms.slots)
        probs = 4 * (terms.slots + -terms.slots % 16)
        needed = Needed(of_one * width, in_all * 2 * terms.hidden_size, in_all * probs)
        self.peers.make_room(needed, fixed=self.segment > 0)

    def first(self, announced: Announced) -> Tensor:
        """Where this rank's rows begin in what each rank receives."""
        if self.segment:
            return torch.full_like(announced.message[:, 0], self.rank * (self.segment + 1))
        before = announced.message[: self.rank, _MARK : _MARK + 2 * self.ranks : 2]
        return before.sum(0, dtype=torch.int32)

    def place(self, terms: Terms, slots: int) -> Place | None:
        """Where quantize_pack stores rows with so many slots; None: there is no memory yet."""
        return self.peers.place(ops.packed_row_bytes(terms.hidden_size, slots))

    def moved_on(self, place: Place | None) -> bool:
        """Whether the place that was given is no more."""
        return not self.peers.has(place)

    def into(self, sizes: Sizes) -> Tensor:
        """Where the sums are to be written."""
        return self.peers.sums(sizes.rows, sizes.terms.hidden_size)

    def announce_grad(self, mark: Tensor) -> Announced:
        """Begin the exchange of the gradient."""
        return Announced(self.peers.begin(mark[0]), None)

    def dispatch(self, rows: Tensor, sizes: Sizes, mark: Tensor | None) -> Tensor:
        """The rows that have come, of as many bytes as `rows`."""
        counts = sizes.received or [self.segment + 1] * self.ranks
        return self.peers.arrive(rows.shape[1], counts)

    def marks(self, announced: Announced) -> Tensor:
        """[ranks, 4] i32."""
        return announced.message[:, :_MARK]

    def start_sums(
        self, parts: list[Tensor | None], plan: RoutingPlan, sizes: Sizes, beside: bool
    ) -> list[Returning | None]:
        return [part if part is None else self._ready(part, sizes) for part in parts]

    def _ready(self, part: Tensor, sizes: Sizes) -> Returning:
        """The part where its owners read it; most bodies have written it there."""
        columns = part.shape[1] + -part.shape[1] % 16
        there = self.peers.sums(sizes.rows, columns, part.dtype)
        if part.data_ptr() != there.data_ptr():
            there.copy_(F.pad(part, (0, columns - part.shape[1])))
        return Returning(there, None, part)

    def finish_sums(
        self, returning: list[Returning | None], plan: RoutingPlan, sizes: Sizes
    ) -> list[Tensor | None]:
        assert sizes.first is not None
        rows = [None if r is None else r.rows for r in returning]
        sums = self.peers.sum(rows, plan, sizes.first)
        pairs = zip(sums, returning, strict=True)
        return [s if r is None else s[:, : r.source.shape[1]] for s, r in pairs]
