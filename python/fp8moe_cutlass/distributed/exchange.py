"""Rows between the ranks of a process group: who sends how many, and what all agree on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.distributed.collectives import Collectives
from fp8moe_cutlass.distributed.peers import peers_of, say_why_not
from fp8moe_cutlass.distributed.rank_agreement import Terms
from fp8moe_cutlass.distributed.sizes import Announced, Sizes, Told, Words
from fp8moe_cutlass.distributed.symmetric import NoSharedMemory
from fp8moe_cutlass.distributed.through_peers import ThroughPeers

TRANSPORTS = ("auto", "nccl", "peer")
Carrier = Collectives | ThroughPeers
_DROPPED = (
    "rows beyond rank_capacity, of a pair of ranks",
    "expert ids out of range",
    "assignments beyond rank_capacity, of a rank",
)


def check_group(op: str, group: Any) -> None:
    """ValueError unless group is a process group that contains this rank."""
    # What new_group gives to those it leaves out.
    outside = isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"[{op}] group must be a torch.distributed.ProcessGroup; got {group!r}")
    if outside or dist.get_rank(group) < 0:
        raise ValueError(f"[{op}] group must contain this rank; got {group}")


def _is_size(n: Any) -> bool:
    return isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 1


@dataclass(frozen=True)
class Shared:
    """A process group in a module's state: a deep copy of the module shares it, a pickle cannot."""

    group: dist.ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self

    def __reduce__(self) -> Any:
        if self.group is None:
            return Shared, (None,)
        raise TypeError(
            "[MoEExperts] a module with a group cannot be pickled: a process group is of this "
            "process alone; save its state_dict"
        )


class Exchange:
    """Sends a layer's rows within `group`, which owns its experts in equal, ascending shares.

    announce, and the methods of its carriers, are collective: all ranks of the group call them, in
    the same order.
    rank_capacity None: sizes are exchanged before the rows, which takes one read by the host. rows,
    or (rows, assignments): fixed sizes, which no host reads; see MoEExperts. A segment then has a
    last row that no token takes, and the ranks' terms are compared on the device.
    transport: "nccl", "peer" or "auto"; see MoEExperts.
    `dropped` [3] i64 counts, on the device and since the beginning, the rows, ids and assignments
    that this rank had no place for.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        rank_capacity: int | tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        transport: str = "auto",
    ) -> None:
        check_group("MoEExperts", group)
        rank = dist.get_rank(group)
        ranks = dist.get_process_group_ranks(group)
        if num_experts % len(ranks):
            raise ValueError(
                "[MoEExperts] num_experts must be a multiple of the group's size; "
                f"got {num_experts} experts, {len(ranks)} ranks"
            )
        limits: Any = rank_capacity if isinstance(rank_capacity, tuple) else (rank_capacity,)
        if rank_capacity is None:
            limits = (0,)
        elif len(limits) not in (1, 2) or not all(map(_is_size, limits)):
            raise ValueError(
                "[MoEExperts] rank_capacity must be rows or (rows, assignments), at least 1; "
                f"got {rank_capacity!r}"
            )
        self.group = group
        self.num_experts = num_experts
        self.rank_capacity = rank_capacity
        self.transport = transport
        self.ranks = len(ranks)
        self.segment: int = limits[0]  # rows of a (source, destination) pair; 0: exact
        self.dropped = torch.zeros(len(_DROPPED), dtype=torch.int64, device=device)
        # [ranks, 1]: in how many exchanges each rank's terms were not this rank's.
        self._differed = torch.zeros(self.ranks, 1, dtype=torch.int32, device=device)
        self._names = ranks
        self._rank = rank
        share = num_experts // len(ranks)
        self.local_experts = range(rank * share, (rank + 1) * share)  # of this rank
        self._assignments: int = limits[1] if len(limits) == 2 else 0
        self._agreed: set[Terms] = set()
        self._words: dict[Any, Words] = {}
        self._collectives = Collectives(group, self.ranks, self.segment)
        self._peers: ThroughPeers | None = None  # once there has been an exchange

    def plan(self, topk_idx: Tensor) -> ops.Dispatch:
        """A row for each (token, rank), and counts [ranks, 2] of rows and assignments. What it
        drops is counted."""
        self._follow(topk_idx.device)
        spare = 1 if self.segment else 0  # of the terms
        of: Any = {"segment": self.segment, "spare": spare, "dropped": self.dropped}
        return ops.dispatch_plan(topk_idx, self.num_experts, self.ranks, **of)

    def plan_sizes(self, tokens: int, slots: int) -> tuple[int, int, int, int, int]:
        """The sizes of `plan`'s plan."""
        ranks, segment = self.ranks, self.segment
        capacity = (segment + 1) * ranks if segment else tokens * min(slots, ranks)
        return tokens, ranks, ranks, 1, capacity

    def begin(self, terms: Terms, device: torch.device) -> AbstractContextManager[None]:
        """Begin to move tokens: within, to announce their sizes and to store them at peers."""
        peers = peers_of(self.group, device, self.transport)
        if peers is None:
            self._peers = None
        elif self._peers is None or self._peers.peers is not peers:
            self._peers = ThroughPeers(peers, self.segment)
        if self.segment and terms in self._agreed:  # nothing is told
            return self.carrier(terms).begin()
        return (self._peers or self._collectives).begin()

    def announce(self, counts: Tensor, terms: Terms) -> Announced | None:
        """Start to tell every rank what it will get: counts [ranks, 2] i32, rows and assignments.

        With a rank capacity only the terms are told, and they only until they have been agreed
        upon: then None.
        """
        if self.segment and terms in self._agreed:
            return None
        if counts.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "[MoEExperts] a captured forward needs rank_capacity=, and one forward like it "
                f"before the capture; got rank_capacity={self.rank_capacity}"
            )
        by = self._collectives if self._peers is None else self._peers
        return by.announce(counts, self._words_of(terms, counts.device), self._differed)

    def sizes(self, announced: Announced | None, terms: Terms, carrier: Carrier) -> Sizes:
        """Reads the sizes that the ranks have announced; the host waits for the device. Raises
        ValueError on every rank if the ranks' terms differ, or have differed. What carries the
        rows may be another then."""
        told: Told | None = None
        if announced is not None:
            by: Any = self._collectives if self._peers is None else self._peers
            told = by.told(by.read(announced), len(terms))
            terms.check(told.terms, self._names)
            if any(told.differed):
                self._check_in_step(told.differed)
            if self.segment:
                self._agreed.add(terms)
                for backward in (False, True):  # before a capture, which can copy nothing
                    self.mark(terms, self.dropped.device, backward)
            try:
                carrier.make_room(terms, told)
            except NoSharedMemory as error:  # on all ranks alike
                if self.transport == "peer":
                    raise
                say_why_not(error)
                self._peers = None
        if self.segment:
            return self.fixed(terms)
        assert told is not None
        sent, received, assignments, begins = *told[:3], told.begins
        return Sizes(terms, sent, received, sum(sent), sum(received), assignments, begins)

    def carrier(self, terms: Terms) -> Carrier:
        """Moves the rows, once they have been announced: those in FP8 through the ranks' memory,
        where the ranks share it."""
        return self._collectives if self._peers is None or terms.recipe == 0 else self._peers

    def compare(self, marks: Tensor, terms: Terms, *, backward: bool = False) -> Tensor:
        """With a rank capacity, compares the marks [ranks, 4] of all ranks with this rank's:
        [ranks, 1] bool, True where they differ. They are counted, for `check`."""
        differ = torch.any(marks != self.mark(terms, marks.device, backward), dim=1, keepdim=True)
        self._differed += differ
        return differ

    def count(self, assignments: Tensor) -> None:
        """Add what a forward with a rank capacity dropped where rows had come, [1]."""
        self.dropped[-1:].add_(assignments)

    def check(self) -> None:
        """Waits for the device and raises ValueError if this rank has dropped anything, or the
        ranks' terms have differed; RuntimeError if a rank did not come to an exchange."""
        self._check_in_step(self._differed.flatten().tolist())
        if self._peers is not None:
            self._peers.peers.check()
        found = [
            f"{n} {what}" for n, what in zip(self.dropped.tolist(), _DROPPED, strict=True) if n
        ]
        if found:
            raise ValueError(
                f"[MoEExperts] every assignment must find a place; got {'; '.join(found)}"
            )

    def _check_in_step(self, differed: Sequence[int]) -> None:
        if not any(differed):
            return
        others = [f"rank {r} in {n}" for r, n in zip(self._names, differed, strict=True) if n]
        raise ValueError(
            "[MoEExperts] ranks with a rank_capacity must be in step: the same slots, what "
            "requires gradients, forward or backward, in every exchange; got others from "
            f"{', '.join(others)} exchanges of rank {self._names[self._rank]}"
        )

    def _follow(self, device: torch.device) -> None:
        """The counts go with the layer to another device."""
        if self.dropped.device != device:
            with torch.inference_mode(False):
                self.dropped, self._differed = (
                    torch.zeros_like(t, device=device) if t.is_meta else t.to(device)
                    for t in (self.dropped, self._differed)
                )

    def fixed(self, terms: Terms) -> Sizes:
        """The sizes of every exchange with a rank capacity."""
        rows, taken = self.ranks * (self.segment + 1), self.ranks * self.segment
        most = min(terms.slots, len(self.local_experts))
        begins = [self._rank * (self.segment + 1)] * self.ranks
        arrive = self._assignments or most * taken
        return Sizes(terms, None, None, rows, rows, arrive, begins)

    def mark(self, terms: Terms, device: torch.device, backward: bool = False) -> Tensor:
        """[ranks, 4] i32: the terms in short."""
        return self._words_of(terms.mark(backward), device).of_each

    def _words_of(self, words: tuple[int, ...], device: torch.device) -> Words:
        if (words, device) not in self._words:
            with torch.inference_mode(False):
                once = torch.tensor(words, dtype=torch.int32, device=device)
            self._words[words, device] = Words(once, once.expand(self.ranks, -1).contiguous())
        return self._words[words, device]

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        device = self.dropped.device
        return Exchange(self.group, self.num_experts, self.rank_capacity, device, self.transport)

    def __reduce__(self) -> Any:
        return Exchange, (Shared(self.group), self.num_experts, self.rank_capacity)  # which refuses
