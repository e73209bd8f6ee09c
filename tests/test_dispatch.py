"""dispatch_plan, quantize_pack, unpack: bit-equal to the reference of `verify`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import backends
import fp8moe_cutlass.ops
from fp8moe_cutlass import _C, RoutingPlan
from fp8moe_cutlass.tools.verify import reference as ref
from on_device import CPU_ONLY, LARGE, moved, ops

pytestmark = pytest.mark.usefixtures("device")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
POISON = 0xA5


def poisoned_plan(tokens: int, ranks: int, capacity: int) -> RoutingPlan:
    sizes = (tokens, ranks, ranks, 1, capacity)
    words = RoutingPlan(None, *sizes).buffer_size
    return RoutingPlan(torch.full((words,), -0x5A5A5A5B, dtype=torch.int32), *sizes)


def tokens_of(d: ref.Dispatch, rank: int) -> list[int]:
    """The tokens that have a row of this rank, in order."""
    return np.nonzero(d.row_of[:, rank] >= 0)[0].tolist()


def assert_plan(plan: RoutingPlan, counts: Tensor, d: ref.Dispatch, segment: int) -> None:
    """Every section of the buffer, and the counts. segment: the rows of a rank; 0: any number."""
    ranks = len(d.first_row)
    assert (plan.slots, plan.experts, plan.align) == (ranks, ranks, 1)
    kept = d.counts[:, 0].tolist()
    end = ranks * segment if segment else sum(kept)
    columns = np.cumsum([0, *(-(-n // 128) * 128 for n in kept)])
    token, slot = np.full(end, -1), np.full(end, -1)
    blocks: list[list[int]] = []
    for r in range(ranks):
        tokens = tokens_of(d, r)
        at = slice(d.first_row[r], d.first_row[r] + len(tokens))
        token[at], slot[at] = tokens, r
        for i in range(0, len(tokens), 128):
            rows = min(128, (segment or len(tokens)) - i)
            blocks.append([d.first_row[r] + i, min(128, len(tokens) - i), rows, r])
    blocks += (plan.columns // 128 - len(blocks)) * [[0, 0, 0, -1]]
    assert plan.status.tolist() == [d.overflow] + [0] * 7
    assert plan.tokens_per_expert.tolist() == kept
    assert plan.row_offsets.tolist() == [*d.first_row, end]
    assert plan.col_offsets.tolist() == columns.tolist()
    assert int(columns[-1]) <= plan.columns
    assert plan.col_blocks.tolist() == blocks
    assert plan.token_of_row[:end].tolist() == token.tolist()
    assert plan.slot_of_row[:end].tolist() == slot.tolist()
    np.testing.assert_array_equal(plan.row_of.numpy(), d.row_of)
    np.testing.assert_array_equal(counts.numpy(), d.counts)


def planned(
    ids: Tensor, experts: int, ranks: int, segment: int = 0, spare: int = 0
) -> tuple[RoutingPlan, Tensor, ref.Dispatch]:
    """The plan, written over poison twice, compared with the reference."""
    tokens, slots = ids.shape
    capacity = (segment + spare) * ranks if segment else tokens * min(slots, ranks)
    d = ref.dispatch(ids.numpy().astype(np.int64), experts, ranks, segment, spare)
    dropped = torch.tensor([3, 4, 5])
    for _ in range(2):
        out = poisoned_plan(tokens, ranks, capacity), torch.full((ranks, 2), -7, dtype=torch.int32)
        of: Any = {"segment": segment, "spare": spare, "dropped": dropped, "out": out}
        plan, counts = ops.dispatch_plan(ids, experts, ranks, **of)
        assert_plan(plan, counts, d, segment and segment + spare)
    assert dropped.tolist() == [3 + 2 * int(plan.status[0]), 4, 5]
    return plan, counts, d


def packed_of(
    x: Tensor, ids: Tensor | None, probs: Tensor | None, plan: RoutingPlan, **kwargs: Any
) -> Tensor:
    """quantize_pack over poison."""
    slots = 0 if ids is None else ids.shape[1]
    shape = (plan.rows, ops.packed_row_bytes(x.shape[1], slots))
    out = torch.full(shape, POISON, dtype=torch.uint8)
    return ops.quantize_pack(x, plan, ids, probs, out=out, **kwargs)


def wire(
    d: ref.Dispatch,
    x: NDArray[np.float32],
    dtype: str,
    ids: NDArray[np.int64] | None,
    probs: NDArray[np.float32] | None,
    num_experts: int,
    fp8: str,
    scale: str,
) -> dict[int, bytes]:
    """The bytes of each row that has a token. dtype: the one x was given in."""
    q = ref.quantize(x, 1, fp8, scale, largest=ref.LARGEST[dtype])
    parts: list[NDArray[Any]] = [part[np.nonzero(d.row_of >= 0)[0]] for part in q]
    if ids is not None and probs is not None:
        parts += ref.local_ids(ids, probs, d, num_experts // len(d.first_row))
    found = {}
    for row, *of_row in zip(d.row_of[d.row_of >= 0], *parts, strict=True):
        packed = b"".join(part.tobytes() for part in of_row)
        found[int(row)] = packed + b"\0" * (-len(packed) % 16)
    return found


def assert_wire(
    packed: Tensor, rows: dict[int, bytes], plan: RoutingPlan, hidden: int, slots: int
) -> None:
    """Rows with a token in every byte; ids -1 and probs 0 in a segment's others; no row past it."""
    end, ids = int(plan.row_offsets[-1]), hidden + 4 * -(-hidden // 128)
    for row in range(plan.rows):
        got = packed[row].numpy()
        if row in rows:
            assert got.tobytes() == rows[row], row
        elif row < end and slots:
            assert (got[ids : ids + 4 * slots] == 0xFF).all()
            assert (got[ids + 4 * slots : ids + 8 * slots] == 0).all()
        else:
            assert (got == POISON).all()


def routing(kind: str, tokens: int, slots: int, experts: int, seed: int = 3) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts, (tokens, slots), generator=g)
    if kind == "one rank":
        ids[:] = torch.randint(experts - 1, experts, ids.shape, generator=g)
    elif kind == "a rank without":
        ids[ids >= experts // 2] = 0
    elif kind == "twice":
        ids[:, slots // 2] = ids[:, 0]
    elif kind == "none":
        ids[:] = -1
    return ids


KINDS = ("random", "one rank", "a rank without", "twice", "none")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_plans(kind: str, ranks: int) -> None:
    for tokens, slots, each in ((0, 2, 1), (1, 1, 1), (37, 8, 4), (2500, 3, 2)):
        ids = routing(kind, tokens, slots, ranks * each)
        for given_ids in (ids, ids.int()):
            planned(given_ids, ranks * each, ranks)
            planned(given_ids, ranks * each, ranks, segment=16)  # overflows, but for few tokens
        planned(ids, ranks * each, ranks, segment=tokens + 5)
        planned(ids, ranks * each, ranks, segment=16, spare=3)
        planned(ids, ranks * each, ranks, segment=tokens + 5, spare=1)


@pytest.mark.parametrize("kind", backends.ROUTINGS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_plans_of_routings(kind: str, ranks: int) -> None:
    for tokens, each, slots in ((1, 1, 1), (129, 3, 2), (700, 4, 8)):
        ids = backends.routing(kind, tokens, ranks * each, slots)
        planned(ids, ranks * each, ranks)
        planned(ids.int(), ranks * each, ranks, 40, spare=3)
        planned(ids, ranks * each, ranks, tokens + 3, spare=3)
        overflowing(ids, ranks * each, ranks, tokens // 2)


@LARGE
def test_random_sizes() -> None:
    draw = random.Random(5)
    for _ in range(60):
        ranks, each = draw.choice((1, 2, 7, 31, 33, 100, 1023, 1024)), draw.randrange(1, 6)
        tokens, slots = draw.randrange(0, 500), draw.randrange(1, 12)
        ids = torch.randint(-1, ranks * each, (tokens, slots))
        segment = draw.choice((0, 0, 1, draw.randrange(1, 200)))
        planned(ids, ranks * each, ranks, segment, spare=3 if segment else 0)


@LARGE
@pytest.mark.parametrize("ranks", [2, 1024])
def test_many_tokens(ranks: int) -> None:
    """Chunks of several steps, of which the last is cut."""
    ids = torch.randint(-1, 2 * ranks, (128 * 128 + 517 if ranks > 2 else 100_003, 2))
    planned(ids, 2 * ranks, ranks)
    planned(ids, 2 * ranks, ranks, 900, spare=3)
    ids[:] = 2 * ranks - 1
    planned(ids, 2 * ranks, ranks)


def overflowing(ids: Tensor, experts: int, ranks: int, capacity: int) -> None:
    """A capacity below what comes: the last ranks lose rows, counted."""
    plan = poisoned_plan(len(ids), ranks, capacity)
    counts = torch.zeros(ranks, 2, dtype=torch.int32)
    there = moved((ids, plan, counts), ops.device)
    _C.dispatch_plan(there[0], experts, 0, *there[1:], None, None)
    plan, counts = moved(there[1:], "cpu")
    d = ref.dispatch(ids.numpy().astype(np.int64), experts, ranks, capacity=capacity)
    assert_plan(plan, counts, d, 0)
    if d.overflow:
        with pytest.raises(ValueError, match=rf"{d.overflow} assignments dropped"):
            plan.check()


@pytest.mark.parametrize("capacity", [0, 1, 30, 55])
def test_overflow_of_the_exact_plan(capacity: int) -> None:
    overflowing(routing("random", 40, 3, 6), 6, 3, capacity)


@pytest.mark.parametrize("slots", range(1, 9))
@pytest.mark.parametrize("hidden", [16, 128, 272, 2880])
def test_wire(hidden: int, slots: int) -> None:
    """Every width of a row, ids and gradient, exact and segmented."""
    x = torch.randn(13, hidden) * torch.exp2(torch.arange(13.0) * 3 - 20)[:, None]
    ids, probs = routing("random", 13, slots, 6), torch.randn(13, slots)
    for segment in (0, 5, 20):
        plan, _, d = planned(ids, 6, 3, segment)
        packed = packed_of(x, ids, probs, plan, num_experts=6)
        args = (x.numpy(), "float32", ids.numpy(), probs.numpy(), 6, "e4m3", "pow2")
        assert_wire(packed, wire(d, *args), plan, hidden, slots)
        gradient = packed_of(x, None, None, plan, num_experts=6)
        args = (x.numpy(), "float32", None, None, 6, "e4m3", "pow2")
        assert_wire(gradient, wire(d, *args), plan, hidden, 0)


@LARGE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [16, 128, 272, 2880, 7168, 16400])
def test_wide_wire(hidden: int, dtype: str) -> None:
    draw = random.Random(hidden)
    for tokens, ranks, slots in ((1, 1, 1), (37, 3, 2), (50, 8, 8), (20, 40, 5)):
        ids = backends.routing("twice", tokens, ranks * 4, slots)
        ids[torch.rand(ids.shape) < 0.1] = -1
        x = backends.awkward(tokens, hidden, dtype=DTYPES[dtype])
        probs = torch.rand(tokens, slots)
        for segment in (0, 7):
            plan, _, d = planned(ids, ranks * 4, ranks, segment)
            fp8, scale = draw.choice(("e4m3", "e5m2")), draw.choice(("pow2", "fp32", "amax"))
            kwargs = {"num_experts": ranks * 4, "fp8_dtype": fp8, "scale": scale}
            packed = packed_of(x, (ids, ids.int())[segment > 0], probs, plan, **kwargs)
            of = (d, x.float().numpy(), dtype)
            rows = wire(*of, ids.numpy(), probs.numpy(), ranks * 4, fp8, scale)
            assert_wire(packed, rows, plan, hidden, slots)
            gradient = packed_of(x, None, None, plan, **kwargs)
            rows = wire(*of, None, None, ranks * 4, fp8, scale)
            assert_wire(gradient, rows, plan, hidden, 0)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_formats(dtype: str, fp8: str, scale: Any, ids_dtype: torch.dtype) -> None:
    x = torch.randn(21, 272) * torch.exp2(torch.arange(21.0) - 10)[:, None]
    x[3], x[4, 5], x[5, 130], x[6] = 0.0, torch.nan, torch.inf, -0.0
    x[7], x[8], x[9] = x[7] * 1e-41, x[8] * 1e30, torch.nan
    x = x.to(DTYPES[dtype])
    ids, probs = routing("twice", 21, 4, 8).to(ids_dtype), torch.rand(21, 4)
    probs[2, 1], probs[7, 0] = torch.nan, -0.0
    plan, _, d = planned(ids, 8, 8)
    packed = packed_of(x, ids, probs, plan, num_experts=8, fp8_dtype=fp8, scale=scale)
    plain = ids.numpy().astype(np.int64)
    rows = wire(d, x.float().numpy(), dtype, plain, probs.numpy(), 8, fp8, scale)
    assert_wire(packed, rows, plan, 272, 4)
    q = ops.quantize(x, fp8_dtype=fp8, scale=scale)
    got, *_ = ops.unpack(packed, 272, 4, fp8_dtype=fp8, pow2=scale == "pow2")
    assert (got.fp8_dtype, got.pow2, got.scale_layout) == (fp8, scale == "pow2", "row")
    token = plan.token_of_row[: int(plan.row_offsets[-1])].long()
    assert torch.equal(got.data.view(torch.uint8)[: len(token)], q.data.view(torch.uint8)[token])
    assert torch.equal(got.scale_inv[: len(token)], q.scale_inv[token])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    ranks, each = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    tokens, slots = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 8))
    seed, segment = data.draw(st.integers(0, 2**31)), data.draw(st.integers(0, 30))
    hidden = 16 * data.draw(st.integers(1, 20))
    ids = routing(data.draw(st.sampled_from(KINDS)), tokens, slots, ranks * each, seed)
    g = torch.Generator().manual_seed(seed)
    x, probs = torch.randn(tokens, hidden, generator=g), torch.rand(tokens, slots, generator=g)
    plan, _, d = planned(ids, ranks * each, ranks, segment)
    packed = packed_of(x, ids, probs, plan, num_experts=ranks * each)
    args = (x.numpy(), "float32", ids.numpy(), probs.numpy(), ranks * each, "e4m3", "pow2")
    assert_wire(packed, wire(d, *args), plan, hidden, slots)
    _, local, weights = ops.unpack(packed, hidden, slots)
    assert local is not None
    assert weights is not None
    for r in range(ranks):
        kept = tokens_of(d, r)
        rows = slice(d.first_row[r], d.first_row[r] + len(kept))
        here = ids[kept] // each == r  # floor: -1 is on no rank
        want = torch.where(here, ids[kept] - r * each, -1)
        assert torch.equal(local[rows].long(), want)
        assert torch.equal(weights[rows], torch.where(here, probs[kept], 0.0))


def test_a_round_trip_is_the_routing_of_one_process() -> None:
    """What a rank makes of its rows is what one process makes of its experts' tokens."""
    ids, x, probs = routing("twice", 60, 4, 12), torch.randn(60, 272), torch.rand(60, 4)
    whole = ops.route(12, topk_idx=ids)
    want, want_probs = ops.permute_pad(ops.quantize(x), whole, probs)
    assert want_probs is not None
    plan, counts = ops.dispatch_plan(ids, 12, 3)
    packed = ops.quantize_pack(x, plan, ids, probs, num_experts=12)
    for r in range(3):
        rows = packed[int(plan.row_offsets[r]) : int(plan.row_offsets[r + 1])]
        got, local, weights = ops.unpack(rows, 272, 4)
        here = ops.route(4, topk_idx=local, capacity=int(counts[r, 1]))
        y, y_probs = ops.permute_pad(got, here, weights)
        assert y_probs is not None
        assert torch.equal(here.tokens_per_expert, whole.tokens_per_expert[4 * r : 4 * r + 4])
        at = slice(int(whole.row_offsets[4 * r]), int(whole.row_offsets[4 * r + 4]))
        end = at.stop - at.start
        assert torch.equal(y.data[:end].view(torch.uint8), want.data[at].view(torch.uint8))
        assert torch.equal(y.scale_inv[:, :end], want.scale_inv[:, at])
        assert torch.equal(y_probs[:end], want_probs[at])


def test_the_plan_serves_other_operators() -> None:
    """Segments are padding to them: zero rows, sums over the ranks that have one."""
    ids = routing("random", 50, 3, 6)
    plan, _, d = planned(ids, 6, 3, segment=30)
    x = torch.randn(50, 48)
    y, _ = ops.permute_pad(x, plan)
    token = plan.token_of_row
    assert torch.equal(y, torch.where(token[:, None] >= 0, x[token.long()], 0.0))
    there = torch.from_numpy(d.row_of >= 0)
    want = torch.zeros_like(x)
    for r in range(3):
        want += torch.where(there[:, r : r + 1], x, 0.0)
    assert torch.equal(ops.unpermute_unpad(y, plan), want)


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_unpack(slots: int) -> None:
    packed = torch.randint(0, 256, (301, ops.packed_row_bytes(272, slots)), dtype=torch.uint8)
    _, ids, probs = fp8moe_cutlass.ops.unpack(packed, 272, slots)
    out = backends.poison((torch.empty_like(ids), torch.empty_like(probs)))
    _, got_ids, got_probs = ops.unpack(packed, 272, slots, out=out)
    assert torch.equal(ids, got_ids)
    assert torch.equal(probs.view(torch.int32), got_probs.view(torch.int32))


@pytest.mark.parametrize("kind", backends.ROUTINGS)
def test_movement_by_segments(kind: str) -> None:
    """Rows of a segment without a token are padding to permute_pad; sums skip dropped ranks."""
    ids, x = backends.routing(kind, 90, 12, 3), backends.awkward(90, 272)
    for segment in (20, 95):
        plan, _ = ops.dispatch_plan(ids, 12, 4, segment=segment)
        for op, rows in (
            ("permute_pad", x),
            ("permute_pad", ops.quantize(x)),
            ("unpermute_unpad", backends.awkward(plan.rows, 272)),
            ("unpermute_unpad_backward", x),
            ("permute_pad_backward", backends.awkward(plan.rows, 272)),
        ):
            backends.check(op, rows, plan)


@CPU_ONLY
def test_numpy() -> None:
    ids, x, probs = routing("random", 20, 2, 4), torch.randn(20, 144), torch.rand(20, 2)
    plan, counts = ops.dispatch_plan(ids.numpy(), 4, 2, segment=9)
    packed = ops.quantize_pack(x.numpy(), plan, ids.numpy(), probs.numpy(), num_experts=4)
    got, local, weights = ops.unpack(packed, 144, 2)
    expected, expected_counts = ops.dispatch_plan(ids, 4, 2, segment=9)
    assert np.array_equal(plan.row_of, expected.row_of.numpy())
    assert np.array_equal(counts, expected_counts.numpy())
    there = plan.token_of_row >= 0
    want = ops.unpack(ops.quantize_pack(x, expected, ids, probs, num_experts=4), 144, 2)
    assert np.array_equal(got.data[there], want[0].data.view(torch.uint8).numpy()[there])
    assert np.array_equal(got.scale_inv[there], want[0].scale_inv.numpy()[there])
    assert want[1] is not None
    assert want[2] is not None
    assert np.array_equal(local, want[1].numpy())
    assert np.array_equal(weights, want[2].numpy())


def test_nothing() -> None:
    plan, counts = ops.dispatch_plan(torch.zeros(0, 2, dtype=torch.int64), 4, 2)
    assert (plan.rows, counts.tolist()) == (0, [[0, 0], [0, 0]])
    packed = ops.quantize_pack(torch.zeros(0, 128), plan)
    assert packed.shape == (0, ops.packed_row_bytes(128, 0))
    got, local, weights = ops.unpack(packed, 128, 0)
    assert (got.shape, local, weights) == ((0, 128), None, None)
    ids = torch.zeros(0, 2, dtype=torch.int64)
    plan, _ = ops.dispatch_plan(ids, 4, 2, segment=3)
    packed = ops.quantize_pack(torch.zeros(0, 128), plan, ids, torch.zeros(0, 2), num_experts=4)
    assert ops.unpack(packed, 128, 2)[1].tolist() == [[-1, -1]] * 6  # type: ignore[union-attr]
    for given_x in (torch.zeros(0, 128), ops.quantize(torch.zeros(0, 128))):  # rows are padding
        backends.check("permute_pad", given_x, plan, torch.zeros(0, 2))


# ---- refusals -----------------------------------------------------------------------------------

IDS = routing("random", 12, 2, 4)
PLAN, COUNTS = ops.dispatch_plan(IDS, 4, 2)
X, PROBS = torch.randn(12, 144), torch.rand(12, 2)


@CPU_ONLY
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [4, -2, 2**31 - 1])
def test_bad_ids_write_nothing(bad: int, dtype: torch.dtype) -> None:
    ids = torch.zeros(3000, 2, dtype=dtype)
    ids[2900, 1] = bad
    plan, counts = poisoned_plan(3000, 2, 6000), torch.full((2, 2), -7, dtype=torch.int32)
    before = plan.buffer.clone()
    with pytest.raises(ValueError, match=rf"got {bad} at token 2900, slot 1"):
        ops.dispatch_plan(ids, 4, 2, out=(plan, counts))
    assert torch.equal(plan.buffer, before)
    assert (counts == -7).all()


def flat_plan(ids: Tensor, experts: int, segment: int, *sizes: int) -> None:
    buffer = torch.zeros(RoutingPlan(None, *sizes).buffer_size, dtype=torch.int32)  # type: ignore[arg-type]
    plan = RoutingPlan(buffer, *sizes)
    _C.dispatch_plan(ids, experts, segment, plan, torch.zeros(2, 2).int(), None, None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.dispatch_plan(IDS, 5, 2), "multiple of ranks; got 5 and 2"),
        (lambda: ops.dispatch_plan(IDS, 4, 0), "multiple of ranks; got 4 and 0"),
        (lambda: ops.dispatch_plan(IDS[0], 4, 2), "must have 2 dimensions"),
        (lambda: ops.dispatch_plan(IDS.float(), 4, 2), "topk_idx must be one of int32, int64"),
        (lambda: ops.dispatch_plan(IDS.T, 4, 2), "topk_idx must be contiguous"),
        (lambda: ops.dispatch_plan(IDS, 4, 2, out=(PLAN, COUNTS[:1])), r"counts must be \[2, 2\]"),
        (
            lambda: ops.dispatch_plan(IDS, 4, 2, segment=3, out=(PLAN, COUNTS)),
            "out must be a plan of",
        ),
        (
            lambda: ops.dispatch_plan(IDS, 4, 2, dropped=torch.zeros(2).long()),
            r"\[dispatch_plan\] dropped must be \[3\]; got \[2\]",
        ),
        (lambda: ops.dispatch_plan(IDS, 4, 2, dropped=torch.zeros(3).int()), "dropped must be"),
        (lambda: flat_plan(IDS, 4, 0, 12, 3, 2, 1, 24), "slots == experts"),
        (lambda: flat_plan(IDS, 4, 0, 12, 2, 2, 16, 24), "slots == experts"),
        (lambda: flat_plan(IDS, 4, 13, 12, 2, 2, 1, 24), "segment must be 0 or at most"),
        (lambda: flat_plan(IDS, 4, -1, 12, 2, 2, 1, 24), "segment must be 0 or at most"),
        (lambda: flat_plan(IDS, 4, 5, 12, 2, 2, 1, 25), "segment must be 0 or at most"),
        (lambda: flat_plan(IDS, 3, 0, 12, 2, 2, 1, 24), "num_experts must be a positive multiple"),
        (lambda: flat_plan(IDS, 0, 0, 12, 2, 2, 1, 24), "num_experts must be a positive multiple"),
    ],
)
def test_plan_refusals(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topk_idx": IDS}, "given together; got only topk_idx"),
        ({"probs": PROBS, "num_experts": 4}, "given together; got only probs"),
        ({"topk_idx": IDS, "probs": PROBS, "num_experts": None}, "needs num_experts"),
        ({"topk_idx": IDS, "probs": PROBS, "num_experts": 3}, "multiple of the ranks"),
        ({"topk_idx": IDS[:5], "probs": PROBS}, r"topk_idx must be \[12, 2\]"),
        ({"topk_idx": IDS, "probs": PROBS.double()}, "probs must be"),
        ({"x": X[:, :136].contiguous()}, "multiple of 16"),
        ({"x": X[:5]}, r"x must be \[12, 144\]; got \[5, 144\]"),
        ({"x": X[:, :128]}, "x must be contiguous"),
        ({"x": X.double()}, "x must be"),
        ({"fp8_dtype": "e3m4"}, r"\[quantize_pack\] fp8_dtype must be one of"),
        ({"scale": "int8"}, "scale must be"),
        ({"eps": -1.0}, "eps must be finite"),
        ({"plan": ops.route(4, topk_idx=IDS)}, "slots == experts"),
        ({"out": torch.empty(24, 160, dtype=torch.int8)}, "packed must be"),
        ({"out": torch.empty(24, 176, dtype=torch.uint8)}, r"packed must be \[24, 160\]"),
    ],
)
def test_pack_refusals(arguments: dict[str, Any], message: str) -> None:
    given_args: dict[str, Any] = {"x": X, "plan": PLAN, "num_experts": 4} | arguments
    out = given_args.setdefault("out", torch.full((24, 160), POISON, dtype=torch.uint8))
    before = out.clone()
    with pytest.raises(ValueError, match=message):
        ops.quantize_pack(given_args.pop("x"), given_args.pop("plan"), **given_args)
    assert torch.equal(out, before)


@CPU_ONLY
def test_a_buffer_that_is_no_plan_is_refused() -> None:
    for section in ("row_of", "row_offsets"):
        plan = RoutingPlan(PLAN.buffer.clone(), *PLAN.sizes)
        getattr(plan, section).view(-1)[1] = 99
        with pytest.raises(ValueError, match="plan must be filled"):
            ops.quantize_pack(X, plan)


def test_unpack_refusals() -> None:
    packed = ops.quantize_pack(X, PLAN, IDS, PROBS, num_experts=4)
    with pytest.raises(ValueError, match=r"packed must be \[24, 192\]; got \[24, \d+\]"):
        ops.unpack(packed, 144, 5)
    with pytest.raises(ValueError, match="hidden must be a multiple of 16"):
        ops.unpack(packed, 148, 2)
    ids, probs = torch.empty(24, 2, dtype=torch.int32), torch.empty(24, 2)
    for out in ((ids.long(), probs), (ids, probs[:, :1]), (ids[:5], probs)):
        with pytest.raises(ValueError, match=r"\[unpack\]"):
            ops.unpack(packed, 144, 2, out=out)
