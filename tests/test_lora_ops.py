"""lora_project, lora_wgrad, quantize_lora and grouped_gemm's second pair, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Tensor, RoutingPlan
from on_device import ops
from test_grouped_gemm import assert_gemm, noise, plan_of
from tolerance import codes, gemm_truth, scales

pytestmark = pytest.mark.usefixtures("device")

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
RANKS = [8, 16, 24, 32, 40, 64]
COUNTS = {
    "ragged": [3, 0, 70, 129, 1],
    "one takes all": [0, 0, 200],
    "no rows": [0, 0],
    "even": [64, 64],
}


def poisoned(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, -3.0).to(dtype)


def some_plan(counts: list[int], layout: str, align: int = 1) -> RoutingPlan:
    """A plan of those rows per expert; in row layout tokens lie in another order."""
    if layout == "gemm":
        return plan_of(counts, spare=7, align=align)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids))]
    return ops.route(len(counts), topk_idx=torch.cat([ids, ids.new_full((3,), -1)])[:, None])


def some_rows(plan: RoutingPlan, c: int, layout: str, fp8: str = "e4m3", **how: Any) -> Fp8Tensor:
    count = plan.rows if layout == "gemm" else plan.tokens
    return ops.quantize(torch.randn(count, c), scale_layout=layout, fp8_dtype=fp8, **how)


def by_row(t: Fp8Tensor, plan: RoutingPlan) -> Tensor:
    """[R, C] in float64: rows at their experts, zero on padding."""
    values = codes(t) * scales(t).repeat_interleave(128, 1)[:, : t.shape[1]]
    there = plan.token_of_row.long()
    if t.scale_layout == "row":
        values = (
            values[there.clamp(0, len(values) - 1)]
            if len(values)
            else values.new_zeros(len(there), t.shape[1])
        )
    owned = owners(plan) >= 0
    return values * owned[:, None] if len(values) else values


def owners(plan: RoutingPlan) -> Tensor:
    """The expert of each row; -1 of padding."""
    owner = torch.full((plan.rows,), -1)
    for e in range(plan.experts):
        first = int(plan.row_offsets[e])
        owner[first : first + int(plan.tokens_per_expert[e])] = e
    return owner


def parts_of(x: Tensor, scale_inv: Tensor, fp8: str, of_w2: bool) -> Tensor:
    """The codes of x [..., r] and of what they left, side by side; bytes."""
    rank = x.shape[-1]
    columns = (rank + 15) // 16 * 16
    scaled = torch.nn.functional.pad(x, (0, columns - rank)) / scale_inv
    high = scaled.to(FP8[fp8])
    low = (scaled - high.float()).to(FP8[fp8])
    few = [high, high, low] if of_w2 else [high, low, high]
    many = [high, high] if of_w2 else [high, low]
    return torch.cat([t.view(torch.uint8) for t in (few if columns <= 32 else many)], -1)


def factor_of(e: int, rank: int, c: int, rank_first: bool) -> Tensor:
    shape = (e, rank, c) if rank_first else (e, c, rank)
    return torch.randn(shape).mul(c**-0.5).bfloat16()


def check_project(
    plan: RoutingPlan, rows: Fp8Tensor, factor: Tensor, rank_first: bool, scale: Any = "pow2"
) -> None:
    rank = factor.shape[1 if rank_first else 2]
    out = ops.lora_project(rows, factor, plan, rank_first=rank_first, scaling=0.75, scale=scale)
    again = ops.lora_project(rows, factor, plan, rank_first=rank_first, scaling=0.75, scale=scale)
    end = int(plan.row_offsets[-1])
    assert torch.equal(out.u[:end], again.u[:end])
    u_q, same = (t.u_q.data.view(torch.uint8)[:end] for t in (out, again))
    assert torch.equal(u_q, same)
    owner, exact = owners(plan), by_row(rows, plan)
    a = factor.double() if rank_first else factor.double().mT
    for row in range(end):
        if owner[row] < 0:
            assert not out.u[row].any()
            assert not u_q[row].any()
    live = owner >= 0
    want = 0.75 * torch.einsum("rc,rjc->rj", exact[live], a[owner[live]])
    size = 0.75 * torch.einsum("rc,rjc->rj", exact[live].abs(), a[owner[live]].abs())
    error = (out.u[live].double() - want).abs()
    assert (error <= 2.0**-8 * want.abs() + 2.0**-16 * size).all()
    # The parts are those of u as it was rounded.
    scale_inv = out.u_q.scale_inv[0, :end, None]
    u = out.u[:end].float()
    if scale != "fp32":  # whose values are multiplied by 1 / scale_inv, rounded
        assert torch.equal(u_q, parts_of(u, scale_inv, rows.fp8_dtype, False))
    high, low = out.u_q.data[:end].float().split((rank + 15) // 16 * 16, -1)[:2]
    bits = 8 if rows.fp8_dtype == "e4m3" else 6
    left = ((high + low) * scale_inv)[:, :rank] - u
    assert (left.abs() <= 2.0**-bits * u.abs() + 2.0**-17 * u.abs().amax(1, keepdim=True)).all()
    top = u.abs().amax(1)
    largest = torch.finfo(FP8[rows.fp8_dtype]).max
    assert (top <= largest * scale_inv[:, 0] * 1.001).all()
    assert (top[top > 0] > 0.49 * largest * scale_inv[:, 0][top > 0]).all()


@pytest.mark.parametrize("rank_first", [True, False])
@pytest.mark.parametrize("layout", ["row", "gemm"])
@pytest.mark.parametrize("rank", RANKS)
def test_project(rank: int, layout: str, rank_first: bool) -> None:
    plan = some_plan(COUNTS["ragged"], layout)
    check_project(
        plan, some_rows(plan, 272, layout), factor_of(5, rank, 272, rank_first), rank_first
    )


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("c", [16, 128, 656])
@pytest.mark.parametrize("layout", ["row", "gemm"])
def test_project_sizes(layout: str, c: int, counts: str) -> None:
    plan = some_plan(COUNTS[counts], layout)
    check_project(plan, some_rows(plan, c, layout), factor_of(plan.experts, 16, c, True), True)


@pytest.mark.parametrize("rank_first", [True, False])
@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
def test_project_gradients_and_scales(scale: str, rank_first: bool) -> None:
    plan = some_plan(COUNTS["ragged"], "gemm", align=16)
    rows = some_rows(plan, 384, "gemm", "e5m2", scale=scale)
    check_project(plan, rows, factor_of(5, 16, 384, rank_first), rank_first, scale)


def check_wgrad(plan: RoutingPlan, u: Tensor, rows: Fp8Tensor) -> None:
    owner, exact = owners(plan), by_row(rows, plan)
    c, rank = rows.shape[1], u.shape[1]
    for rank_first in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            shape = (plan.experts, rank, c) if rank_first else (plan.experts, c, rank)
            out = poisoned(shape, dtype)
            ops.lora_wgrad(u, rows, plan, rank_first=rank_first, out=out)
            alone = ops.lora_wgrad(u, rows, plan, rank_first=rank_first, out_dtype=dtype)
            assert torch.equal(out, alone)
            for e in range(plan.experts):
                mine = owner == e
                left, right = u[mine].double(), exact[mine]
                want, size = left.T @ right, left.abs().T @ right.abs()
                got = (out[e] if rank_first else out[e].T).double()
                rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
                allowed = rounding * want.abs() + 2.0**-15 * size
                if not rows.pow2:  # u times a scale is rounded
                    allowed += 2.0**-8 * size
                assert ((got - want).abs() <= allowed).all()
                if not mine.any():
                    assert not got.any()


@pytest.mark.parametrize("layout", ["row", "gemm"])
@pytest.mark.parametrize("rank", RANKS)
def test_wgrad(rank: int, layout: str) -> None:
    plan = some_plan(COUNTS["ragged"], layout)
    u = torch.randn(plan.rows, rank).bfloat16()
    check_wgrad(plan, u, some_rows(plan, 272, layout))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("c", [16, 128, 656])
@pytest.mark.parametrize("layout", ["row", "gemm"])
def test_wgrad_sizes(layout: str, c: int, counts: str) -> None:
    plan = some_plan(COUNTS[counts], layout)
    u = torch.randn(plan.rows, 16).bfloat16()
    check_wgrad(plan, u, some_rows(plan, c, layout))


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_wgrad_of_gradients_leaves_padding_out(scale: str) -> None:
    plan = some_plan(COUNTS["ragged"], "gemm", align=16)
    u = torch.randn(plan.rows, 16).bfloat16()
    u[owners(plan) < 0] = torch.nan
    check_wgrad(plan, u, some_rows(plan, 384, "gemm", "e5m2", scale=scale))


SIZES = {  # by columns of 128 of a factor, or by rows of u
    "large": [1e30],
    "small": [1e-30],
    "growing": [1e-6, 1.0, 1e6],
    "shrinking": [1e6, 1.0, 1e-2],
}


@pytest.mark.parametrize("rank_first", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_project_of_any_size(size: str, rank_first: bool) -> None:
    """Whatever a 16-bit float of the products would hold."""
    plan, by = some_plan(COUNTS["ragged"], "gemm"), torch.tensor(SIZES[size])
    rows, factor = some_rows(plan, 384, "gemm"), factor_of(5, 16, 384, rank_first)
    by = by.repeat(3)[:3].repeat_interleave(128)
    factor = (factor.float() * (by if rank_first else by[:, None])).bfloat16()
    u = ops.lora_project(rows, factor, plan, rank_first=rank_first).u
    owner, exact = owners(plan), by_row(rows, plan)
    a = (factor if rank_first else factor.mT).double()
    live = owner >= 0
    want = torch.einsum("rc,rjc->rj", exact[live], a[owner[live]])
    scale = torch.einsum("rc,rjc->rj", exact[live].abs(), a[owner[live]].abs())
    assert ((u[live].double() - want).abs() <= 2.0**-8 * want.abs() + 2.0**-16 * scale).all()


@pytest.mark.parametrize("size", SIZES)
def test_wgrad_of_any_size(size: str) -> None:
    plan, by = some_plan(COUNTS["ragged"], "gemm"), torch.tensor(SIZES[size])
    u = torch.randn(plan.rows, 16) * by.repeat(plan.rows)[: plan.rows].sort().values[:, None]
    if size == "shrinking":
        u = u.flip(0)
    check_wgrad(plan, u.bfloat16(), some_rows(plan, 272, "gemm"))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_row_that_is_not_finite_spoils_its_rank_alone(bad: float) -> None:
    plan = some_plan(COUNTS["even"], "gemm")
    rows, u = some_rows(plan, 256, "gemm"), torch.randn(plan.rows, 16).bfloat16()
    want = ops.lora_wgrad(u, rows, plan)
    u[5, 3] = bad
    got = ops.lora_wgrad(u, rows, plan)
    assert not got[0, 3].isfinite().all()
    others = torch.arange(16) != 3
    assert ((got - want)[:, others].abs() <= 2.0**-7 * want[:, others].abs() + 1e-5).all()


@pytest.mark.parametrize("rank_first", [True, False])
@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
@pytest.mark.parametrize("c", [16, 384, 400])
@pytest.mark.parametrize("rank", RANKS)
def test_quantize_lora(rank: int, c: int, scale: Any, rank_first: bool) -> None:
    factor = factor_of(3, rank, c, rank_first)
    factor[0] = 0
    w2 = ops.quantize_lora(factor, rank_first=rank_first, scale=scale)
    b = (factor.mT if rank_first else factor).float()
    scale_inv = w2.scale_inv.repeat_interleave(128, 1)[:, :c]
    if scale != "fp32":  # whose values are multiplied by 1 / scale_inv, rounded
        assert torch.equal(w2.data.view(torch.uint8), parts_of(b, scale_inv, "e4m3", True))
    columns = (rank + 15) // 16 * 16
    high, *_, low = w2.data.float().split(columns, -1)
    got = (high + low if rank <= 32 else high) * scale_inv
    top = b.abs().amax((1, 2), keepdim=True)
    bound = 2.0**-8 * b.abs() + 2.0**-17 * top if rank <= 32 else 2.0**-4 * b.abs() + top * 2.0**-18
    assert ((got[..., :rank] - b).abs() <= bound).all()
    assert not got[..., rank:].any()


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("k2", [16, 48, 96, 128])
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_gemm_adds_a_second_pair(counts: str, k2: int, fp8: str) -> None:
    """The same bits as one pair of operands, where the first one's K is whole blocks."""
    plan = plan_of(COUNTS[counts], spare=5)
    n, k = 336, 256
    a, a2 = (noise(plan.rows, depth, layout="gemm", fp8=fp8) for depth in (k, k2))
    w, w2 = (noise(plan.experts, n, depth, layout="block") for depth in (k, k2))
    out = poisoned((plan.rows, n), torch.bfloat16)
    d = ops.grouped_gemm(a, w, plan, a2=a2, w2=w2, out=out.clone())

    def beside(one: Fp8Tensor, two: Fp8Tensor, scale: Tensor) -> Fp8Tensor:
        data = torch.cat([t.data.view(torch.uint8) for t in (one, two)], -1)
        return Fp8Tensor(data.view(one.data.dtype), scale, one.scale_layout)

    wide = ops.grouped_gemm(
        beside(a, a2, torch.cat([a.scale_inv, a2.scale_inv])),
        beside(w, w2, torch.cat([w.scale_inv, w2.scale_inv], -1)),
        plan,
        out=out.clone(),
    )
    assert torch.equal(d, wide)


@pytest.mark.parametrize("n", [16, 128, 400])
@pytest.mark.parametrize("k", [16, 144, 1168])
def test_grouped_gemm_with_a_second_pair_off_the_tile(k: int, n: int) -> None:
    plan = plan_of([130, 0, 65, 1])
    a, a2 = noise(plan.rows, k, layout="gemm"), noise(plan.rows, 48, layout="gemm")
    w, w2 = noise(4, n, k, layout="block"), noise(4, n, 48, layout="block")
    d = ops.grouped_gemm(a, w, plan, a2=a2, w2=w2, out_dtype="float32")

    def whole(t: Fp8Tensor, more: Fp8Tensor) -> tuple[Tensor, Tensor]:
        pad = -k % 128
        return (
            torch.cat([torch.nn.functional.pad(codes(t), (0, pad)), codes(more)], -1),
            torch.cat([scales(t), scales(more)], -1),
        )

    left, right = whole(a, a2), whole(w, w2)
    for e in range(4):
        rows = slice(int(plan.row_offsets[e]), int(plan.row_offsets[e + 1]))
        truth = gemm_truth(left[0][rows], left[1][rows], right[0][e], right[1][e])
        assert_gemm(d[rows], truth)


def test_a_low_rank_term_in_the_gemm() -> None:
    """x W^T + s (x A^T) B^T: what is left of the term's error is a thousandth of the term."""
    plan = some_plan([100, 0, 200, 33], "row")
    x, w = torch.randn(plan.tokens, 256), torch.zeros(4, 128, 256)
    rows, q = ops.quantize(x), ops.quantize_weight(w, transposed=False)
    a, b = factor_of(4, 16, 256, True), factor_of(4, 16, 128, False)
    u_q = ops.lora_project(rows, a, plan, scaling=2.0).u_q
    d = ops.grouped_gemm(ops.permute_pad(rows, plan)[0], q, plan, a2=u_q, w2=ops.quantize_lora(b))
    owner, exact = owners(plan), by_row(rows, plan)
    want = 2 * torch.einsum("rc,rjc,rnj->rn", exact, a.double()[owner], b.double()[owner])
    d, want = d[owner >= 0], want[owner >= 0]
    assert (d.double() - want).norm() < 4e-3 * want.norm()


def small() -> dict[str, Any]:
    plan = plan_of([4, 4])
    return {
        "plan": plan,
        "rows": noise(8, 32, layout="gemm"),
        "factor": factor_of(2, 16, 32, True),
        "u": torch.randn(8, 16).bfloat16(),
    }


@pytest.mark.parametrize(
    ("of", "change", "rule"),
    [
        ("lora_project", {"factor": torch.zeros(2, 12, 32).bfloat16()}, "the rank must be a multi"),
        ("lora_project", {"factor": torch.zeros(2, 72, 32).bfloat16()}, "the rank must be a multi"),
        ("lora_project", {"factor": torch.zeros(2, 16, 32)}, "factor must be one of bfloat16"),
        (
            "lora_project",
            {"factor": torch.zeros(3, 16, 32).bfloat16()},
            "factor must be .2, 16, 32",
        ),
        ("lora_project", {"rank_first": False}, "factor must be .2, 32, 32"),
        ("lora_project", {"rows": noise(7, 32, layout="gemm")}, "rows must be .8, 32"),
        ("lora_project", {"rows": noise(8, 32, layout="block")}, "rows must have scale layout"),
        ("lora_wgrad", {"u": torch.zeros(8, 12).bfloat16()}, "the rank must be a multiple of 8"),
        ("lora_wgrad", {"u": torch.zeros(8, 16)}, "u must be one of bfloat16"),
        ("lora_wgrad", {"u": torch.zeros(7, 16).bfloat16()}, "u must be .8, 16"),
        ("lora_wgrad", {"rows": noise(8, 32, layout="block")}, "rows must have scale layout"),
    ],
)
def test_refused(of: str, change: dict[str, Any], rule: str) -> None:
    given = small()
    given.pop("u" if of == "lora_project" else "factor")
    if of == "lora_project":
        u_q = noise(8, 48, layout="gemm")
        out: Any = (poisoned((8, 16), torch.bfloat16), dataclasses.replace(u_q, pow2=True))
        before = u_q.data.view(torch.uint8).clone()
    else:
        out = poisoned((2, 16, 32), torch.bfloat16)
    with pytest.raises(ValueError, match=rf"\[{of}\] {rule}"):
        getattr(ops, of)(**given | change, out=out)
    if of == "lora_project":
        assert torch.equal(out[1].data.view(torch.uint8), before)
        out = out[0]
    assert torch.equal(out, torch.full_like(out, -3.0))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"w2": None}, "a2 and w2 must be given together; got a2 alone"),
        ({"a2": None}, "a2 and w2 must be given together; got w2 alone"),
        ({"a2": noise(8, 48, layout="gemm", fp8="e5m2")}, r"a2 \(the format of a\) must be"),
        ({"a2": noise(7, 48, layout="gemm")}, "a2 must be .8, 48"),
        ({"w2": noise(2, 16, 32, layout="block")}, "w2 must be .2, 16, 48"),
        ({"w2": noise(2, 16, 48, layout="block", fp8="e5m2")}, "w2 must be float8_e4m3fn"),
        (
            {"a2": noise(8, 144, layout="gemm"), "w2": noise(2, 16, 144, layout="block")},
            "K2 must be 16 to 128",
        ),
    ],
)
def test_grouped_gemm_refuses_a_second_pair(change: dict[str, Any], rule: str) -> None:
    given: dict[str, Any] = {
        "a": noise(8, 32, layout="gemm"),
        "w": noise(2, 16, 32, layout="block"),
        "plan": plan_of([4, 4]),
        "a2": noise(8, 48, layout="gemm"),
        "w2": noise(2, 16, 48, layout="block"),
    }
    out = poisoned((8, 16), torch.bfloat16)
    with pytest.raises(ValueError, match=rf"\[grouped_gemm\] {rule}"):
        ops.grouped_gemm(**given | change, out=out)
    assert torch.equal(out, torch.full_like(out, -3.0))


def test_quantize_lora_refuses() -> None:
    with pytest.raises(ValueError, match=r"\[quantize_lora\] the rank must be a multiple of 8"):
        ops.quantize_lora(torch.zeros(2, 32, 12).bfloat16())
    with pytest.raises(ValueError, match=r"\[quantize_lora\] factor.shape\[1\] must be a mult"):
        ops.quantize_lora(torch.zeros(2, 24, 16).bfloat16())
