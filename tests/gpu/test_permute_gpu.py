"""permute_pad, unpermute_unpad and their backwards: CUDA against the CPU backend, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from backends import ROUTINGS, assert_same, awkward, on_both, plan_of, poison
from torch import Tensor

from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = ["e4m3", "e5m2"]


def check(op, plan: RoutingPlan, *args, **kwargs) -> None:
    """Both devices, two CUDA runs, bits over defined content."""
    x, *rest = args
    expected, (first, again) = on_both(op, x, plan, *rest, **kwargs)
    assert_same(expected, first, plan, op.__name__)
    assert_same(first, again, plan, f"{op.__name__}, second run")


def check_all(plan: RoutingPlan, width: int, dtype: torch.dtype) -> None:
    x, y = awkward(plan.tokens, width, dtype=dtype), awkward(plan.rows, width, dtype=dtype)
    probs, row_grad = torch.rand(plan.tokens, plan.slots), torch.randn(plan.rows)
    check(ops.permute_pad, plan, x)
    check(ops.permute_pad, plan, x, probs)
    check(ops.permute_pad_backward, plan, y)
    check(ops.permute_pad_backward, plan, y, row_grad)
    check(ops.unpermute_unpad, plan, y)
    check(ops.unpermute_unpad, plan, y, probs)
    check(ops.unpermute_unpad_backward, plan, x)
    check(ops.unpermute_unpad_backward, plan, x, y, probs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("align", [1, 16, 32, 128])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_routings(kind: str, align: int, dtype: torch.dtype) -> None:
    _, plan = plan_of(kind, tokens=150, experts=7, slots=3, align=align)
    for width in (16, 720, 1024):
        check_all(plan, width, dtype)


@pytest.mark.parametrize("out_layout", ["row", "gemm"])
@pytest.mark.parametrize("in_layout", ["row", "gemm"])
@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_fp8_with_scales(fp8_dtype: str, in_layout: str, out_layout: str) -> None:
    """More than 64 scale tiles, a partial last tile, rows off the tile of 32."""
    for kind, align in (("random", 1), ("dropped", 16), ("empty experts", 128)):
        _, plan = plan_of(kind, tokens=333, experts=6, slots=2, align=align)
        for width in (16, 2880, 8448):
            x = awkward(plan.tokens, width)
            q = ops.quantize(x, fp8_dtype=fp8_dtype, scale_layout=in_layout)
            check(ops.permute_pad, plan, q, scale_layout=out_layout)
            probs = torch.rand(plan.tokens, plan.slots)
            check(ops.permute_pad, plan, q, probs, scale_layout=out_layout)
            probs[torch.rand(probs.shape) < 0.5] = 0.0
            check(ops.permute_pad, plan, q, probs, scale_layout=out_layout, zero_unweighted=True)
            check(ops.permute_pad, plan, x, probs, zero_unweighted=True)


def test_random_cases() -> None:
    """Two hundred plans and widths, masks and capacities among them."""
    draw = random.Random(11)
    for i in range(200):
        experts, tokens, slots = draw.randrange(1, 90), draw.randrange(0, 120), draw.randrange(1, 9)
        align = draw.choice((1, 16, 32, 128))
        if i % 3 == 0:
            mask = torch.rand(tokens, experts) < draw.random()
            capacity = draw.randrange(0, int(mask.sum()) + 20)
            plan = ops.route(experts, routing_map=mask, capacity=capacity, align=align)
        else:
            idx = torch.randint(-1, experts, (tokens, slots))
            plan = ops.route(experts, topk_idx=idx, align=align)
        width = 16 * draw.randrange(1, 40)
        check_all(plan, width, draw.choice(DTYPES))
        q = ops.quantize(awkward(tokens, width), fp8_dtype=draw.choice(FORMATS))
        check(ops.permute_pad, plan, q, scale_layout=draw.choice(("row", "gemm")))


@pytest.mark.parametrize("align", [1, 128])
def test_model_sizes(align: int) -> None:
    _, plan = plan_of("random", tokens=512, experts=256, slots=8, align=align)
    check_all(plan, 7168, torch.bfloat16)
    check(ops.permute_pad, plan, ops.quantize(awkward(512, 7168)), torch.rand(512, 8))


@pytest.mark.parametrize("align", [1, 16, 128])
def test_blocks_of_many_warps(align: int) -> None:
    """FP8 rows that all fit in the shared memory of 132 SMs at once, 32 a block; align 128 pads too
    much for that."""
    _, plan = plan_of("random", tokens=4090, experts=32, slots=2, align=align)
    q = ops.quantize(awkward(4090, 7168))
    check(ops.permute_pad, plan, q, torch.rand(4090, 2))
    check(ops.permute_pad, plan, q, scale_layout="row")


def test_rows_in_pieces() -> None:
    """Rows of more than 32 KiB, and their padding, move a piece at a time."""
    for align in (1, 16):
        _, plan = plan_of("dropped", tokens=37, experts=3, slots=2, align=align)
        for width in (8208, 20000):
            check(ops.permute_pad, plan, awkward(37, width, dtype=torch.float32), torch.rand(37, 2))
            q = ops.quantize(awkward(37, 4 * width))
            check(ops.permute_pad, plan, q, scale_layout="row")


def test_infinities_and_nans() -> None:
    _, plan = plan_of("random", tokens=100, experts=4, slots=2, align=16)
    for dtype in DTYPES:
        x, y = awkward(100, 256, dtype=dtype), awkward(plan.rows, 256, dtype=dtype)
        for t in (x, y):
            at = torch.rand(t.shape)
            t[at < 0.01] = float("inf")
            t[at > 0.99] = float("nan")
        probs = torch.rand(100, 2)
        check(ops.unpermute_unpad, plan, y, probs)
        check(ops.unpermute_unpad_backward, plan, x, y, probs)
        check(ops.permute_pad_backward, plan, y)


# ---- graphs, streams, devices -------------------------------------------------------------------


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
    expected, (first, _) = on_both(ops.permute_pad, x, plan, probs, device="cuda:1")
    assert_same(expected, first, plan, "permute_pad")
    assert torch.cuda.current_device() == 0


@pytest.mark.slow
def test_more_than_two_billion_elements() -> None:
    """64-bit offsets: x, and the rows of y, past 2^31 elements move as the first ones do."""
    width, tokens = 8192, 262_400
    idx = torch.zeros(tokens, 1, dtype=torch.int32, device="cuda")
    plan = ops.route(1, topk_idx=idx)
    x = torch.zeros(tokens, width, dtype=torch.float8_e4m3fn, device="cuda")
    x[-300:] = torch.randn(300, width, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(tokens, width // 128, device="cuda")
    y, _ = ops.permute_pad(Fp8Tensor(x, scale), plan)
    assert torch.equal(y.data.view(torch.int64), x.view(torch.int64))
    assert torch.equal(y.scale_inv[:, :tokens].T, scale)
    del x, y

    wide = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    wide[-300:] = torch.randn(300, width, device="cuda").bfloat16()
    probs = torch.full((tokens, 1), 2.0, device="cuda")
    out = ops.unpermute_unpad(wide, plan, probs)
    assert torch.equal(out[-300:], wide[-300:] * 2)
    del out
    dy, dprobs = ops.unpermute_unpad_backward(wide, plan, wide, probs)
    assert torch.equal(dy[-300:], wide[-300:] * 2)
    norm = wide[-300:].double().square().sum(1)
    torch.testing.assert_close(dprobs[-300:, 0].double(), norm, rtol=1e-5, atol=0)
