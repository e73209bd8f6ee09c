"""Operators on CUDA alone: graphs, streams, workspaces, and bad values, which are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backends import assert_same, assert_same_plan, awkward, on_both, plan_of, poison
from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops
from fp8moe_cutlass.routing import STATUS_WORDS
from test_act_quantize import inputs
from test_transpose_fp8 import any_rows


class Layer:
    """route -> permute_pad -> unpermute_unpad and its backward, over buffers that stay."""

    def __init__(self, tokens: int, experts: int, slots: int, width: int, align: int) -> None:
        self.experts, self.align = experts, align
        self.idx = torch.zeros(tokens, slots, dtype=torch.int32, device="cuda")
        self.x = torch.randn(tokens, width, device="cuda").bfloat16()
        self.probs = torch.rand(tokens, slots, device="cuda")

    def __call__(self) -> tuple[RoutingPlan, dict[str, Tensor | Fp8Tensor]]:
        plan = ops.route(self.experts, topk_idx=self.idx, align=self.align)
        q, _ = ops.permute_pad(ops.quantize(self.x), plan, self.probs)
        y, probs = ops.permute_pad(self.x, plan, self.probs)
        out = ops.unpermute_unpad(y, plan, self.probs)
        dy, dprobs = ops.unpermute_unpad_backward(self.x, plan, y, self.probs)
        dx, gathered = ops.permute_pad_backward(dy, plan, probs)
        rows = {"q": q, "y": y, "permuted probs": probs, "dy": dy}
        tokens = {"out": out, "dprobs": dprobs, "dx": dx, "gathered": gathered}
        return plan, rows | tokens


def assert_same_results(expected: tuple, got: tuple) -> None:
    """Over defined content alone: the rest of these buffers may never have been written."""
    (plan, results), (got_plan, got_results) = expected, got
    rows = int(plan.row_offsets[-1])
    assert torch.equal(plan.row_of, got_plan.row_of)
    assert rows == int(got_plan.row_offsets[-1])
    for name, value in results.items():
        assert_same(cut(value, plan, rows), cut(got_results[name], plan, rows), None, name)


def cut(value: Tensor | Fp8Tensor, plan: RoutingPlan, rows: int) -> Any:
    """Rows of the plan below its last, on the CPU; the scales here are in gemm layout."""
    if isinstance(value, Fp8Tensor):
        return [value.data.view(torch.uint8)[:rows].cpu(), value.scale_inv[:, :rows].cpu()]
    return (value[:rows] if value.shape[0] == plan.rows else value).cpu()


def test_one_graph_replays_under_other_routings() -> None:
    layer = Layer(tokens=200, experts=16, slots=4, width=512, align=16)
    layer()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    routings = {
        "random": torch.randint(0, 16, (200, 4)),
        "one expert": torch.full((200, 4), 3),
        "all dropped": torch.full((200, 4), -1),
        "some dropped": torch.randint(-1, 16, (200, 4)),
        "half the experts": torch.randint(0, 8, (200, 4)) * 2,
    }
    for idx in routings.values():
        layer.idx.copy_(idx)
        poison([captured[0].buffer, *captured[1].values()])
        graph.replay()
        torch.cuda.synchronize()
        assert_same_results(layer(), captured)


def test_on_a_side_stream() -> None:
    layer = Layer(tokens=300, experts=8, slots=2, width=1024, align=1)
    layer.idx.copy_(torch.randint(0, 8, (300, 2)))
    expected = layer()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # what ran on another stream would be read too early
        layer.x.neg_()
        layer.x.neg_()
        got = layer()
    stream.synchronize()
    assert_same_results(expected, got)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_the_other_device() -> None:
    """Tensors decide: cuda:1 while cuda:0 is current, and it stays current."""
    _, plan = plan_of("random", tokens=64, experts=4, slots=2, align=16)
    x, probs = awkward(64, 512), torch.rand(64, 2)
    expected, first, _ = on_both("permute_pad", x, plan, probs, device="cuda:1")
    assert_same(expected, first, plan, "permute_pad")
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("columns", ["block", "column"])
def test_dprobs_on_several_streams_and_in_graphs_at_once(columns):
    """Every launch that runs hands on its own sums."""
    counts = torch.tensor([900, 0, 3500, 1], dtype=torch.int32, device="cuda")
    plan = ops.plan_from_counts(counts, capacity=4401)
    z, dh, probs = (t.cuda() for t in inputs(plan, 1664))

    def dprobs_of():
        return ops.act_quantize_backward(dh, z, probs=probs, columns=columns, plan=plan)[-1]

    expected = dprobs_of()
    *streams, capturing = (torch.cuda.Stream() for _ in range(4))
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    outs = []
    for graph in graphs:
        with torch.cuda.graph(graph, stream=capturing):
            outs.append(dprobs_of())
    runs = [graphs[0].replay, graphs[1].replay, dprobs_of]
    torch.cuda.synchronize()
    for _ in range(5):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        eager = []
        for _ in range(4):
            for stream, run in zip(streams, runs, strict=True):
                with torch.cuda.stream(stream):
                    eager.append(run())
        torch.cuda.synchronize()
        for out in [*outs, *(e for e in eager if e is not None)]:
            assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("columns", ["block", "column"])
def test_one_workspace_for_calls_that_follow_one_another(columns):
    """It is zero after each, whatever tokens there are."""
    workspace = ops.zero_workspace(torch.empty(0, device="cuda"))
    for counts, intermediate in (
        ([900, 0, 1500, 1], 1024),
        ([3, 0, 17], 6144),  # sums that go through many SMs
        ([0, 0, 0], 1024),
        ([4100, 0, 13000], 128),
        ([40, 7, 0], 144),  # not in one pass
    ):
        plan = ops.plan_from_counts(
            torch.tensor(counts, dtype=torch.int32), capacity=sum(counts) + 5
        )
        z, dh, probs = (t.cuda() for t in inputs(plan, intermediate))
        planned = RoutingPlan(plan.buffer.cuda(), *plan.sizes)
        options = {"probs": probs, "columns": columns}
        want = ops.act_quantize_backward(dh, z, planned, **options)
        for _ in range(2):
            got = ops.act_quantize_backward(dh, z, planned, **options, workspace=workspace)
            assert not workspace.any()
            assert_same(want, got, plan, "act_quantize_backward")


@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("c", [16, 272, 384, 512, 2880])
def test_scales_by_row_lie_anywhere(c, columns, device):
    """Of a matrix, at multiples of 16 bytes or not, bad scales all around."""
    _, plan = plan_of("ragged", tokens=200, experts=6, slots=2, align=16)
    plan = plan.to(device)
    t = any_rows(200, c, "e4m3", "row", spread=4).to(device)
    want = ops.permute_transpose_fp8(t, plan, columns=columns)
    tiles = t.scale_inv.shape[1]
    for first, width in ((0, tiles + 1), (1, tiles + 1), (3, tiles + 5), (4, tiles + 4)):
        around = torch.full((200, width), torch.nan, device=device)
        around[:, first : first + tiles] = t.scale_inv
        apart = Fp8Tensor(t.data, around[:, first : first + tiles])
        got = ops.permute_transpose_fp8(apart, plan, columns=columns)
        assert_same(want, got, plan, f"scales from {first} of {width}")
    assert plan.status.tolist()[2] == 0


@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("layout", ["row", "gemm"])
def test_bad_scales_are_counted_and_poison_their_tiles(layout, columns, device):
    """Three bad scales of rows that carry tokens; two of padding rows do not count."""
    plan = ops.plan_from_counts(torch.tensor([130, 10], device=device), capacity=140, align=16)
    t = any_rows(plan.rows, 256, "e4m3", "gemm", spread=2).to(device)
    t.scale_inv[0, 3] = 3.0
    t.scale_inv[1, 129] = torch.nan
    t.scale_inv[0, 145] = torch.inf  # token 1 of expert 1, whose rows start at 144
    t.scale_inv[1, 130] = -1.0
    t.scale_inv[0, 155] = torch.inf
    got = ops.transpose_fp8(t.to_layout(layout), plan, columns=columns)
    assert plan.status.tolist()[2] == 3
    with pytest.raises(ValueError, match="not positive powers of two"):
        plan.check()
    infinite = got.scale_inv.isinf()
    if columns == "block":
        assert infinite.nonzero().tolist() == [[0, 0], [0, 2], [1, 1]]
    else:
        tiles = infinite.view(-1, 2, 128)[:3]
        assert tiles.any(-1).tolist() == [[True, False], [False, True], [True, False]]
        assert tiles.all(-1).tolist() == tiles.any(-1).tolist()


def test_nothing_to_do(device):
    for counts, capacity in (([0, 0], 0), ([0, 0], 256)):
        plan = ops.plan_from_counts(torch.tensor(counts, device=device), capacity=capacity)
        q = ops.quantize(torch.randn(plan.rows, 128, device=device))
        assert ops.transpose_fp8(q, plan).shape == (128, plan.columns)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_are_dropped_and_counted(dtype: torch.dtype) -> None:
    """The CPU raises; CUDA routes as if they were -1 and says how many there were."""
    idx = torch.randint(0, 10, (300, 4), dtype=dtype)
    bad = torch.rand(300, 4) < 0.2
    expected = ops.route(10, topk_idx=torch.where(bad, -1, idx))
    wrong = torch.where(torch.rand(300, 4) < 0.5, torch.iinfo(dtype).max, -2).to(dtype)
    got = ops.route(10, topk_idx=torch.where(bad, wrong, idx).cuda())
    assert int(got.status[1]) == int(bad.sum())
    got.status.zero_()
    assert_same_plan(expected, got)
    with pytest.raises(ValueError, match=r"\[route\] topk_idx must lie"):
        ops.route(10, topk_idx=torch.where(bad, wrong, idx))


def test_negative_counts_are_none() -> None:
    got = ops.plan_from_counts(torch.tensor([3, -5, 2], device="cuda"), capacity=8, align=16)
    assert got.tokens_per_expert.tolist() == [3, 0, 2]
    assert got.status.tolist() == [0, 1] + [0] * (STATUS_WORDS - 2)


def test_too_many_experts_is_an_error() -> None:
    idx = torch.zeros(4, 1, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"at most 1024 experts; got 1025"):
        ops.route(1025, topk_idx=idx)
