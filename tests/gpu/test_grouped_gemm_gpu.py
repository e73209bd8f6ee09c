"""grouped_gemm and grouped_gemm_wgrad on CUDA against float64, by the policy of tolerance.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import _C, Fp8Tensor, RoutingPlan, ops
from test_grouped_gemm import KINDS, noise, segments
from tolerance import C_CUDA, codes, gemm_error, gemm_truth, scales

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
FORMATS = pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])  # of the left operand
COUNTS = {
    "ragged": [5, 0, 130, 1, 64, 65, 257],
    "one expert takes all": [0, 0, 700, 0],
    "one expert": [300],
    "no tokens": [0, 0],
    "many": [e % 5 * 33 for e in range(70)],
    "long": [900, 0, 130, 257],
    "many rows each": [1100, 0, 700],
    "edges of tiles": [64, 65, 192, 193, 449, 320, 0, 1, 780, 1100],
}
TILES = {(128, 128), (128, 192), (192, 128)}
COUNTED = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())


def plan_of(counts: list[int], spare: int = 0, align: int = 1) -> RoutingPlan:
    counted = torch.tensor(counts, dtype=torch.int32, device="cuda")
    return ops.plan_from_counts(counted, capacity=sum(counts) + spare, align=align)


def on_gpu(q: Fp8Tensor) -> Fp8Tensor:
    return Fp8Tensor(q.data.cuda(), q.scale_inv.cuda(), q.scale_layout)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def sms_here() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def candidates(gemm: str, plan: RoutingPlan, n: int, k: int, *how: Any) -> list[dict[str, Any]]:
    """Every way to run the product of weights [experts, n, k], in one launch and in three."""
    sizes = plan.rows, n, k, plan.experts, sms_here()
    found: list[dict[str, Any]] = _C.grouped_gemm_candidates(gemm, *sizes, *how)
    return [{**way, "launches": launches} for way in found for launches in (1, 3)]


@contextmanager
def forced(candidate: dict[str, Any]) -> Iterator[None]:
    _C.force_grouped_gemm(candidate)
    try:
        yield
    finally:
        _C.force_grouped_gemm(None)


def rows_of(t: Fp8Tensor, rows: slice) -> Fp8Tensor:
    """Some rows of operand A, by themselves."""
    scale = t.scale_inv[:, rows]
    scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return Fp8Tensor(t.data[rows], scale, t.scale_layout)


def fprop_error(a: Fp8Tensor, w: Fp8Tensor, plan: RoutingPlan, d: Tensor) -> float:
    """The largest c an expert's rows need; the rows past the last one must still be poison."""
    left, left_scale, right, right_scale = codes(a), scales(a), codes(w), scales(w)
    offsets = plan.row_offsets.tolist()
    worst = 0.0
    for e, (start, stop) in enumerate(pairwise(offsets)):
        truth = gemm_truth(left[start:stop], left_scale[start:stop], right[e], right_scale[e])
        worst = max(worst, gemm_error(d[start:stop], truth))
    assert d[offsets[-1] :].isnan().all()
    return worst


def wgrad_error(dy: Fp8Tensor, x: Fp8Tensor, plan: RoutingPlan, dw: Tensor) -> float:
    offsets = plan.col_offsets.tolist()
    worst = 0.0
    for e, (start, stop) in enumerate(pairwise(offsets)):
        block = slice(start // 128, stop // 128)
        sides = [(codes(t)[:, start:stop], scales(t)[:, block]) for t in (dy, x)]
        worst = max(worst, gemm_error(dw[e], gemm_truth(*sides[0], *sides[1])))
    return worst


def moved_by_4_bytes(t: Tensor) -> Tensor:
    flat = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
    return flat.view(t.shape).copy_(t)


def test_scales_that_start_between_multiples_of_16_bytes() -> None:
    """Copied, as other inputs are."""
    plan = plan_of([5, 130])
    w = on_gpu(noise(2, 144, 272, layout="block"))
    columns = [on_gpu(noise(c, plan.columns, layout="gemm")) for c in (144, 272)]
    a = on_gpu(noise(plan.rows, 272, layout="gemm"))
    moved, *moved_columns = (
        Fp8Tensor(t.data, moved_by_4_bytes(t.scale_inv), t.scale_layout) for t in (a, *columns)
    )
    assert moved.scale_inv.data_ptr() % 16
    assert same_bits(ops.grouped_gemm(moved, w, plan), ops.grouped_gemm(a, w, plan))
    assert same_bits(
        ops.grouped_gemm_wgrad(*moved_columns, plan), ops.grouped_gemm_wgrad(*columns, plan)
    )


@DTYPES
@COUNTED
@pytest.mark.parametrize(
    ("n", "k"), [(144, 272), (16, 16), (320, 272), (400, 128), (448, 272), (832, 272), (1040, 656)]
)
def test_fprop(counts: list[int], n: int, k: int, dtype: torch.dtype) -> None:
    plan = plan_of(counts, spare=37)
    a, w = (
        on_gpu(q)
        for q in (noise(plan.rows, k, layout="gemm"), noise(len(counts), n, k, layout="block"))
    )
    first = ops.grouped_gemm(a, w, plan, out=poisoned(plan.rows, n, dtype=dtype), out_dtype=dtype)
    again = ops.grouped_gemm(a, w, plan, out=poisoned(plan.rows, n, dtype=dtype), out_dtype=dtype)
    assert same_bits(first, again)
    assert fprop_error(a, w, plan, first) <= C_CUDA


@FORMATS
@pytest.mark.parametrize("kind", KINDS)
def test_fprop_formats_and_adversarial_operands(kind: str, fp8: str) -> None:
    plan = plan_of([100, 0, 30])
    a = on_gpu(KINDS[kind](plan.rows, 2880, layout="gemm", fp8=fp8))
    w = on_gpu(KINDS[kind](3, 208, 2880, layout="block"))
    d = ops.grouped_gemm(
        a, w, plan, out_dtype="float32", out=poisoned(130, 208, dtype=torch.float32)
    )
    assert fprop_error(a, w, plan, d) <= C_CUDA


@pytest.mark.parametrize("n", [144, 128, 1216])
def test_fprop_over_several_runs_of_scales(n: int) -> None:
    """The scales of blocks come 32 K-blocks at a time, eight such runs in shared memory: 301 are
    nine and a part."""
    k = 300 * 128 + 64
    plan = plan_of([800, 0, 30])
    a = on_gpu(noise(plan.rows, k, layout="gemm"))
    w = on_gpu(noise(3, n, k, layout="block"))
    for candidate in candidates("fprop", plan, n, k):
        with forced(candidate):
            d = ops.grouped_gemm(a, w, plan, out=poisoned(plan.rows, n, dtype=torch.bfloat16))
        assert fprop_error(a, w, plan, d) <= C_CUDA


@DTYPES
@pytest.mark.parametrize("k", [16, 272, 656, 33 * 128 + 16])
@pytest.mark.parametrize(
    ("counts", "n"),
    [
        ([64], 1536),
        ([0, 1, 0, 70], 1040),
        ([900, 0, 130, 257, 100], 272),
        ([2412, 0, 193], 1600),  # more than a wave
        (COUNTS["edges of tiles"], 1216),
        ([e % 7 * 100 + e for e in range(64)], 208),
    ],
)
def test_a_row_has_the_same_bits_by_every_candidate(
    counts: list[int], n: int, k: int, dtype: torch.dtype
) -> None:
    """And so has it whatever rows are computed beside it."""
    plan = plan_of(counts, spare=37)
    a = on_gpu(noise(plan.rows, k, layout="gemm"))
    w = on_gpu(noise(len(counts), n, k, layout="block"))
    word = str(dtype).removeprefix("torch.")
    ways = candidates("fprop", plan, n, k, word)
    assert {way["tile"] for way in ways} >= ({(128, 128)} if word == "float32" else TILES)
    first: Tensor | None = None
    for way in ways:
        out = poisoned(plan.rows, n, dtype=dtype)
        with forced(way):
            d = ops.grouped_gemm(a, w, plan, out=out, out_dtype=dtype)
        if first is None:
            first = d
            assert fprop_error(a, w, plan, d) <= C_CUDA
        assert same_bits(first, d), way
    assert first is not None
    largest = max(range(len(counts)), key=lambda e: counts[e])
    start = sum(counts[:largest])
    some = slice(start, start + counts[largest] // 2 + 1)  # of the expert, and alone
    of_e = tuple(t[largest : largest + 1] for t in (w.data, w.scale_inv))
    alone = plan_of([some.stop - some.start])
    for way in candidates("fprop", alone, n, k, word):
        with forced(way):
            d = ops.grouped_gemm(
                rows_of(a, some), Fp8Tensor(*of_e, w.scale_layout), alone, out_dtype=dtype
            )
        assert same_bits(first[some], d), way


@DTYPES
@pytest.mark.parametrize("layout", ["block", "gemm"])
@pytest.mark.parametrize(("n", "k"), [(144, 272), (272, 448), (832, 208)])
def test_wgrad_has_the_same_bits_by_every_candidate(
    n: int, k: int, layout: str, dtype: torch.dtype
) -> None:
    plan = plan_of([300, 0, 0, 1, 0, 130, *[40] * 8, 0, 640], spare=37)
    dy = segments(on_gpu(noise(n, plan.columns, layout=layout)), plan)
    x = segments(on_gpu(noise(k, plan.columns, layout=layout)), plan)
    word, columns = str(dtype).removeprefix("torch."), "block" if layout == "block" else "column"
    dw = ops.grouped_gemm_wgrad(dy, x, plan, out_dtype=dtype)
    assert wgrad_error(dy, x, plan, dw) <= C_CUDA
    before = torch.randn(dw.shape, device="cuda").to(dtype)
    for add in (False, True):
        for way in candidates("wgrad", plan, n, k, word, add, columns):
            out = before.clone() if add else poisoned(*dw.shape, dtype=dtype)
            with forced(way):
                ops.grouped_gemm_wgrad(dy, x, plan, out=out, accumulate=add)
            assert torch.equal(out, before + dw if add else dw), way


def test_an_illegal_candidate_is_refused() -> None:
    plan = plan_of([5])
    a, w = on_gpu(noise(5, 272, layout="gemm")), on_gpu(noise(1, 48, 272, layout="block"))
    wide = {"tile": (128, 192), "raster_group": 16, "dynamic": False, "load_d": False}
    wide["launches"] = 1
    with forced(wide), pytest.raises(ValueError, match="candidate"):
        ops.grouped_gemm(a, w, plan, out_dtype="float32")
    for odd in ({"tile": (64, 64)}, {"raster_group": 0}, {"dynamic": True}, {"launches": 0}):
        with forced({**wide, **odd}), pytest.raises(ValueError, match="candidate"):
            ops.grouped_gemm(a, w, plan)


@pytest.mark.parametrize("align", [16, 128])
def test_fprop_writes_padding_rows(align: int) -> None:
    plan = plan_of([5, 0, 33], spare=60, align=align)
    x = ops.quantize(torch.randn(plan.tokens, 272, device="cuda"))
    a = ops.permute_pad(x, plan)[0].to_layout("gemm")
    w = on_gpu(noise(3, 144, 272, layout="block"))
    d = ops.grouped_gemm(a, w, plan, out=poisoned(plan.rows, 144, dtype=torch.bfloat16))
    assert fprop_error(a, w, plan, d) <= C_CUDA
    assert not d[5 : int(plan.row_offsets[1])].any()


@DTYPES
@COUNTED
@pytest.mark.parametrize("layout", ["block", "gemm"])
def test_wgrad(counts: list[int], layout: str, dtype: torch.dtype) -> None:
    plan = plan_of(counts, spare=37)
    for n, k in ((144, 272), (16, 16), (144, 320), (272, 400), (272, 448)):
        dy = segments(on_gpu(noise(n, plan.columns, layout=layout, fp8="e5m2")), plan)
        x = segments(on_gpu(noise(k, plan.columns, layout=layout)), plan)
        shape = (len(counts), n, k)
        held = poisoned(len(counts) + 1, n, k, dtype=dtype)
        dw = ops.grouped_gemm_wgrad(dy, x, plan, out=held[:-1])
        assert held[-1].isnan().all()
        again = ops.grouped_gemm_wgrad(dy, x, plan, out=poisoned(*shape, dtype=dtype))
        assert same_bits(dw, again)
        assert wgrad_error(dy, x, plan, dw) <= C_CUDA
        assert not dw[plan.tokens_per_expert == 0].any()
        # Accumulation adds the rounded product, and rounds once more.
        before = torch.randn(shape, device="cuda").to(dtype)
        onto = ops.grouped_gemm_wgrad(dy, x, plan, out=before.clone(), accumulate=True)
        assert torch.equal(onto, before + dw)


@pytest.mark.parametrize("layout", ["block", "gemm"])
def test_wgrad_over_many_tiles_without_tokens(layout: str) -> None:
    """Five and more of them in a row for a CTA: none of its roles waits for what another holds."""
    plan = plan_of([300] + [0] * 16 + [300])
    dy = segments(on_gpu(noise(1024, plan.columns, layout=layout, fp8="e5m2")), plan)
    x = segments(on_gpu(noise(1024, plan.columns, layout=layout)), plan)
    dw = ops.grouped_gemm_wgrad(dy, x, plan, out=poisoned(18, 1024, 1024, dtype=torch.bfloat16))
    assert wgrad_error(dy, x, plan, dw) <= C_CUDA
    assert not dw[1:17].any()


@pytest.mark.parametrize("layout", ["block", "gemm"])
@pytest.mark.parametrize("k", [224, 320, 400])
def test_wgrad_adds_subnormals_in_either_way(k: int, layout: str) -> None:
    """By reductions, or by loading what D holds: the same sum."""
    plan = plan_of([128 * 14])
    dy = segments(on_gpu(noise(208, plan.columns, layout=layout, fp8="e5m2")), plan)
    x = segments(on_gpu(noise(k, plan.columns, layout=layout)), plan)
    dy.data.view(torch.uint8)[:16] = 0
    dw = ops.grouped_gemm_wgrad(dy, x, plan, out_dtype="float32")
    before = torch.randn_like(dw)
    before[0, :16] = 1e-40
    columns = "block" if layout == "block" else "column"
    ways = candidates("wgrad", plan, 208, k, "float32", True, columns)
    assert {way["load_d"] for way in ways} == {False, True}
    for way in ways:
        with forced(way):
            onto = ops.grouped_gemm_wgrad(dy, x, plan, out=before.clone(), accumulate=True)
        assert torch.equal(onto, before + dw), way


FETCHED = [300, 0, 0, 1, 0, 130, *[40] * 8, 0, 640]


@pytest.mark.parametrize("layout", ["block", "gemm"])
@pytest.mark.parametrize(
    ("counts", "size"),
    [(FETCHED, 832), (FETCHED, 448), ([128 * 14], 2080), ([1000, 128 * 9], 2080)],
)
def test_wgrad_adds_f32_over_many_tiles(counts: list[int], size: int, layout: str) -> None:
    """What D holds of a CTA's next tile comes while the last tile leaves, whether tiles are taken
    or, with more tokens (here: of one expert), dealt."""
    plan = plan_of(counts)
    dy = segments(on_gpu(noise(size, plan.columns, layout=layout, fp8="e5m2")), plan)
    x = segments(on_gpu(noise(size, plan.columns, layout=layout)), plan)
    dw = ops.grouped_gemm_wgrad(dy, x, plan, out_dtype="float32")
    before = torch.randn_like(dw)
    onto = ops.grouped_gemm_wgrad(dy, x, plan, out=before.clone(), accumulate=True)
    assert torch.equal(onto, before + dw)


@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("layout", ["block", "gemm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_wgrad_of_short_tiles_on_several_streams_and_in_graphs_at_once(
    dtype: torch.dtype, layout: str, accumulate: bool
) -> None:
    """CTAs take short tiles as they come free; every launch that runs counts its own. One expert's
    tiles take so long that the next launches take theirs meanwhile."""
    plan = plan_of([128 * 200] + [0] * 60 + [1, 300, 200])
    dy = segments(on_gpu(noise(1040, plan.columns, layout=layout, fp8="e5m2")), plan)
    x = segments(on_gpu(noise(1040, plan.columns, layout=layout)), plan)
    shape = (64, 1040, 1040)
    before = torch.randn(*shape, device="cuda").to(dtype)

    def launch(out: torch.Tensor) -> None:
        out.copy_(before) if accumulate else out.fill_(float("nan"))
        ops.grouped_gemm_wgrad(dy, x, plan, out=out, accumulate=accumulate)

    written = ops.grouped_gemm_wgrad(dy, x, plan, out_dtype=dtype)
    assert wgrad_error(dy, x, plan, written) <= C_CUDA
    expected = before + written if accumulate else written

    outs = [poisoned(*shape, dtype=dtype) for _ in range(5)]
    *streams, capturing = (torch.cuda.Stream() for _ in range(5))
    forked, plain = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forked, stream=capturing):  # two branches that may run at once
        streams[0].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            launch(outs[0])
        launch(outs[1])
        torch.cuda.current_stream().wait_stream(streams[0])
    with torch.cuda.graph(plain):
        launch(outs[2])
    runs = [forked.replay, plain.replay, lambda: launch(outs[3]), lambda: launch(outs[4])]
    torch.cuda.synchronize()
    for _ in range(5):
        for _ in range(4):
            for stream, run in zip(streams, runs, strict=True):
                with torch.cuda.stream(stream):
                    run()
        torch.cuda.synchronize()
        assert all(same_bits(out, expected) for out in outs)


@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("layout", ["block", "gemm"])
def test_wgrad_with_one_workspace_for_calls_that_follow_one_another(
    layout: str, accumulate: bool
) -> None:
    """It is zero after each: tiles claimed or scheduled statically, with tokens or without."""
    workspace = ops.zero_workspace(torch.empty(0, device="cuda"))
    assert workspace is not None
    for counts in ([1, 300, 0, 200], [128 * 60], [0, 0, 0], [40] * 70):
        for size, spare in ((1040, 0), (48, 300)):
            plan = plan_of(counts, spare)
            dy = segments(on_gpu(noise(size, plan.columns, layout=layout, fp8="e5m2")), plan)
            x = segments(on_gpu(noise(size, plan.columns, layout=layout)), plan)
            outs = [torch.ones(len(counts), size, size, device="cuda") for _ in range(3)]
            ops.grouped_gemm_wgrad(dy, x, plan, out=outs[0], accumulate=accumulate)
            for out in outs[1:]:
                ops.grouped_gemm_wgrad(
                    dy, x, plan, out=out, accumulate=accumulate, workspace=workspace
                )
                assert not workspace.any()
                assert same_bits(out, outs[0])


@pytest.mark.parametrize(("m", "n"), [(48, 208), (48, 128), (176, 208)])
def test_wgrad_over_several_runs_of_scales(m: int, n: int) -> None:
    """The last by 192x128 tiles."""
    plan = plan_of([128 * 301, 0, 128 * 64, 300])
    dy = segments(on_gpu(noise(m, plan.columns, layout="block", fp8="e5m2")), plan)
    x = segments(on_gpu(noise(n, plan.columns, layout="block")), plan)
    dw = ops.grouped_gemm_wgrad(dy, x, plan, out=poisoned(4, m, n, dtype=torch.float32))
    assert wgrad_error(dy, x, plan, dw) <= C_CUDA


@FORMATS
@pytest.mark.parametrize("layout", ["block", "gemm"])
@pytest.mark.parametrize("kind", ["noise", "range", "largest"])
def test_wgrad_formats_and_adversarial_operands(kind: str, layout: str, fp8: str) -> None:
    plan = plan_of([200, 0, 1060])
    dy = segments(on_gpu(KINDS[kind](208, plan.columns, layout=layout, fp8=fp8)), plan)
    x = segments(on_gpu(KINDS[kind](144, plan.columns, layout=layout)), plan)
    dw = ops.grouped_gemm_wgrad(dy, x, plan, out=poisoned(3, 208, 144, dtype=torch.float32))
    assert wgrad_error(dy, x, plan, dw) <= C_CUDA


@DTYPES
def test_fprop_without_channels_writes_zeros(dtype: torch.dtype) -> None:
    plan = plan_of([3, 0, 2])
    a, w = (
        on_gpu(q) for q in (noise(plan.rows, 0, layout="gemm"), noise(3, 32, 0, layout="block"))
    )
    d = ops.grouped_gemm(a, w, plan, out=poisoned(plan.rows, 32, dtype=dtype), out_dtype=dtype)
    assert not d.any()


def test_wgrad_without_capacity_writes_zeros() -> None:
    plan = plan_of([0, 0])
    dy = on_gpu(noise(32, plan.columns, layout="block"))
    dw = ops.grouped_gemm_wgrad(dy, dy, plan, out=poisoned(2, 32, 32, dtype=torch.float32))
    assert not dw.any()
    ones = torch.ones_like(dw)
    assert torch.equal(ops.grouped_gemm_wgrad(dy, dy, plan, out=ones, accumulate=True), dw + 1)


def test_special_values_stand_where_float64_has_them() -> None:
    plan = plan_of([4, 3])
    a, w = noise(7, 272, layout="gemm", fp8="e5m2"), noise(2, 48, 272, layout="block")
    raw = a.data.view(torch.uint8)
    raw[0, 5], raw[1, 130], raw[2, 3], raw[2, 4], raw[4, 271] = 0x7C, 0xFC, 0x7C, 0xFC, 0x7D
    w.data.view(torch.uint8)[0, 7, 200] = 0x7F
    w.data.view(torch.uint8)[0, 9, 5] = 0x00  # meets the infinity of row 0
    a, w = on_gpu(a), on_gpu(w)
    d = ops.grouped_gemm(a, w, plan, out_dtype="float32", out=poisoned(7, 48, dtype=torch.float32))
    assert fprop_error(a, w, plan, d) <= C_CUDA


def test_one_graph_serves_other_routings() -> None:
    """Sizes are read on the device: a captured call replays under other counts."""
    counts = torch.tensor([100, 0, 29, 70], dtype=torch.int32, device="cuda")
    plan = ops.plan_from_counts(counts, capacity=256)
    a = on_gpu(noise(plan.rows, 272, layout="gemm"))
    w = on_gpu(noise(4, 144, 272, layout="block"))
    dy = on_gpu(noise(144, plan.columns, layout="block"))
    x = on_gpu(noise(272, plan.columns, layout="block"))
    d, dw = poisoned(256, 144, dtype=torch.bfloat16), poisoned(4, 144, 272, dtype=torch.float32)

    def step() -> None:
        ops.grouped_gemm(a, w, plan, out=d)
        ops.grouped_gemm_wgrad(dy, x, plan, out=dw)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for routed in ([0, 256, 0, 0], [1, 2, 3, 4], [64, 64, 64, 64]):
        other = ops.plan_from_counts(
            torch.tensor(routed, dtype=torch.int32, device="cuda"), capacity=256
        )
        plan.buffer.copy_(other.buffer)
        d.fill_(float("nan")), dw.fill_(float("nan"))
        graph.replay()
        expected = ops.grouped_gemm(a, w, other, out=poisoned(256, 144, dtype=d.dtype))
        assert same_bits(d, expected)
        assert same_bits(dw, ops.grouped_gemm_wgrad(dy, x, other, out=torch.empty_like(dw)))


def test_a_misaligned_operand_is_copied() -> None:
    plan = plan_of([8])
    a, w = on_gpu(noise(8, 32, layout="gemm")), on_gpu(noise(1, 32, 32, layout="block"))
    flat = torch.empty(8 * 32 + 1, dtype=torch.uint8, device="cuda")
    shifted = flat[1:].view(8, 32).copy_(a.data.view(torch.uint8)).view(a.data.dtype)
    out = ops.grouped_gemm(Fp8Tensor(shifted, a.scale_inv, "gemm"), w, plan)
    assert same_bits(out, ops.grouped_gemm(a, w, plan))
