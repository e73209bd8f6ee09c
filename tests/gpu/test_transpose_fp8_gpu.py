"""transpose_fp8 and permute_transpose_fp8: CUDA against the CPU backend, bit for bit."""

from __future__ import annotations

import pytest
import torch
from backends import ROUTINGS, assert_same, awkward, on_both, plan_of

from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
COLUMNS = ["block", "column"]


def check(op, *args, plan, **kwargs):
    expected, (first, again) = on_both(op, *args, **kwargs)
    assert_same(expected, first, plan, op.__name__)
    assert_same(first, again, plan, f"{op.__name__}, second run")


def random_rows(rows, c, fp8_dtype, layout, spread):
    """Random codes (zero rows, NaNs and -0 among them) with scales 2^+-spread, some of them 0."""
    codes = torch.randint(0, 256, (rows, c), dtype=torch.uint8)
    scale_inv = torch.exp2(torch.randint(-spread, spread + 1, (rows, -(-c // 128))).float())
    kind = torch.randint(0, 8, (rows,))
    codes[kind == 0] = 0
    scale_inv[kind == 0] = 1.0
    codes[kind == 1] &= 0x80
    scale_inv[kind == 2] = 0.0
    codes[kind == 3] &= 0x3F  # no specials
    return Fp8Tensor(codes.view(FP8[fp8_dtype]), scale_inv).to_layout(layout)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("fp8_dtype", FP8)
def test_every_code_under_every_shift(fp8_dtype, columns):
    shifts = torch.tensor([*range(48), 63, 64, 126, 127, 128, 129, 200, 252])
    codes = torch.empty(2 * len(shifts), 256, dtype=torch.uint8)
    scale_inv = torch.empty(2 * len(shifts), 2)
    codes[0::2] = 0x7B
    codes[1::2] = torch.arange(256)
    scale_inv[0::2] = 2.0**126
    scale_inv[1::2] = torch.exp2(126.0 - shifts)[:, None]
    plan = RoutingPlan.from_counts(torch.full((len(shifts),), 2), 2 * len(shifts))
    t = Fp8Tensor(codes.view(FP8[fp8_dtype]), scale_inv)
    check(ops.transpose_fp8, t, plan, columns=columns, plan=plan)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("layout", ["row", "gemm"])
@pytest.mark.parametrize("fp8_dtype", FP8)
@pytest.mark.parametrize("align", [1, 16, 32, 128])
def test_transpose(align, fp8_dtype, layout, columns):
    counts = torch.tensor([0, 1, 15, 16, 127, 128, 129, 300])
    plan = RoutingPlan.from_counts(counts, int(counts.sum()) + 9, align)
    for c in (16, 128, 272, 2880):
        for spread in (0, 3, 12, 120):
            t = random_rows(plan.rows, c, fp8_dtype, layout, spread)
            check(ops.transpose_fp8, t, plan, columns=columns, plan=plan)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("align", [1, 16, 128])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_permute_transpose(kind, align, columns):
    for tokens, experts, slots in [(150, 5, 3), (300, 40, 8)]:
        _, plan = plan_of(kind, tokens=tokens, experts=experts, slots=slots, align=align)
        for c, fp8_dtype, layout in [(272, "e4m3", "row"), (128, "e5m2", "gemm")]:
            t = random_rows(tokens, c, fp8_dtype, layout, spread=4)
            check(ops.permute_transpose_fp8, t, plan, columns=columns, plan=plan)
            rows = random_rows(plan.rows, c, fp8_dtype, layout, spread=4)
            check(ops.transpose_fp8, rows, plan, columns=columns, plan=plan)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", ROUTINGS)
def test_permute_transpose_of_many_tokens(kind, columns):
    """More than 32,768 tokens come in windows: of 33,000 in four, of 150,000 in sixteen."""
    for tokens, experts, slots in [(33_000, 3, 2), (33_000, 70, 2), (150_000, 40, 1)]:
        _, plan = plan_of(kind, tokens=tokens, experts=experts, slots=slots, align=1)
        t = random_rows(tokens, 16, "e4m3", "row", spread=4)
        check(ops.permute_transpose_fp8, t, plan, columns=columns, plan=plan)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("fp8_dtype", FP8)
def test_ordinary_codes(fp8_dtype, columns):
    """What quantize makes: no specials, and tokens whose scales are near each other, or are not, or
    far below 1, which those of zero tokens have.
    """
    ordinary = [(190, 0.0, 1.0), (190, 2.0, 1.0), (190, 6.0, 1.0), (190, 1.0, 1e-7)]
    for tokens, spread, size in (*ordinary, (7100, 1.0, 1.0)):
        _, plan = plan_of("dropped", tokens=tokens, experts=5, slots=3, align=16)
        c = 400 if tokens < 1000 else 48
        x = size * torch.randn(tokens, c) * torch.exp2(spread * torch.randn(tokens, 1))
        x[torch.rand(tokens) < 0.05, : c // 2] = 0.0
        x[:, 7] = 0.0
        x[:, 9] *= 1e-4
        q = ops.quantize(x.bfloat16(), fp8_dtype=fp8_dtype)
        check(ops.permute_transpose_fp8, q, plan, columns=columns, plan=plan)
        rows, _ = ops.permute_pad(q, plan, scale_layout="gemm")
        check(ops.transpose_fp8, rows, plan, columns=columns, plan=plan)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
@pytest.mark.parametrize("fp8_dtype", FP8)
def test_requantize(fp8_dtype, scale, columns):
    _, plan = plan_of("ragged", tokens=200, experts=6, slots=2, align=16)
    for layout in ("row", "gemm"):
        q = ops.quantize(
            awkward(plan.rows, 272), scale="fp32", fp8_dtype=fp8_dtype, scale_layout=layout
        )
        options = {"columns": columns, "requantize": True, "scale": scale}
        check(ops.transpose_fp8, q, plan, plan=plan, **options)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("c", [16, 272, 384, 512, 2880])
def test_scales_by_row_lie_anywhere(c, columns, device):
    """Of a matrix, at multiples of 16 bytes or not, bad scales all around."""
    _, plan = plan_of("ragged", tokens=200, experts=6, slots=2, align=16)
    plan = plan.to(device)
    t = random_rows(200, c, "e4m3", "row", spread=4).to(device)
    want = ops.permute_transpose_fp8(t, plan, columns=columns)
    tiles = t.scale_inv.shape[1]
    for first, width in ((0, tiles + 1), (1, tiles + 1), (3, tiles + 5), (4, tiles + 4)):
        around = torch.full((200, width), torch.nan, device=device)
        around[:, first : first + tiles] = t.scale_inv
        apart = Fp8Tensor(t.data, around[:, first : first + tiles])
        got = ops.permute_transpose_fp8(apart, plan, columns=columns)
        assert_same(want, got, plan, f"scales from {first} of {width}")
    assert plan.status.tolist()[2] == 0


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("layout", ["row", "gemm"])
def test_bad_scales_are_counted_and_poison_their_tiles(layout, columns, device):
    """Three bad scales of rows that carry tokens; two of padding rows do not count."""
    plan = RoutingPlan.from_counts(torch.tensor([130, 10], device=device), 140, align=16)
    t = random_rows(plan.rows, 256, "e4m3", "gemm", spread=2).to(device)
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
        plan = RoutingPlan.from_counts(torch.tensor(counts, device=device), capacity)
        q = ops.quantize(torch.randn(plan.rows, 128, device=device))
        assert ops.transpose_fp8(q, plan).shape == (128, plan.columns)
    torch.cuda.synchronize()


@pytest.mark.slow
def test_more_than_2_31_elements(device):
    """Equal experts of a huge tensor are transposed alike; the gathered form gives the same."""
    experts, each, c = 293, 1024, 7168
    codes = torch.randint(0, 120, (each, c), dtype=torch.uint8, device=device)
    scale_inv = torch.exp2(torch.randint(-3, 3, (each, 56), device=device).float())
    rows = Fp8Tensor(codes.repeat(experts, 1).view(FP8["e4m3"]), scale_inv.repeat(experts, 1))
    assert rows.data.numel() > 2**31
    counts = torch.full((experts,), each, device=device)
    plan = RoutingPlan.from_counts(counts, experts * each)
    one = RoutingPlan.from_counts(counts[:1], each)
    small = ops.transpose_fp8(Fp8Tensor(codes.view(FP8["e4m3"]), scale_inv), one)
    for op in (ops.transpose_fp8, ops.permute_transpose_fp8):
        big = op(rows, plan)
        for e in (0, experts // 2, experts - 1):
            part = big.data[:, e * each : (e + 1) * each].view(torch.uint8)
            assert torch.equal(part, small.data[:, :each].view(torch.uint8))
            assert torch.equal(big.scale_inv[:, 8 * e : 8 * e + 8], small.scale_inv[:, :8])
        del big
