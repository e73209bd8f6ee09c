"""transpose_fp8 and permute_transpose_fp8: bit-equal to the reference of `verify`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_columns as ref
from backends import ROUTINGS, awkward, check, plan_of
from fp8moe_cutlass import Fp8Tensor, RoutingPlan
from fp8moe_cutlass.tools.verify.reference import FORMATS
from on_device import CPU_ONLY, LARGE, ops

pytestmark = pytest.mark.usefixtures("device")

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
COLUMNS = ["block", "column"]
GROUP_SIZES = [0, 1, 15, 16, 127, 128, 129]


def rows_of(codes: torch.Tensor, scale_inv: torch.Tensor, fp8_dtype: str, layout: str) -> Fp8Tensor:
    """codes [R, C] u8 and scale_inv [R, cdiv(C, 128)] as an Fp8Tensor of that layout."""
    t = Fp8Tensor(codes.view(FP8[fp8_dtype]), scale_inv.contiguous())
    return t.to_layout(layout)


def assert_columns(
    got: Fp8Tensor, plan: RoutingPlan, codes: np.ndarray, scales: np.ndarray, columns: str
) -> None:
    """Equality over the segments; what lies past the last one is unspecified."""
    end = int(plan.col_offsets[-1])
    c = got.shape[0]
    np.testing.assert_array_equal(got.data.view(torch.uint8).numpy()[:, :end], codes[:, :end])
    s, tiles = got.scale_inv.numpy(), end // 128
    if columns == "block":
        np.testing.assert_array_equal(s[:, :tiles], scales[:, :tiles])
    else:
        np.testing.assert_array_equal(s[:tiles, :c], scales[:tiles])


def random_rows(seed: int, rows: int, c: int, spread: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes (zero rows, NaNs and -0 among them) with scales 2^+-spread, some of them 0."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, c), generator=g, dtype=torch.uint8)
    exponent = torch.randint(-spread, spread + 1, (rows, -(-c // 128)), generator=g)
    scale_inv = torch.exp2(exponent.float())
    kind = torch.randint(0, 8, (rows,), generator=g)
    codes[kind == 0] = 0
    scale_inv[kind == 0] = 1.0  # an all-zero row at eps 0
    codes[kind == 1] &= 0x80
    scale_inv[kind == 1] = 2.0**-42  # at eps 1e-10
    scale_inv[kind == 2] = 0.0
    codes[kind == 2] = 0
    return codes, scale_inv


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("fp8_dtype", FP8)
def test_every_code_under_every_shift(fp8_dtype: str, columns: str) -> None:
    """Expert i: one row that decides the scale, and all 256 codes under a scale 2^k smaller."""
    fmt = FORMATS[fp8_dtype]
    shifts = [*range(48), 63, 64, 126, 127, 128, 129, 200, 252]
    codes = torch.empty(2 * len(shifts), 256, dtype=torch.uint8)
    scale_inv = torch.empty(2 * len(shifts), 2)
    codes[0::2] = fmt.largest
    codes[1::2] = torch.arange(256)
    scale_inv[0::2] = 2.0**126
    scale_inv[1::2] = torch.exp2(126.0 - torch.tensor(shifts, dtype=torch.float32))[:, None]
    counts = torch.full((len(shifts),), 2)
    plan = ops.plan_from_counts(counts, capacity=2 * len(shifts))
    t = ops.transpose_fp8(rows_of(codes, scale_inv, fp8_dtype, "row"), plan, columns=columns)
    got = t.data.view(torch.uint8).numpy()
    value = fmt.values
    special = ~np.isfinite(value)
    for i, k in enumerate(shifts):
        expected = fmt.encode(np.where(special, 0, value) * 2.0**-k)
        expected[special] = np.arange(256)[special]
        np.testing.assert_array_equal(got[:, 128 * i + 1], expected, err_msg=f"shift {k}")
        np.testing.assert_array_equal(got[:, 128 * i], fmt.largest)
    assert (t.scale_inv.numpy()[:, : 2 * len(shifts)] == 2.0**126).all()


@pytest.mark.parametrize("fp8_dtype", FP8)
def test_column_scales_are_tight(fp8_dtype: str) -> None:
    """A code alone in its channel: left shifts, exact, up to the format's largest exponent."""
    fmt = FORMATS[fp8_dtype]
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    scale_inv = torch.tensor([[2.0**3, 2.0**-120]])
    plan = ops.plan_from_counts(torch.tensor([1]), capacity=1)
    t = ops.transpose_fp8(rows_of(codes, scale_inv, fp8_dtype, "gemm"), plan, columns="column")
    expected = ref.transpose(
        codes.numpy(), scale_inv.numpy(), ref.groups_of([1], 1), 128, fp8_dtype, "column"
    )
    assert_columns(t, plan, *expected, "column")
    before = fmt.values[codes.numpy()[0]] * scale_inv.numpy().repeat(128, 1)[0]
    after = fmt.values[t.data.view(torch.uint8).numpy()[:, 0]] * t.scale_inv.numpy()[0, :256]
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("align", [1, 16, 32, 128])
@pytest.mark.parametrize("fp8_dtype", FP8)
@pytest.mark.parametrize("layout", ["row", "gemm"])
def test_groups_of_every_size(layout: str, fp8_dtype: str, align: int, columns: str) -> None:
    plan = ops.plan_from_counts(
        torch.tensor(GROUP_SIZES), capacity=sum(GROUP_SIZES) + 3, align=align
    )
    codes, scale_inv = random_rows(align, plan.rows, 272, spread=6)
    t = rows_of(codes, scale_inv, fp8_dtype, layout)
    before = t.data.view(torch.uint8).clone(), t.scale_inv.clone(), plan.buffer.clone()
    got = ops.transpose_fp8(t, plan, columns=columns)
    groups = ref.groups_of(GROUP_SIZES, align)
    expected = ref.transpose(
        codes.numpy(), scale_inv.numpy(), groups, plan.columns, fp8_dtype, columns
    )
    assert_columns(got, plan, *expected, columns)
    after = t.data.view(torch.uint8), t.scale_inv, plan.buffer
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("counts", [[0, 0], [300, 0, 0], [0, 5], [1]], ids=str)
def test_few_groups(counts: list[int], columns: str) -> None:
    plan = ops.plan_from_counts(torch.tensor(counts), capacity=sum(counts))
    codes, scale_inv = random_rows(1, plan.rows, 128, spread=120)
    got = ops.transpose_fp8(rows_of(codes, scale_inv, "e4m3", "row"), plan, columns=columns)
    groups = ref.groups_of(counts, 1)
    expected = ref.transpose(
        codes.numpy(), scale_inv.numpy(), groups, plan.columns, "e4m3", columns
    )
    assert_columns(got, plan, *expected, columns)


@pytest.mark.parametrize("layout", ["row", "gemm"])
def test_layout_is_never_guessed(layout: str) -> None:
    """T == K / 128: both layouts have scales of one shape."""
    codes, scale_inv = random_rows(2, 4, 512, spread=3)
    plan = ops.plan_from_counts(torch.tensor([4]), capacity=4)
    assert rows_of(codes, scale_inv, "e4m3", layout).scale_inv.shape == (4, 4)
    got = ops.transpose_fp8(rows_of(codes, scale_inv, "e4m3", layout), plan)
    groups = ref.groups_of([4], 1)
    expected = ref.transpose(codes.numpy(), scale_inv.numpy(), groups, 128, "e4m3", "block")
    assert_columns(got, plan, *expected, "block")


def test_a_zero_row_never_decides_the_scale() -> None:
    """Loss-masked tokens quantized at eps 0 carry scale 1 and must not flush small gradients."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(8)) * 1e-6
    x[::3] = 0
    plan = ops.plan_from_counts(torch.tensor([64]), capacity=64)
    for eps in (0.0, 1e-10):
        q = ops.quantize(x, eps=eps)
        for columns in COLUMNS:
            t = ops.transpose_fp8(q, plan, columns=columns)
            error = t.dequantize("float32")[:, :64].T - q.dequantize("float32")
            assert float(error.norm()) <= 1e-3 * float(x.norm())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_rows(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=4))
    align = data.draw(st.sampled_from([1, 16, 32, 128]))
    columns = data.draw(st.sampled_from(COLUMNS))
    fp8_dtype = data.draw(st.sampled_from(sorted(FP8)))
    c = 16 * data.draw(st.integers(1, 10))
    plan = ops.plan_from_counts(torch.tensor(counts), capacity=sum(counts), align=align)
    seed, spread = data.draw(st.integers(0, 1000)), data.draw(st.sampled_from([0, 1, 4, 12, 126]))
    codes, scale_inv = random_rows(seed, plan.rows, c, spread)
    got = ops.transpose_fp8(rows_of(codes, scale_inv, fp8_dtype, "gemm"), plan, columns=columns)
    groups = ref.groups_of(counts, align)
    expected = ref.transpose(
        codes.numpy(), scale_inv.numpy(), groups, plan.columns, fp8_dtype, columns
    )
    assert_columns(got, plan, *expected, columns)


# ---- permute_transpose_fp8 ----------------------------------------------------------------------


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("fp8_dtype", FP8)
@pytest.mark.parametrize("layout", ["row", "gemm"])
@pytest.mark.parametrize("align", [1, 16, 128])
def test_permute_transpose_is_the_two_ops(
    align: int, layout: str, fp8_dtype: str, columns: str
) -> None:
    g = torch.Generator().manual_seed(align)
    tokens, slots, experts = 150, 3, 5
    topk = torch.randint(-1, experts, (tokens, slots), generator=g, dtype=torch.int32)
    topk[topk == 2] = 3  # an empty expert
    for capacity in (None, 333):
        plan = ops.route(experts, topk_idx=topk, align=align, capacity=capacity)
        codes, scale_inv = random_rows(9, tokens, 144, spread=5)
        t = rows_of(codes, scale_inv, fp8_dtype, layout)
        one = ops.permute_transpose_fp8(t, plan, columns=columns)
        y = ops.permute_pad(t, plan)
        two = ops.transpose_fp8(y[0] if isinstance(y, tuple) else y, plan, columns=columns)
        tiles = int(plan.col_offsets[-1]) // 128
        scales = two.scale_inv.numpy()
        at = np.s_[:, :tiles] if columns == "block" else np.s_[:tiles, :144]
        np.testing.assert_array_equal(one.scale_inv.numpy()[at], scales[at])
        codes = one.data.view(torch.uint8), two.data.view(torch.uint8)
        assert torch.equal(codes[0][:, : 128 * tiles], codes[1][:, : 128 * tiles])


# ---- requantize ---------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
@pytest.mark.parametrize("layout", ["row", "gemm"])
def test_requantize(layout: str, scale: str, columns: str) -> None:
    counts = [5, 0, 130]
    plan = ops.plan_from_counts(torch.tensor(counts), capacity=sum(counts), align=16)
    x = torch.randn(plan.rows, 144, generator=torch.Generator().manual_seed(10))
    q = ops.quantize(x, scale="fp32", scale_layout=layout, fp8_dtype="e5m2")
    got = ops.transpose_fp8(q, plan, columns=columns, requantize=True, scale=scale)
    expected = ref.quantize_columns(
        q.dequantize("float32").numpy(),
        ref.groups_of(counts, 16),
        plan.columns,
        "e5m2",
        columns,
        scale,
    )
    assert_columns(got, plan, *expected, columns)


# ---- what is refused ----------------------------------------------------------------------------


@CPU_ONLY
@pytest.mark.parametrize("bad", [3.0, -1.0, -0.0, float("inf"), float("nan"), 2.0**-140, 1e-10])
def test_scales_that_are_no_powers_of_two(bad: float) -> None:
    codes, scale_inv = random_rows(11, 40, 256, spread=2)
    scale_inv[17, 1] = bad
    plan = ops.plan_from_counts(torch.tensor([40]), capacity=40)
    untouched = torch.full((256, 128), 7, dtype=torch.uint8)
    out = Fp8Tensor(untouched.view(FP8["e4m3"]), torch.full((2, 1), 7.0), "block")
    for layout in ("row", "gemm"):
        with pytest.raises(ValueError, match=r"\[transpose_fp8\] scales must be positive powers"):
            ops.transpose_fp8(rows_of(codes, scale_inv, "e4m3", layout), plan, out=out)
    topk = torch.zeros(40, 1, dtype=torch.int32)
    routed = ops.route(1, topk_idx=topk)
    with pytest.raises(ValueError, match=r"\[permute_transpose_fp8\] scales must be positive"):
        ops.permute_transpose_fp8(rows_of(codes, scale_inv, "e4m3", "row"), routed, out=out)
    assert (untouched == 7).all()
    assert (out.scale_inv == 7).all()


def test_bad_scales_of_padding_are_not_looked_at() -> None:
    codes, scale_inv = random_rows(12, 16, 128, spread=2)
    scale_inv[10:] = torch.nan
    plan = ops.plan_from_counts(torch.tensor([10]), capacity=10, align=16)
    got = ops.transpose_fp8(rows_of(codes, scale_inv, "e4m3", "row"), plan)
    groups = ref.groups_of([10], 16)
    expected = ref.transpose(codes.numpy(), scale_inv.numpy(), groups, 128, "e4m3", "block")
    assert_columns(got, plan, *expected, "block")


def test_refusals() -> None:
    plan = ops.plan_from_counts(torch.tensor([8]), capacity=8)
    q = ops.quantize(torch.randn(8, 128))
    with pytest.raises(ValueError, match="pow2"):
        ops.transpose_fp8(ops.quantize(torch.randn(8, 128), scale="fp32"), plan)
    with pytest.raises(ValueError, match="columns must be"):
        ops.transpose_fp8(q, plan, columns="rows")
    with pytest.raises(ValueError, match=r"q must be \[8, 128\]"):
        ops.transpose_fp8(ops.quantize(torch.randn(9, 128)), plan)
    with pytest.raises(ValueError, match="scale layout"):
        ops.transpose_fp8(Fp8Tensor(q.data, torch.ones(1, 1), "block"), plan)


@CPU_ONLY
def test_a_plan_that_is_not_filled() -> None:
    q = ops.quantize(torch.randn(8, 128))
    plan = ops.plan_from_counts(torch.tensor([8]), capacity=8)
    unfilled = RoutingPlan(torch.full_like(plan.buffer, 1 << 20), *plan.sizes)
    with pytest.raises(ValueError, match="plan must be filled"):
        ops.transpose_fp8(q, unfilled)


# ---- beside the CPU backend: over poison, twice, bit for bit ------------------------------------


def any_rows(rows, c, fp8_dtype, layout, spread):
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


@LARGE
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("layout", ["row", "gemm"])
@pytest.mark.parametrize("fp8_dtype", FP8)
@pytest.mark.parametrize("align", [1, 16, 32, 128])
def test_transpose(align, fp8_dtype, layout, columns):
    counts = torch.tensor([0, 1, 15, 16, 127, 128, 129, 300])
    plan = ops.plan_from_counts(counts, capacity=int(counts.sum()) + 9, align=align)
    for c in (16, 128, 272, 2880):
        for spread in (0, 3, 12, 120):
            t = any_rows(plan.rows, c, fp8_dtype, layout, spread)
            check("transpose_fp8", t, plan, columns=columns)


@LARGE
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("align", [1, 16, 128])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_permute_transpose(kind, align, columns):
    for tokens, experts, slots in [(150, 5, 3), (300, 40, 8)]:
        _, plan = plan_of(kind, tokens=tokens, experts=experts, slots=slots, align=align)
        for c, fp8_dtype, layout in [(272, "e4m3", "row"), (128, "e5m2", "gemm")]:
            t = any_rows(tokens, c, fp8_dtype, layout, spread=4)
            check("permute_transpose_fp8", t, plan, columns=columns)
            rows = any_rows(plan.rows, c, fp8_dtype, layout, spread=4)
            check("transpose_fp8", rows, plan, columns=columns)


@LARGE
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", ROUTINGS)
def test_permute_transpose_of_many_tokens(kind, columns):
    """More than 32,768 tokens come in windows: of 33,000 in four, of 150,000 in sixteen."""
    for tokens, experts, slots in [(33_000, 3, 2), (33_000, 70, 2), (150_000, 40, 1)]:
        _, plan = plan_of(kind, tokens=tokens, experts=experts, slots=slots, align=1)
        t = any_rows(tokens, 16, "e4m3", "row", spread=4)
        check("permute_transpose_fp8", t, plan, columns=columns)


@LARGE
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
        check("permute_transpose_fp8", q, plan, columns=columns)
        rows, _ = ops.permute_pad(q, plan, scale_layout="gemm")
        check("transpose_fp8", rows, plan, columns=columns)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
@pytest.mark.parametrize("fp8_dtype", FP8)
def test_requantize_of_a_routing(fp8_dtype, scale, columns):
    _, plan = plan_of("ragged", tokens=200, experts=6, slots=2, align=16)
    for layout in ("row", "gemm"):
        q = ops.quantize(
            awkward(plan.rows, 272), scale="fp32", fp8_dtype=fp8_dtype, scale_layout=layout
        )
        options = {"columns": columns, "requantize": True, "scale": scale}
        check("transpose_fp8", q, plan, **options)
