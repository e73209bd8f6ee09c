"""grouped_gemm and grouped_gemm_wgrad against float64, by the policy of tolerance.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8moe_cutlass import Fp8Tensor, RoutingPlan
from fp8moe_cutlass.tensor import scale_shape
from on_device import ops
from tolerance import C_CPU, C_CUDA, GemmTruth, codes, gemm_error, gemm_truth, scales

pytestmark = pytest.mark.usefixtures("device")

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
Make = Callable[..., Fp8Tensor]


def wrap(data: Tensor, scale: Tensor, layout: str) -> Fp8Tensor:
    return Fp8Tensor(data, scale, layout)


def noise(*shape: int, layout: str, fp8: str = "e4m3") -> Fp8Tensor:
    """Any finite codes; scales 1/16 .. 16 with random mantissas."""
    values = torch.arange(256, dtype=torch.uint8).view(FORMATS[fp8])
    finite = torch.arange(256, dtype=torch.uint8)[values.float().isfinite()]
    data = finite[torch.randint(len(finite), shape)].view(FORMATS[fp8])
    scale = torch.exp2((torch.rand(scale_shape(shape, layout)) * 2 - 1) * 4)
    return wrap(data, scale, layout)


def range_in_k(*shape: int, layout: str, fp8: str = "e4m3") -> Fp8Tensor:
    """One largest code among smallest ones in each tile, block scales 2^-40 .. 2^40."""
    x = torch.full(shape, 2.0**-9)
    x[..., :: 128 - 1] = 448.0
    x *= torch.randint(0, 2, shape) * 2 - 1
    return wrap(
        x.to(FORMATS[fp8]), torch.exp2(torch.randint(-40, 41, scale_shape(shape, layout))), layout
    )


def cancelling(*shape: int, layout: str, fp8: str = "e4m3") -> Fp8Tensor:
    """Neighbours along K are equal up to the sign of one operand: true sums are near zero."""
    q = noise(*shape[:-1], shape[-1] // 2, layout="block", fp8=fp8).data.float()
    signs = torch.tensor([1.0, -1.0]) if layout == "gemm" else torch.ones(2)
    x = (q[..., None] * signs).flatten(-2)
    x[..., 3] = 2.0**-6
    return wrap(x.to(FORMATS[fp8]), torch.ones(scale_shape(shape, layout)), layout)


def largest(*shape: int, layout: str, fp8: str = "e4m3") -> Fp8Tensor:
    """All codes at the maximum: partial sums outgrow float32's 24 bits."""
    x = torch.full(shape, torch.finfo(FORMATS[fp8]).max)
    return wrap(x.to(FORMATS[fp8]), torch.rand(scale_shape(shape, layout)) + 0.5, layout)


def plan_of(counts: list[int], spare: int = 0, align: int = 1) -> RoutingPlan:
    return ops.plan_from_counts(torch.tensor(counts), capacity=sum(counts) + spare, align=align)


def assert_gemm(d: Tensor, truth: GemmTruth) -> None:
    """D is within the policy of its truth."""
    error, c = gemm_error(d, truth), C_CPU if ops.device.type == "cpu" else C_CUDA
    assert error <= c, f"needs c = {error:.4f}, allowed {c}"


def check_fprop(a: Fp8Tensor, w: Fp8Tensor, plan: RoutingPlan, dtype: torch.dtype) -> Tensor:
    """Runs over poison; compares every expert's rows and the rows after the last one."""
    poison = torch.full((plan.rows, w.shape[1]), -77.0, dtype=dtype)
    d = ops.grouped_gemm(a, w, plan, out_dtype=dtype, out=poison.clone())
    left, left_scale, right, right_scale = codes(a), scales(a), codes(w), scales(w)
    for e in range(plan.experts):
        rows = slice(int(plan.row_offsets[e]), int(plan.row_offsets[e + 1]))
        assert_gemm(d[rows], gemm_truth(left[rows], left_scale[rows], right[e], right_scale[e]))
    end = int(plan.row_offsets[-1])
    assert torch.equal(d[end:], poison[end:])
    return d


def segments(t: Fp8Tensor, plan: RoutingPlan) -> Fp8Tensor:
    """t with the tails of the experts' segments zero, as every producer writes them."""
    for e in range(plan.experts):
        tail = slice(
            int(plan.col_offsets[e] + plan.tokens_per_expert[e]), int(plan.col_offsets[e + 1])
        )
        t.data.view(torch.uint8)[:, tail] = 0
    return t


def check_wgrad(
    dy: Fp8Tensor, x: Fp8Tensor, plan: RoutingPlan, dtype: torch.dtype, before: Tensor | None = None
) -> Tensor:
    """Against float64, expert by expert; `before`: what to accumulate onto."""
    segments(dy, plan), segments(x, plan)
    out = torch.full((plan.experts, dy.shape[0], x.shape[0]), -77.0, dtype=dtype)
    if before is not None:
        out.copy_(before)
    ops.grouped_gemm_wgrad(dy, x, plan, out=out, accumulate=before is not None)
    alone = ops.grouped_gemm_wgrad(dy, x, plan, out_dtype=dtype)
    for e in range(plan.experts):
        at = slice(int(plan.col_offsets[e]), int(plan.col_offsets[e + 1]))
        block = slice(at.start // 128, at.stop // 128)
        sides = [(codes(t)[:, at], scales(t)[:, block]) for t in (dy, x)]
        assert_gemm(alone[e], gemm_truth(*sides[0], *sides[1]))
    # Accumulation adds the rounded product, and rounds once more.
    assert torch.equal(out, alone if before is None else before + alone)
    return out


KINDS: dict[str, Make] = {
    "noise": noise,
    "range": range_in_k,
    "cancelling": cancelling,
    "largest": largest,
}
# Ragged counts; E4M3 and E5M2; N and K with partial last blocks, one over a block of 264 rows.
CASES = [
    pytest.param([5, 0, 130, 1], 144, 272, id="ragged"),
    pytest.param([0, 0, 70], 16, 16, id="one-expert-takes-all"),
    pytest.param([300], 32, 128, id="one-expert"),
    pytest.param([0, 0], 32, 32, id="no-tokens"),
    pytest.param([2, 1], 288, 2880, id="deep"),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("counts", "n", "k"), CASES)
def test_fprop(counts: list[int], n: int, k: int, kind: str, dtype: torch.dtype) -> None:
    plan = plan_of(counts)
    make = KINDS[kind]
    a = make(plan.rows, k, layout="gemm", fp8="e5m2" if kind == "noise" else "e4m3")
    w = make(len(counts), n, k, layout="block")
    d = check_fprop(a, w, plan, dtype)
    assert torch.equal(d, ops.grouped_gemm(a, w, plan, out_dtype=dtype))


@pytest.mark.parametrize("align", [16, 128])
def test_fprop_padding_rows_and_unused_rows(align: int) -> None:
    plan = plan_of([5, 0, 33], spare=60, align=align)
    x = torch.randn(plan.tokens, 272)
    a = ops.permute_pad(ops.quantize(x), plan)[0].to_layout("gemm")
    d = check_fprop(a, noise(3, 144, 272, layout="block"), plan, torch.bfloat16)
    assert not d[5 : int(plan.row_offsets[1])].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("layout", ["block", "gemm"])
@pytest.mark.parametrize("counts", [[5, 0, 130, 1], [128], [0, 0]], ids=str)
def test_wgrad(counts: list[int], layout: str, dtype: torch.dtype) -> None:
    plan = plan_of(counts)
    for n, k in ((48, 144), (16, 32)):
        dy = noise(n, plan.columns, layout=layout, fp8="e5m2")
        x = noise(k, plan.columns, layout=layout)
        dw = check_wgrad(dy, x, plan, dtype)
        assert not dw[plan.tokens_per_expert == 0].any()
        before = torch.randn(len(counts), n, k).to(dtype)
        check_wgrad(dy, x, plan, dtype, before)


@pytest.mark.parametrize("layout", ["block", "gemm"])
@pytest.mark.parametrize("kind", ["range", "largest"])
def test_wgrad_adversarial(kind: str, layout: str) -> None:
    plan = plan_of([200, 0, 60])
    sides = [KINDS[kind](c, plan.columns, layout=layout) for c in (48, 32)]
    check_wgrad(*sides, plan, torch.float32)


def test_special_values_stand_where_float64_has_them() -> None:
    plan = plan_of([4, 3])
    a = noise(7, 272, layout="gemm", fp8="e5m2")
    w = noise(2, 48, 272, layout="block")
    raw = a.data.view(torch.uint8)
    raw[0, 5], raw[1, 130], raw[2, 3], raw[2, 4], raw[4, 271] = 0x7C, 0xFC, 0x7C, 0xFC, 0x7D
    w.data.view(torch.uint8)[0, 7, 200] = 0x7F
    w.data.view(torch.uint8)[0, 9, 5] = 0x00  # meets the infinity of row 0
    for dtype in (torch.bfloat16, torch.float32):
        d = check_fprop(a, w, plan, dtype)
        assert d[0].isinf().any()
        assert not d[2].isfinite().any()  # both infinities: NaN or infinite, as signs have it
        assert d[4].isnan().all()
        assert d[0, 9].isnan()
        assert d[3, 7].isnan()
        assert d[5:].isfinite().all()


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    n=st.integers(1, 10),
    k=st.integers(1, 18),
    layout=st.sampled_from(["block", "gemm"]),
    seed=st.integers(0, 2**31),
)
def test_any_shape(counts: list[int], n: int, k: int, layout: str, seed: int) -> None:
    torch.manual_seed(seed)
    plan = plan_of(counts)
    a = noise(plan.rows, 16 * k, layout="gemm", fp8="e5m2")
    w = noise(len(counts), 16 * n, 16 * k, layout="block")
    check_fprop(a, w, plan, torch.float32)
    small_n, small_k = 16 * min(n, 3), 16 * min(k, 3)
    dy, x = (noise(c, plan.columns, layout=layout) for c in (small_n, small_k))
    check_wgrad(dy, x, plan, torch.bfloat16)


def test_bad_arguments_write_nothing() -> None:
    plan = plan_of([3, 2])
    a, w = noise(5, 32, layout="gemm"), noise(2, 48, 32, layout="block")
    out = torch.full((5, 48), -77.0)
    gradient = noise(2, 48, 32, layout="block", fp8="e5m2")
    bad = [
        ("a must have scale layout '?gemm", a.to_layout("row"), w, out),
        (r"w must be \[2, 48, 32\]", a, noise(3, 48, 32, layout="block"), out),
        (r"w must be \[2, 48, 32\]", a, noise(2, 48, 64, layout="block"), out),
        (
            "N must be a multiple of 16; got 40",
            a,
            noise(2, 40, 32, layout="block"),
            out[:, :40].clone(),
        ),
        (r"d must be \[5, 48\]", a, w, out[:4]),
        ("d must be one of", a, w, out.half()),
        ("d must be contiguous", a, w, out.T.contiguous().T),
        ("w must be float8_e4m3fn, as .*; got float8_e5m2", a, gradient, out),
    ]
    for message, left, right, d in bad:
        with pytest.raises(ValueError, match=message):
            ops.grouped_gemm(left, right, plan, out_dtype="float32", out=d)
        assert (d == -77.0).all()
    dy, x = noise(48, plan.columns, layout="block"), noise(32, plan.columns, layout="gemm")
    with pytest.raises(ValueError, match=r"must have one scale layout; got '?block'? and '?gemm"):
        ops.grouped_gemm_wgrad(dy, x, plan)
    with pytest.raises(ValueError, match=r"x_t must be float8_e4m3fn, as .*; got float8_e5m2"):
        ops.grouped_gemm_wgrad(dy, noise(32, plan.columns, layout="block", fp8="e5m2"), plan)
    with pytest.raises(ValueError, match="adds to out"):
        ops.grouped_gemm_wgrad(dy, dy, plan, accumulate=True)
    with pytest.raises(ValueError, match=r"x_t must be \[32, 256\]"):
        ops.grouped_gemm_wgrad(dy, noise(32, 128, layout="block"), plan)
