"""dispatch_plan, quantize_pack, unpack on CUDA alone: bad ids, rows of a wire, graphs, limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backends import assert_same, assert_same_plan, awkward, poison, routing
from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_are_dropped_and_counted(dtype: torch.dtype) -> None:
    ids = torch.randint(0, 12, (300, 4), dtype=dtype)
    bad = torch.rand(300, 4) < 0.2
    wrong = torch.where(torch.rand(300, 4) < 0.5, torch.iinfo(dtype).max, -2).to(dtype)
    expected = ops.dispatch_plan(torch.where(bad, -1, ids), 12, 3)
    given = torch.where(bad, wrong, ids)
    dropped = torch.tensor([1, 2, 3], device="cuda")
    plan, counts = ops.dispatch_plan(given.cuda(), 12, 3, dropped=dropped)
    assert int(plan.status[1]) == int(bad.sum())
    assert dropped.tolist() == [1, 2 + int(bad.sum()), 3]
    x, probs = awkward(300, 128), torch.rand(300, 4)
    packed = ops.quantize_pack(x.cuda(), plan, given.cuda(), probs.cuda(), num_experts=12)
    want = ops.quantize_pack(x, expected[0], torch.where(bad, -1, ids), probs, num_experts=12)
    rows = int(expected[0].row_offsets[-1])
    assert torch.equal(packed.cpu()[:rows], want[:rows])
    plan.status.zero_()
    assert_same_plan(expected[0], plan)
    assert torch.equal(expected[1], counts.cpu())


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

    def run() -> tuple[tuple[RoutingPlan, Tensor], Tensor, tuple[Tensor, Tensor]]:
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
        assert_same_plan(plan, planned[0])
        assert torch.equal(counts, planned[1].cpu())
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
