"""dispatch_plan, quantize_pack, unpack and strided rows: CUDA against the CPU, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from backends import ROUTINGS, assert_same, awkward, on_both, poison, routing
from torch import Tensor

from fp8moe_cutlass import _C, Fp8Tensor, RoutingPlan, ops

Planned = tuple[RoutingPlan, Tensor]
SPARE = 3  # rows of a segment that no token takes


def assert_same_plan(expected: Planned, got: Planned) -> None:
    """All of the buffer that is defined, and the counts."""
    plan, on_gpu = expected[0], got[0].to("cpu")
    sections = ("status", "tokens_per_expert", "row_offsets", "col_offsets", "row_of", "col_blocks")
    for name in sections:
        assert torch.equal(getattr(plan, name), getattr(on_gpu, name)), name
    rows = int(plan.row_offsets[-1])
    for name in ("token_of_row", "slot_of_row"):
        assert torch.equal(getattr(plan, name)[:rows], getattr(on_gpu, name)[:rows]), name
    assert torch.equal(expected[1], got[1].cpu())


def on_gpu(ids: Tensor, experts: int, ranks: int, segment: int, *sizes: int) -> Planned:
    """dispatch_plan on CUDA over a poisoned buffer; sizes: (tokens, capacity), or what follows."""
    tokens, slots = ids.shape
    capacity = (segment + SPARE) * ranks if segment else tokens * min(slots, ranks)
    whole = (tokens, ranks, ranks, 1, sizes[0] if sizes else capacity)
    words = RoutingPlan(None, *whole).buffer_size
    plan = RoutingPlan(poison(torch.empty(words, dtype=torch.int32, device="cuda")), *whole)
    counts = poison(torch.empty(ranks, 2, dtype=torch.int32, device="cuda"))
    _C.dispatch_plan(ids.cuda(), experts, segment, plan, counts, None)
    return plan, counts


def on_cpu(ids: Tensor, experts: int, ranks: int, segment: int, *sizes: int) -> Planned:
    tokens, slots = ids.shape
    capacity = (segment + SPARE) * ranks if segment else tokens * min(slots, ranks)
    whole = (tokens, ranks, ranks, 1, sizes[0] if sizes else capacity)
    words = RoutingPlan(None, *whole).buffer_size
    plan = RoutingPlan(torch.empty(words, dtype=torch.int32), *whole)
    counts = torch.empty(ranks, 2, dtype=torch.int32)
    _C.dispatch_plan(ids, experts, segment, plan, counts, None)
    return plan, counts


def check(ids: Tensor, experts: int, ranks: int, segment: int = 0, *sizes: int) -> None:
    expected = on_cpu(ids, experts, ranks, segment, *sizes)
    for _ in range(2):
        assert_same_plan(expected, on_gpu(ids, experts, ranks, segment, *sizes))


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_plans(kind: str, ranks: int) -> None:
    for tokens, each, slots in ((1, 1, 1), (129, 3, 2), (700, 4, 8)):
        ids = routing(kind, tokens, ranks * each, slots)
        check(ids, ranks * each, ranks)
        check(ids.int(), ranks * each, ranks, 40)
        check(ids, ranks * each, ranks, tokens + 3)
        check(ids, ranks * each, ranks, 0, tokens // 2)  # a capacity below what comes


def test_random_sizes() -> None:
    draw = random.Random(5)
    for _ in range(60):
        ranks, each = draw.choice((1, 2, 7, 31, 33, 100, 1023, 1024)), draw.randrange(1, 6)
        tokens, slots = draw.randrange(0, 500), draw.randrange(1, 12)
        ids = torch.randint(-1, ranks * each, (tokens, slots))
        segment = draw.choice((0, 0, 1, draw.randrange(1, 200)))
        check(ids, ranks * each, ranks, segment)


@pytest.mark.parametrize("ranks", [2, 1024])
def test_many_tokens(ranks: int) -> None:
    """Chunks of several steps, of which the last is cut."""
    ids = torch.randint(-1, 2 * ranks, (128 * 128 + 517 if ranks > 2 else 100_003, 2))
    check(ids, 2 * ranks, ranks)
    check(ids, 2 * ranks, ranks, 900)
    ids[:] = 2 * ranks - 1
    check(ids, 2 * ranks, ranks)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_are_dropped_and_counted(dtype: torch.dtype) -> None:
    ids = torch.randint(0, 12, (300, 4), dtype=dtype)
    bad = torch.rand(300, 4) < 0.2
    wrong = torch.where(torch.rand(300, 4) < 0.5, torch.iinfo(dtype).max, -2).to(dtype)
    expected = ops.dispatch_plan(torch.where(bad, -1, ids), 12, 3)
    given = torch.where(bad, wrong, ids)
    plan, counts = on_gpu(given, 12, 3, 0)
    assert int(plan.status[1]) == int(bad.sum())
    x, probs = awkward(300, 128), torch.rand(300, 4)
    packed = ops.quantize_pack(x.cuda(), plan, given.cuda(), probs.cuda(), num_experts=12)
    want = ops.quantize_pack(x, expected[0], torch.where(bad, -1, ids), probs, num_experts=12)
    rows = int(expected[0].row_offsets[-1])
    assert torch.equal(packed.cpu()[:rows], want[:rows])
    plan.status.zero_()
    assert_same_plan(expected, (plan, counts))


def assert_same_wire(
    expected: Tensor, got: Tensor, plan: RoutingPlan, hidden: int, slots: int
) -> None:
    """Rows with a token in every byte; of the others the ids and probs; nothing past the end."""
    end, got = int(plan.row_offsets[-1]), got.cpu()
    there = plan.token_of_row[:end] >= 0
    assert torch.equal(expected[:end][there], got[:end][there])
    ids = hidden + 4 * -(-hidden // 128)
    at = slice(ids, ids + 8 * slots)
    assert torch.equal(expected[:end][~there][:, at], got[:end][~there][:, at])
    assert (got[end:] == 0xA5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [16, 128, 272, 2880, 7168, 16400])
def test_wire(hidden: int, dtype: torch.dtype) -> None:
    draw = random.Random(hidden)
    for tokens, ranks, slots in ((1, 1, 1), (37, 3, 2), (50, 8, 8), (20, 40, 5)):
        ids, probs = routing("twice", tokens, ranks * 4, slots), torch.rand(tokens, slots)
        ids[torch.rand(ids.shape) < 0.1] = -1
        x = awkward(tokens, hidden, dtype=dtype)
        for segment in (0, 7):
            plan, _ = ops.dispatch_plan(ids, ranks * 4, ranks, segment=segment)
            fp8, scale = draw.choice(("e4m3", "e5m2")), draw.choice(("pow2", "fp32", "amax"))
            kwargs = {"num_experts": ranks * 4, "fp8_dtype": fp8, "scale": scale}
            given = (ids, ids.int())[segment > 0]
            expected, got = on_both(ops.quantize_pack, x, plan, given, probs, **kwargs)
            for packed in got:
                assert_same_wire(expected, packed, plan, hidden, slots)
            expected, got = on_both(ops.quantize_pack, x, plan, **kwargs)
            for packed in got:
                assert_same_wire(expected, packed, plan, hidden, 0)


def test_special_values() -> None:
    x = torch.randn(40, 400)
    x[0], x[1, 3], x[2, 200], x[3] = 0.0, torch.nan, torch.inf, -0.0
    x[4], x[5], x[6] = x[4] * 1e-41, x[5] * 1e30, torch.nan
    ids, probs = routing("random", 40, 6, 3), torch.rand(40, 3)
    probs[0, 0], probs[1, 1] = torch.nan, -0.0
    plan, _ = ops.dispatch_plan(ids, 6, 3)
    for scale in ("pow2", "fp32", "amax"):
        expected, got = on_both(ops.quantize_pack, x, plan, ids, probs, num_experts=6, scale=scale)
        for packed in got:
            assert_same_wire(expected, packed, plan, 400, 3)


def test_no_tokens() -> None:
    ids, probs = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)
    check(ids, 4, 2)
    check(ids, 4, 2, 3)
    plan, _ = ops.dispatch_plan(ids, 4, 2, segment=3)
    x = torch.zeros(0, 128)
    expected, got = on_both(ops.quantize_pack, x, plan, ids, probs, num_experts=4)
    assert_same_wire(expected, got[0], plan, 128, 2)
    for given in (x, ops.quantize(x)):  # rows of segments are padding
        expected, got = on_both(ops.permute_pad, given, plan, torch.zeros(0, 2))
        assert_same(expected, got[0], plan)


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_unpack(slots: int) -> None:
    packed = torch.randint(0, 256, (301, ops.packed_row_bytes(272, slots)), dtype=torch.uint8)
    _, ids, probs = ops.unpack(packed, 272, slots)
    out = poison((torch.empty_like(ids, device="cuda"), torch.empty_like(probs, device="cuda")))
    _, got_ids, got_probs = ops.unpack(packed.cuda(), 272, slots, out=out)
    assert torch.equal(ids, got_ids.cpu())
    assert torch.equal(probs.view(torch.int32), got_probs.cpu().view(torch.int32))


@pytest.mark.parametrize("kind", ROUTINGS)
def test_movement_by_segments(kind: str) -> None:
    """Rows of a segment without a token are padding to permute_pad; sums skip dropped ranks."""
    ids, x = routing(kind, 90, 12, 3), awkward(90, 272)
    for segment in (20, 95):
        plan, _ = ops.dispatch_plan(ids, 12, 4, segment=segment)
        for op, given in (
            (ops.permute_pad, x),
            (ops.permute_pad, ops.quantize(x)),
            (ops.unpermute_unpad, awkward(plan.rows, 272)),
            (ops.unpermute_unpad_backward, x),
            (ops.permute_pad_backward, awkward(plan.rows, 272)),
        ):
            expected, got = on_both(op, given, plan)
            assert_same(expected, got[0], plan)
            assert_same(expected, got[1], plan)


def strided(tokens: int, width: int, slots: int, fp8: str) -> Fp8Tensor:
    """Rows of a wire, on the CPU."""
    ids = torch.zeros(tokens, slots, dtype=torch.int64)
    plan, _ = ops.dispatch_plan(ids, 1, 1)
    probs = torch.rand(tokens, slots)
    x = awkward(tokens, width)
    packed = ops.quantize_pack(x, plan, ids, probs, num_experts=1, fp8_dtype=fp8)
    return ops.unpack(packed, width, slots, fp8_dtype=fp8)[0]


def there(q: Fp8Tensor) -> Fp8Tensor:
    """The same view of a row-strided buffer on the GPU (Tensor.to would make it dense)."""
    tokens, width = q.shape
    rows = torch.zeros(tokens, q.data.stride(0), dtype=torch.uint8, device="cuda")
    scales = width + 4 * q.scale_inv.shape[1]
    rows[:, :width] = q.data.contiguous().view(torch.uint8).cuda()
    rows[:, width:scales] = q.scale_inv.contiguous().view(torch.uint8).cuda()
    return Fp8Tensor(rows[:, :width].view(q.data.dtype), rows[:, width:scales].view(torch.float32))


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("width", [16, 144, 1024, 2880, 7168, 33024])
def test_strided_rows(width: int, fp8: str) -> None:
    tokens, experts, slots = (90, 4, 2) if width < 30000 else (9, 2, 2)
    q = strided(tokens, width, slots, fp8)
    ids, probs = routing("dropped", tokens, experts, slots), torch.rand(tokens, slots)
    plan = ops.route(experts, topk_idx=ids, align=16)
    moved = plan.to("cuda")
    for layout in ("gemm", "row"):
        expected = ops.permute_pad(q, plan, probs, scale_layout=layout)
        out = poison(ops.permute_pad(there(q), moved, probs.cuda(), scale_layout=layout))
        got = ops.permute_pad(there(q), moved, probs.cuda(), scale_layout=layout, out=out)
        assert_same(expected, (got[0].cpu(), got[1].cpu()), plan)
    for columns in ("block", "column"):
        want = ops.permute_transpose_fp8(q, plan, columns=columns)
        out = poison(ops.permute_transpose_fp8(there(q), moved, columns=columns))
        got_t = ops.permute_transpose_fp8(there(q), moved, columns=columns, out=out)
        assert_same(want, got_t.cpu(), plan)


def test_graph_capture() -> None:
    """Plan, pack and unpack without a host read, replayed under another routing."""
    tokens, hidden, slots, ranks, experts, segment = 300, 512, 4, 4, 16, 200
    ids = torch.zeros(tokens, slots, dtype=torch.int64, device="cuda")
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    probs = torch.zeros(tokens, slots, device="cuda")

    def run() -> tuple[Planned, Tensor, tuple[Tensor, Tensor]]:
        planned = ops.dispatch_plan(ids, experts, ranks, segment=segment)
        packed = ops.quantize_pack(x, planned[0], ids, probs, num_experts=experts)
        _, local, weights = ops.unpack(packed, hidden, slots)
        return planned, packed, (local, weights)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned, packed, (local, weights) = run()
    for kind in ("random", "one expert", "dropped"):
        ids_here, x_here = routing(kind, tokens, experts, slots), awkward(tokens, hidden)
        probs_here = torch.rand(tokens, slots)
        ids.copy_(ids_here), x.copy_(x_here), probs.copy_(probs_here)
        packed.fill_(0xA5)
        graph.replay()
        torch.cuda.synchronize()
        plan, counts = ops.dispatch_plan(ids_here, experts, ranks, segment=segment)
        assert_same_plan((plan, counts), planned)
        expected = ops.quantize_pack(x_here, plan, ids_here, probs_here, num_experts=experts)
        assert_same_wire(expected, packed, plan, hidden, slots)
        _, want, want_probs = ops.unpack(expected, hidden, slots)
        assert torch.equal(want, local.cpu())
        assert torch.equal(want_probs, weights.cpu())


def test_what_cuda_cannot_do_is_refused() -> None:
    ids = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="at most 1024 experts; got 1025"):
        ops.dispatch_plan(ids, 1025, 1025)
    plan, _ = ops.dispatch_plan(ids, 1, 1)
    with pytest.raises(ValueError, match=r"on CUDA a row has at most \d+ bytes"):
        ops.quantize_pack(torch.zeros(2, 1 << 18, device="cuda"), plan)
