"""act_quantize and its backward: CUDA against the CPU backend, bit for bit."""

from __future__ import annotations

import pytest
import torch
from backends import ROUTINGS, assert_same, awkward, on_both, plan_of

from fp8moe_cutlass import RoutingPlan, ops

FORMATS = ("e4m3", "e5m2")


def inputs(plan, intermediate, dtype=torch.bfloat16):
    z = awkward(plan.rows, 2 * intermediate, dtype=dtype)
    dh = awkward(plan.rows, intermediate, dtype=dtype)
    return z, dh, torch.rand(plan.rows)


def check(op, *args, plan=None, **kwargs):
    if plan is not None:
        kwargs["plan"] = plan
    expected, (first, again) = on_both(op, *args, **kwargs)
    assert_same(expected, first, plan, op.__name__)
    assert_same(first, again, plan, f"{op.__name__}, second run")


@pytest.mark.parametrize("fp8_dtype", FORMATS)
@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "intermediate"), [(1, 16), (7, 128), (300, 256), (129, 720), (64, 2048)]
)
def test_without_plan(rows, intermediate, dtype, scale, fp8_dtype):
    z = awkward(rows, 2 * intermediate, dtype=dtype)
    dh = awkward(rows, intermediate, dtype=dtype)
    probs = torch.rand(rows)
    check(ops.act_quantize, z, scale=scale)
    check(ops.act_quantize, z, probs=probs, limit=1.5, scale=scale)
    options = {"scale": scale, "fp8_dtype": fp8_dtype}
    check(ops.act_quantize_backward, dh, z, **options)
    check(ops.act_quantize_backward, dh, z, probs=probs, limit=1.5, **options)


@pytest.mark.parametrize("columns", [None, "block", "column"])
@pytest.mark.parametrize("align", [1, 16, 128])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_with_plan(kind, align, columns):
    """Padding rows are written data 0, scale 0; columns hold each expert's tokens, tail zero."""
    _, plan = plan_of(kind, tokens=150, experts=5, slots=3, align=align)
    for intermediate in (128, 208, 384):
        z, dh, probs = inputs(plan, intermediate)
        check(ops.act_quantize, z, probs=probs, plan=plan)
        options = {"probs": probs, "columns": columns, "plan": plan}
        check(ops.act_quantize_backward, dh, z, **options)


@pytest.mark.parametrize("columns", [None, "block", "column"])
@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_scale_layouts_and_saved_z(fp8_dtype, columns):
    """Row and gemm layouts of h; the backward from the FP8 pre-activation the forward saved."""
    _, plan = plan_of("random", tokens=97, experts=4, slots=2, align=16)
    for intermediate in (256, 336):
        z, dh, probs = inputs(plan, intermediate)
        for layout in ("row", "gemm"):
            options = {"save_z": True, "scale_layout": layout}
            check(ops.act_quantize, z, probs=probs, plan=plan, **options)
        options = {"probs": probs, "columns": columns, "plan": plan, "fp8_dtype": fp8_dtype}
        check(ops.act_quantize_backward, dh, ops.dequantize(ops.quantize(z)), **options)


def test_every_bf16_sigmoid():
    """dprob of a one-hot dh is silu(gate): over all 65,536 gates the CPU's bits."""
    rows, intermediate = 65536, 16
    gates = torch.arange(rows, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    z = torch.ones(rows, 2 * intermediate, dtype=torch.bfloat16)
    z[:, 3] = gates
    dh = torch.zeros(rows, intermediate, dtype=torch.bfloat16)
    dh[:, 3] = 1.0
    check(ops.act_quantize_backward, dh, z, probs=torch.ones(rows))
    check(ops.act_quantize, z)


@pytest.mark.parametrize("limit", [None, 1.3])
@pytest.mark.parametrize("columns", [None, "block", "column"])
def test_every_gate_of_whole_tiles(columns, limit):
    """All 65,536 bf16 gates through the kernels of I % 128 == 0, which may look sigmoids up."""
    plan = RoutingPlan.from_counts(torch.tensor([300, 0, 212], dtype=torch.int32), capacity=512)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    z = torch.cat([every.view(512, 128), torch.ones(512, 128, dtype=torch.bfloat16)], dim=1)
    dh = torch.ones(512, 128, dtype=torch.bfloat16)
    check(ops.act_quantize, z, plan=plan, limit=limit)
    options = {"plan": plan, "limit": limit, "columns": columns}
    check(ops.act_quantize_backward, dh, z, probs=torch.rand(512), **options)


@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("intermediate", [128, 1152])
def test_many_tiles(intermediate, columns):
    """More tiles than teams of blocks, across experts. Backward, I 1152: SMs with a few tiles of
    blocks of tokens of nine, whose sums of dprob go on to the next."""
    counts = torch.tensor([2500, 0, 3100, 1, 1903], dtype=torch.int32)
    plan = RoutingPlan.from_counts(counts, capacity=7600, align=16)
    z, dh, probs = inputs(plan, intermediate)
    check(ops.act_quantize, z, probs=probs, plan=plan)
    check(ops.act_quantize_backward, dh, z, probs=probs, columns=columns, plan=plan)


@pytest.mark.parametrize("columns", ["block", "column"])
def test_shares_of_several_blocks_of_tokens(columns):
    """Backward: an SM's tiles are the end of a block of tokens, whole ones and the start of one."""
    counts = torch.tensor([4100, 0, 13000, 77, 15000], dtype=torch.int32)
    plan = RoutingPlan.from_counts(counts, capacity=32300, align=16)
    z, dh, probs = inputs(plan, 896)
    check(ops.act_quantize_backward, dh, z, probs=probs, columns=columns, plan=plan)


@pytest.mark.parametrize("limit", [None, 1.3])
@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("intermediate", [6144, 48256])
def test_large_intermediate(intermediate, columns, limit):
    """Backward: sums of dprob apart, and sums that go through many SMs."""
    counts = torch.tensor([3, 0, 17], dtype=torch.int32)
    plan = RoutingPlan.from_counts(counts, capacity=32, align=1)
    z, dh, probs = inputs(plan, intermediate)
    options = {"probs": probs, "columns": columns, "plan": plan, "limit": limit}
    check(ops.act_quantize_backward, dh, z, **options)


@pytest.mark.parametrize("columns", ["block", "column"])
def test_dprobs_on_several_streams_and_in_graphs_at_once(columns):
    """Every launch that runs hands on its own sums."""
    counts = torch.tensor([900, 0, 3500, 1], dtype=torch.int32, device="cuda")
    plan = RoutingPlan.from_counts(counts, capacity=4401)
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
        plan = RoutingPlan.from_counts(
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


def test_infinities_and_nans():
    z = awkward(200, 512)
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 3e38, -3e38, 1e-40])
    z[torch.rand(z.shape) < 0.01] = values[0]
    for i, value in enumerate(values):
        z[10 + i, :: 7 + i] = value.to(torch.bfloat16)
    dh = awkward(200, 256)
    dh[5, 5] = float("nan")
    check(ops.act_quantize, z)
    check(ops.act_quantize_backward, dh, z, probs=torch.rand(200))


@pytest.mark.parametrize("columns", [None, "block"])
def test_empty(columns):
    for tokens in (0, 3):
        idx = torch.full((tokens, 2), -1)
        plan = ops.route(4, topk_idx=idx)
        z, dh, probs = inputs(plan, 128)
        check(ops.act_quantize, z, probs=probs, plan=plan)
        check(ops.act_quantize_backward, dh, z, probs=probs, columns=columns, plan=plan)


@pytest.mark.slow
def test_more_than_two_billion_elements(device):
    """64-bit offsets: the last rows of z [R, 2I] with R 2I > 2^31 equal a small call's."""
    rows, intermediate = 262_400, 4096
    z = torch.zeros(rows, 2 * intermediate, dtype=torch.bfloat16, device=device)
    dh = torch.zeros(rows, intermediate, dtype=torch.bfloat16, device=device)
    z[-256:] = torch.randn(256, 2 * intermediate, device=device)
    dh[-256:] = torch.randn(256, intermediate, device=device)
    h = ops.act_quantize(z, scale_layout="row")
    small = ops.act_quantize(z[-256:].clone(), scale_layout="row")
    assert torch.equal(h.data[-256:].view(torch.uint8), small.data.view(torch.uint8))
    assert torch.equal(h.scale_inv[-256:], small.scale_inv)
    dz, *_ = ops.act_quantize_backward(dh, z)
    small, *_ = ops.act_quantize_backward(dh[-256:].clone(), z[-256:].clone())
    assert torch.equal(dz.data[-256:].view(torch.uint8), small.data.view(torch.uint8))
