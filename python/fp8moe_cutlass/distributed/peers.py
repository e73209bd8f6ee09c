"""Rows that ranks of one host write to each other's memory, and sums that they read there.

`Peers` is the memory of one group on one device; all layers of the group use it in turn. What
travels lies there between two meetings of the ranks (ops.share_words), and no longer:

    begin       in a capture, what is queued within runs beside the caller's stream, until `arrive`
    tell        the ranks meet and tell each other words: every rank has read what came before
    place       where quantize_pack stores this rank's rows at each peer. Ranks whose last exchange
                ended on this stream need not meet before: `ready` has said that all have read
    arrive      the ranks meet: all rows are there. Unless they are read before `ready`, they are
                copied out, into a tensor of the caller
    sums        where the body writes what goes back: of two places the one that is not read now
    ready       the ranks meet: all sums are there, and all rows have been read
    sum         each rank reads its own at each peer, or
    fetch       copies them here first, beside other work
    done        what reads them is queued

A rank's sums of exchange u are read by its peers until they come to the first meeting of exchange
u + 1, or, on another stream, u + 2. So nothing that a later exchange may overwrite is read.
"""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd.streams import Written, capturing, written
from fp8moe_cutlass.distributed.sizes import Announced, Returning
from fp8moe_cutlass.distributed.symmetric import (
    Memory,
    NoSharedMemory,
    agree,
    allocate,
    unavailable,
    wanted,
)
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.slow_path import slow_path

_WORDS = 256  # of a rank in a mailbox, its flag among them
_MARK = 4  # words
_ALIGN = 128  # bytes


class Place(NamedTuple):
    """Where this rank's rows go."""

    rows: Tensor  # [n, bytes] u8, this rank's own
    peers: Tensor  # [ranks] i64, addresses
    first: Any = None  # [ranks] i32, on the host: rows behind them


class Needed(NamedTuple):
    """Bytes that one exchange takes."""

    wire: int  # rows from one rank
    sums: int  # all that go back
    probs: int


class _Area:
    """A part of every rank's memory, in places of `size` bytes."""

    def __init__(self, memory: Memory, size: int, dtype: torch.dtype, ends: list[int]) -> None:
        self.memory, self.size = memory, size // dtype.itemsize
        self.peers = [memory.peers(place * size) for place in ends]  # [ranks] i64
        self._mine = memory.mine.view(dtype)
        self._begin = self._mine.storage_offset()
        self._of = [share.data_ptr() for share in memory.of]
        self.own = [memory.mine.data_ptr() + place * size for place in ends]

    def view(self, place: int, rows: int, columns: int) -> Tensor:
        """[rows, columns] in a place of this rank."""
        begin = self._begin + place * self.size
        return self._mine.as_strided((rows, columns), (columns, 1), begin)

    def address(self, rank: int, place: int, first: int, columns: int) -> int:
        """Of row `first` in a place of a rank."""
        return self._of[rank] + (place * self.size + first * columns) * self._mine.itemsize


class _Room(NamedTuple):
    """The memory of one size."""

    wire: _Area  # a place per rank
    words: _Area  # the same, which is not copied byte by byte
    sums: _Area  # two places
    probs: _Area  # likewise


class _Meetings:
    """Where the ranks meet, in one order."""

    def __init__(self, memory: Memory, at: int, peers: Peers) -> None:
        words = 2 * peers.ranks * _WORDS
        mine = memory.mine.view(torch.int32)[at * words : (at + 1) * words]
        self._mailbox = mine.view(2, peers.ranks, _WORDS)
        self._peers = memory.peers(4 * at * words)
        self._calls = torch.zeros(1, dtype=torch.int32, device=peers.device)
        self._of = peers

    def meet(self, words: Tensor, out: Tensor, more: Tensor | None = None) -> Tensor:
        """words [n] i32, and more -> those of every rank [ranks, n], in `out`."""
        of = self._of
        told: Tensor = ops.share_words(
            *(words, self._peers, self._mailbox, self._calls, of.ended, of.late),
            rank=of.rank,
            timeout_ms=of.timeout_ms,
            more=more,
            out=out,
        )
        of.check()  # on a GPU: of what has been seen until now
        return told


class Peers:
    """See above. Every method but `check`, `place` and `sums` is collective."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self.device = ref(group), device
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        waits = group._get_backend(device).options._timeout
        self.timeout_ms = min(int(waits.total_seconds() * 1000), 10**9)  # what share_words takes
        self._gpu = device.type == "cuda"
        self.late = torch.zeros(self.ranks, dtype=torch.int32, pin_memory=self._gpu)
        self._late = self.late.numpy()
        self._told = torch.zeros(self.ranks * _WORDS, dtype=torch.int32, pin_memory=self._gpu)
        self.ended = torch.zeros(1, dtype=torch.int32, device=device)
        self._none = self.ended[:0], self.ended[:0].view(self.ranks, 0)
        self._marks = self.ended.new_zeros(2, self.ranks, _MARK)  # by turn
        mailboxes = allocate(group, 2 * 2 * self.ranks * _WORDS * 4, device)
        self._moving = _Meetings(mailboxes, 0, self)
        self._adding = _Meetings(mailboxes, 1, self)
        self._has = Needed(0, 0, 0)
        self._room: _Room | None = None
        self.full = False  # whether there was no room for an exchange
        self._captured: list[_Room] = []  # a graph has their addresses
        self._turn = 0  # of the two places for sums
        self._in_place = False  # whether what came is read until `ready`
        self._moved: Written | None = None
        self._summed: list[Written | None] = [None, None]  # by turn
        self._ended_on: Any = None  # the stream of the last `ready`, until an exchange begins
        self._clear = False  # whether `place` may be written
        # Its kernels need few SMs, but soon.
        self._beside = torch.cuda.Stream(device, priority=-1) if self._gpu else None  # type: ignore[no-untyped-call]
        event: Any = torch.cuda.Event if self._gpu else lambda: None
        self._said, self._fetched = event(), event()

    def check(self) -> None:
        """RuntimeError if a rank did not come to a meeting in time. The device is not asked."""
        if any(self._late.tolist()):
            late = [r for r, n in enumerate(self._late.tolist()) if n]
            ranks = dist.get_process_group_ranks(self._group())
            raise RuntimeError(
                "[MoEExperts] every rank must come to an exchange within the group's timeout of "
                f"{self.timeout_ms / 1000:g} s; got none from rank "
                f"{', '.join(str(ranks[r]) for r in late)}: end the processes of this group"
            )

    def begin(self) -> AbstractContextManager[Any]:
        """Begin an exchange. In a capture, what is queued within runs beside what this stream gets
        until `arrive`. Eager, the host's calls for the second stream cost more than it hides where
        rows are narrow."""
        room, beside, here = self._room, capturing(self.device), self._stream()
        if room is not None and beside and room not in self._captured:
            self._captured.append(room)
        self._turn ^= 1
        for before in (self._moved, self._summed[self._turn]):
            if before is not None:
                before.wait((), here)
        self._clear, self._ended_on = self._ended_on == here, None
        if self._beside is None or not beside:
            return nullcontext()
        self._beside.wait_stream(here)
        return torch.cuda.stream(self._beside)

    def tell(self, words: Tensor, more: Tensor) -> Announced:
        """words and more, n of i32 -> those of every rank [ranks, n], where the host reads them
        before the next call."""
        self._clear = True
        count = words.numel() + more.numel()
        told = self._told.as_strided((self.ranks, count), (count, 1))
        self._moving.meet(words, told, more)
        if self._said is not None:  # behind what is queued until then, the host would read too late
            self._said.record(self._stream())
        return Announced(told, self._said)

    def make_room(self, needed: Needed, fixed: bool) -> None:
        """Allocates for an exchange that takes `needed`, the same on all ranks; unless that is
        fixed, a quarter more. The device is idle when there had to be more. What there was stays
        where a graph replays exchanges in it. NoSharedMemory on all ranks if one has no more; then
        what there was serves on."""
        if self._room is not None and all(map(int.__le__, needed, self._has)):
            return
        sizes = (n if fixed else n + n // 4 for n in needed)
        size = Needed(
            *(-(-max(pair) // _ALIGN) * _ALIGN for pair in zip(sizes, self._has, strict=True))
        )
        self.full = True
        with torch.inference_mode(False):
            wire, sums, probs = (
                allocate(self._group(), max(n * places, _ALIGN), self.device)
                for n, places in zip(size, (self.ranks, 2, 2), strict=True)
            )
            self._room = _Room(
                _Area(wire, size.wire, torch.uint8, [self.rank, 0]),
                _Area(wire, size.wire, torch.int64, []),
                _Area(sums, size.sums, torch.bfloat16, [0, 1]),
                _Area(probs, size.probs, torch.float32, [0, 1]),
            )
        self._has, self.full = size, False

    def place(self, width: int, first: Any = None) -> Place | None:
        """The place for rows of `width` bytes; None: there is no memory yet. first [ranks] i32, on
        the host: they lie one rank's behind another's, this rank's from row first[r] on at rank r.
        """
        if self._room is None:
            return None
        if not self._clear:
            self._clear = True
            self._moving.meet(*self._none)
        wire = self._room.wire
        if first is None:
            return Place(wire.view(self.rank, wire.size // width, width), wire.peers[0])
        return Place(wire.view(0, wire.size * self.ranks // width, width), wire.peers[1], first)

    def has(self, place: Place | None) -> bool:
        """Whether `place` is in the memory of now."""
        room = self._room
        return place is not None and room is not None and place.peers is room.wire.peers[0]

    def arrive(self, mark: Tensor | None) -> Tensor | None:
        """All rows have come; mark [_MARK] i32 -> those of every rank [ranks, _MARK]."""
        said = self._none if mark is None else (mark, self._marks[self._turn])
        if self._beside is None or not capturing(self.device):
            self._moving.meet(*said)
        else:
            with torch.cuda.stream(self._beside):
                self._moving.meet(*said)
            torch.cuda.current_stream(self.device).wait_stream(self._beside)
        return None if mark is None else said[1]

    def copied(self, width: int, counts: list[int]) -> Tensor:
        """The rows [sum of counts, width] u8, so many from each rank, in a tensor of their own."""
        assert self._room is not None
        words = self._room.words
        rows = torch.cat([words.view(r, n, width // 8) for r, n in enumerate(counts)])
        self._moved = self._now(self._moved, self._stream())
        return rows.view(torch.uint8)

    def there(self, width: int, rows: int) -> Tensor:
        """The rows [rows, width] u8 of a place with `first`, to be read before `ready`."""
        assert self._room is not None
        self._in_place = True
        return self._room.wire.view(0, rows, width)

    def sums(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Where to write what goes back in this exchange, [rows, columns]; f32 if it is of the
        probs."""
        return self._back(dtype).view(self._turn, rows, columns)

    def holds(self, part: Tensor) -> bool:
        """Whether `part` is of `sums`."""
        return part.data_ptr() == self._back(part.dtype).own[self._turn]

    def ready(self) -> None:
        """What goes back lies in `sums`, on all ranks."""
        here, other = self._stream(), self._summed[self._turn ^ 1]
        if other is not None:
            other.wait((), here)
        if self._in_place:
            self._moved, self._in_place = self._now(self._moved, here), False
        self._adding.meet(*self._none)
        self._ended_on = here

    def _stream(self) -> Any:
        return torch.cuda.current_stream(self.device) if self._gpu else self.device

    def _back(self, dtype: torch.dtype) -> _Area:
        assert self._room is not None
        return self._room.probs if dtype == torch.float32 else self._room.sums

    def sum(self, part: Tensor, plan: RoutingPlan, first: Any) -> Tensor:
        """Sums each token's rows of `part`, which is of `sums`, where they lie. first [ranks] i32,
        on the host: the row at which this rank's begin at each."""
        peers = self._back(part.dtype).peers[self._turn]
        summed: Tensor = ops.unpermute_unpad(part, plan, peers=peers, first=first)
        return summed

    def fetch(self, part: Tensor, rows: int, counts: list[int], first: list[int]) -> Returning:
        """Begins to copy this rank's rows of `part`, which is of `sums`: counts[r] of rank r, where
        they begin at row first[r]. They come one rank's behind another's, in [rows, .], while what
        is queued from now on runs."""
        area, columns = self._back(part.dtype), part.shape[1]
        got = part.new_empty(rows, columns)
        # Each rank begins behind itself: no rank is read by all at once.
        turns = [(self.rank + n) % self.ranks for n in range(1, self.ranks + 1)]
        *into, total = accumulate(counts, initial=0)
        places = np.array(
            [(area.address(r, self._turn, first[r], columns), counts[r], into[r]) for r in turns]
        )
        if self._beside is None:
            ops.copy_rows(got[:total], places)
            return Returning(got, None, part)
        # Copies between GPUs, which take no SMs.
        ops.copy_rows(got[:total], places, beside=self._beside.cuda_stream)
        self._fetched.record(self._beside)
        return Returning(got, self._fetched, part)

    def done(self) -> None:
        """All that reads the sums of this exchange is queued."""
        self._summed[self._turn] = self._now(self._summed[self._turn], self._stream())

    def _now(self, event: Written | None, here: Any) -> Written | None:
        """Marks what is queued until now."""
        if event is None:
            return written(self.device)
        event.record(here)
        return event


_of_group: WeakKeyDictionary[Any, dict[torch.device, Peers | None]] = WeakKeyDictionary()


def peers_of(group: Any, device: torch.device, transport: str) -> Peers | None:
    """The memory that the group's ranks share on `device`; None: rows go by torch.distributed.
    Collective, at the first call for a group. "auto": None, too, once there was no room."""
    if not wanted(device, transport):
        return None
    known = _of_group.setdefault(group, {})
    if device not in known or (known[device] is None and transport == "peer"):
        try:
            reason = _reason(group, device)
            if reason:
                raise NoSharedMemory(f"[MoEExperts] transport 'peer' {reason}")
            with torch.inference_mode(False):
                known[device] = Peers(group, device)
        except NoSharedMemory as error:  # on all ranks alike
            if transport == "peer":
                raise
            say_why_not(error)
            known[device] = None
    peers = known[device]
    return None if peers is not None and peers.full and transport == "auto" else peers


def say_why_not(error: NoSharedMemory) -> None:
    """Once: rows of "auto" go by torch.distributed."""
    why = str(error).removeprefix("[MoEExperts] ")
    slow_path("transport", f"[MoEExperts] rows go by torch.distributed: {why}")


def _reason(group: Any, device: torch.device) -> str:
    """Why the ranks cannot share memory, the same on all of them; "": they can."""
    host = f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text()}"
    mine = int.from_bytes(host.encode()[-64:].ljust(64), "big") % (2**31 - 1)
    here = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(here, dist.ReduceOp.MAX, group=group)
    if int(here[0]) != -int(here[1]):
        return "needs ranks of one host"
    why = unavailable(group, device)
    if not agree(group, device, not why):
        return why or "is not possible on another rank"
    return ""
