"""The operators by which ranks of one host meet, and reach into each other's memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from fp8moe_cutlass import ops

POISON = 0xA5


class Meeting:
    """Ranks of this process, a thread each."""

    def __init__(self, ranks: int, stride: int = 16) -> None:
        self.mailboxes = [torch.zeros(2, ranks, stride, dtype=torch.int32) for _ in range(ranks)]
        self.peers = torch.tensor([m.data_ptr() for m in self.mailboxes])
        self.calls = [torch.zeros(1, dtype=torch.int32) for _ in range(ranks)]
        self.ended = [torch.zeros(1, dtype=torch.int32) for _ in range(ranks)]
        self.late = [torch.zeros(ranks, dtype=torch.int32) for _ in range(ranks)]

    def share(self, rank: int, words: list[int], timeout_ms: int = 20000) -> list[list[int]]:
        own = torch.tensor(words, dtype=torch.int32)
        told = ops.share_words(
            *(own[: len(words) // 2], self.peers, self.mailboxes[rank]),
            *(self.calls[rank], self.ended[rank], self.late[rank]),
            **{"rank": rank, "timeout_ms": timeout_ms},
            more=own[len(words) // 2 :].view(-1, 1),
        )
        return told.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("first", [0, 2**31 - 4, -2])
def test_words_reach_every_rank_in_every_call(ranks: int, first: int) -> None:
    """Also where the number of the call overflows, and where one rank is slow."""
    meeting, found = Meeting(ranks), [[] for _ in range(ranks)]  # type: ignore[var-annotated]
    for calls in meeting.calls:
        calls.fill_(first)
    if first:  # as the calls before have left it
        for mailbox in meeting.mailboxes:
            mailbox[:, :, 0] = first

    def run(rank: int) -> None:
        for call in range(8):
            if call % ranks == rank:
                time.sleep(0.01)
            words = [100 * call + rank + i for i in range(call)]
            found[rank].append(meeting.share(rank, words))

    threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    want = [[[100 * c + r + i for i in range(c)] for r in range(ranks)] for c in range(8)]
    assert found == [want] * ranks
    assert not any(t.any() for t in (*meeting.ended, *meeting.late))


def test_a_late_rank_ends_the_wait_and_those_after_it() -> None:
    meeting = Meeting(3)
    start = time.monotonic()
    ended = threading.Thread(target=meeting.share, args=(2, [7], 50))
    ended.start()
    assert meeting.share(0, [5], 50) == [[5], [0], [7]]
    ended.join()
    assert 0.05 <= time.monotonic() - start < 5
    assert meeting.late[0].tolist() == [0, 1, 0]
    start = time.monotonic()
    assert meeting.share(0, [5], 100_000) == [[0], [0], [0]]  # at once
    assert time.monotonic() - start < 5
    assert meeting.late[0].tolist() == [0, 1, 0]
    assert meeting.calls[0].item() == 1


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"rank": 2}, r"rank must lie in \[0, 2\); got 2"),
    "timeout": ({"timeout_ms": -1}, r"timeout_ms must lie in \[0, 10\^9\]; got -1"),
    "room": ({"words": torch.zeros(16).int()}, "mailbox must have room for more than the 16 words"),
    "room for more": ({"more": torch.zeros(13, 1).int()}, "mailbox must have room for .* 16 words"),
    "more": ({"more": torch.zeros(3).int()}, "more must have 2 dimensions"),
    "peers": ({"peers": torch.zeros(3).long()}, "mailbox must be"),
    "late": ({"late": torch.zeros(3).int()}, "late must be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_share_words(name: str) -> None:
    meeting = Meeting(2)
    given: dict[str, Any] = {"words": torch.zeros(3).int(), "peers": meeting.peers}
    given |= {"mailbox": meeting.mailboxes[0], "calls": meeting.calls[0]}
    given |= {"ended": meeting.ended[0], "late": meeting.late[0], "rank": 0, "timeout_ms": 0}
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=rf"\[share_words\] {message}"):
        ops.share_words(**{**given, **change})
    assert meeting.calls[0].item() == 0


@pytest.mark.parametrize("segment", [0, 7, 40])
@pytest.mark.parametrize("slots", [0, 3])
def test_rows_go_to_the_ranks_and_sums_come_from_them(slots: int, segment: int) -> None:
    ranks, tokens, hidden = 4, 33, 272
    g = torch.Generator().manual_seed(segment)
    ids = torch.randint(-1, 12, (tokens, 3), generator=g)
    x, probs = torch.randn(tokens, hidden, generator=g).bfloat16(), torch.rand(tokens, 3)
    plan, counts = ops.dispatch_plan(ids, 12, ranks, segment=segment, spare=int(segment > 0))
    of = (ids, probs) if slots else ()
    want = ops.quantize_pack(x, plan, *of, num_experts=12)
    for most in (tokens + 2, 5):
        there = [torch.full((most, want.shape[1]), POISON, dtype=torch.uint8) for _ in range(ranks)]
        addresses = torch.tensor([t.data_ptr() for t in there])
        ops.quantize_pack(x, plan, *of, num_experts=12, peers=addresses, out=there[1])
        for r, got in enumerate(there):
            first, end = plan.row_offsets[r : r + 2].tolist()
            rows = int(counts[r, 0])
            here = min(rows, most)
            assert torch.equal(got[:here], want[first : first + here])
            at = hidden + 4 * -(-hidden // 128)
            for row in range(here, most):  # those without a token, and those of no row
                part = got[row, at : at + 8 * slots]
                if row < end - first and slots:
                    assert torch.equal(part, want[first + row, at : at + 8 * slots])
                else:
                    assert (got[row] == POISON).all()
    lengths = torch.diff(plan.row_offsets).tolist()
    firsts = torch.tensor([0, 3, 7, 1], dtype=torch.int32)
    there = [torch.full((tokens + 2, want.shape[1]), POISON, dtype=torch.uint8) for _ in lengths]
    addresses = torch.tensor([t.data_ptr() for t in there])
    ops.quantize_pack(x, plan, *of, num_experts=12, peers=addresses, first=firsts, out=there[1])
    for r, got in enumerate(there):
        before, begin = int(firsts[r]), int(plan.row_offsets[r])
        rows = min(int(counts[r, 0]), len(got) - before)
        assert torch.equal(got[before : before + rows], want[begin : begin + rows])
        assert (got[:before] == POISON).all()
        assert (got[before + max(lengths[r], 0) :] == POISON).all()
    rows = torch.randn(plan.rows, 48, generator=g).bfloat16()
    for first_row in (0, 3):  # of the rows for this rank
        there = []
        for r in range(ranks):
            begin, end = plan.row_offsets[r : r + 2].tolist()
            there.append(torch.cat([rows.new_full((first_row, 48), 9.0), rows[begin:end]]))
        addresses = torch.tensor([t.data_ptr() for t in there])
        firsts = torch.full((ranks,), first_row, dtype=torch.int32)
        got = ops.unpermute_unpad(there[2], plan, peers=addresses, first=firsts)
        assert torch.equal(got, ops.unpermute_unpad(rows, plan))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
def test_rows_are_copied_from_their_places(dtype: torch.dtype) -> None:
    there = [torch.arange(5 * 7).view(5, 7).to(dtype) + r for r in range(3)]
    out = torch.full((6, 7), POISON).to(dtype)
    want = torch.cat([there[1][1:3], there[0][:4]])
    places = [[there[0].data_ptr(), 4, 2], [there[2].data_ptr(), 0, 6]]
    places.append([there[1][1].data_ptr(), 2, 0])
    assert ops.copy_rows(out, torch.tensor(places)) is out
    assert torch.equal(out, want)
    for count, at in ((3, 4), (-1, 0), (1, -1), (2**62, 2**62)):
        wrong = torch.tensor([[there[0].data_ptr(), count, at]])
        with pytest.raises(ValueError, match=r"\[copy_rows\] places must lie within the 6 rows"):
            ops.copy_rows(out, wrong)
    with pytest.raises(ValueError, match="places must have the 6 rows of out; got 4"):
        ops.copy_rows(out, torch.tensor(places[:2]))
    with pytest.raises(ValueError, match=r"\[copy_rows\] places must be"):
        ops.copy_rows(out, torch.zeros(2, 2).long())
    assert torch.equal(out, want)


def test_wrong_peers() -> None:
    plan, _ = ops.dispatch_plan(torch.zeros(4, 1).long(), 2, 2)
    x, peers, first = torch.zeros(4, 64), torch.zeros(2).long(), torch.zeros(2).int()
    with pytest.raises(ValueError, match=r"\[quantize_pack\] peers need packed, what this rank's"):
        ops.quantize_pack(x, plan, peers=peers)
    with pytest.raises(ValueError, match=r"\[quantize_pack\] peers must be"):
        ops.quantize_pack(x, plan, peers=peers[:1], out=torch.zeros(4, 80, dtype=torch.uint8))
    for name, given, wrong in (("needs peers", None, first), ("must be", peers, first[:1])):
        out = torch.zeros(4, 80, dtype=torch.uint8)
        with pytest.raises(ValueError, match=rf"\[quantize_pack\] first {name}"):
            ops.quantize_pack(x, plan, peers=given, first=wrong, out=out)
    with pytest.raises(ValueError, match=r"\[unpermute_unpad\] peers and first are given together"):
        ops.unpermute_unpad(x, plan, peers=peers)
    with pytest.raises(ValueError, match=r"\[unpermute_unpad\] first must be"):
        ops.unpermute_unpad(x, plan, peers=peers, first=first[:1])
    local = ops.route(4, topk_idx=torch.zeros(4, 2).long())
    with pytest.raises(ValueError, match=r"peers need a plan of dispatch_plan, slots == experts"):
        ops.unpermute_unpad(torch.zeros(8, 64), local, peers=peers, first=first)
