"""permute_pad, unpermute_unpad and their backwards, against index arithmetic in plain torch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backends import ROUTINGS, awkward, check, plan_of
from fp8moe_cutlass import Fp8Tensor, RoutingPlan, autograd
from fp8moe_cutlass.tools.verify import reference
from on_device import CPU_ONLY, LARGE, ops

pytestmark = pytest.mark.usefixtures("device")

ALIGNS = [1, 16, 32, 128]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Case:
    """A routing, its plan, and where the plain references find things."""

    ids: Tensor  # [T, S], -1: none
    plan: RoutingPlan
    rows: Tensor  # (token, slot) of each defined row [rows, 2]; -1 on padding

    @property
    def valid(self) -> Tensor:
        return self.rows[:, 0] >= 0

    @property
    def tokens(self) -> Tensor:
        return self.rows[:, 0].clamp(min=0)

    @property
    def slots(self) -> Tensor:
        return self.rows[:, 1].clamp(min=0)

    def gathered(self, x: Tensor) -> Tensor:
        """x[token] for each defined row, zero in padding rows: permute, then pad."""
        rows = x[self.tokens]
        rows[~self.valid] = 0
        return rows


def case(ids: Tensor, experts: int, align: int = 1, capacity: int | None = None) -> Case:
    limit = ids.numel() if capacity is None else capacity
    plan = ops.route(experts, topk_idx=ids, align=align, capacity=capacity)
    want = reference.route(ids.numpy(), experts, align, limit)
    return Case(ids, plan, torch.from_numpy(want.sources()))


def random_ids(kind: str, tokens: int = 57) -> Tensor:
    ids = torch.rand(tokens, 6).topk(3).indices
    if kind == "dropped":
        ids[torch.rand(ids.shape) < 0.4] = -1
    elif kind == "one expert":
        ids[:] = 2
    elif kind == "twice":
        ids[:, 2] = ids[:, 0]
    elif kind == "empty experts":
        ids = ids // 2 * 2
    return ids


KINDS = ["random", "dropped", "one expert", "twice", "empty experts"]


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


# ---- permute_pad --------------------------------------------------------------------------------


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize("kind", KINDS)
def test_permute_is_gather_then_pad(kind: str, align: int) -> None:
    c = case(random_ids(kind), 6, align)
    for dtype in DTYPES:
        x, probs = torch.randn(57, 48).to(dtype), torch.rand(57, 3)
        y, row_probs = ops.permute_pad(x, c.plan, probs)
        assert torch.equal(bits(y[: len(c.rows)]), bits(c.gathered(x)))
        expected = torch.where(c.valid, probs[c.tokens, c.slots], 0.0)
        assert torch.equal(row_probs[: len(c.rows)], expected)
        alone, none = ops.permute_pad(x, c.plan)
        assert none is None
        assert torch.equal(bits(alone[: len(c.rows)]), bits(y[: len(c.rows)]))


@pytest.mark.parametrize("in_layout", ["row", "gemm"])
@pytest.mark.parametrize("out_layout", ["row", "gemm"])
@pytest.mark.parametrize("fp8_dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("align", [1, 16, 128])
def test_permute_fp8(align: int, fp8_dtype: str, out_layout: str, in_layout: str) -> None:
    """Codes and scales move; both are 0 in padding rows. A last partial tile (336 = 2.6 x 128)."""
    c = case(random_ids("dropped"), 6, align)
    x = torch.randn(57, 336) * torch.exp2(torch.randint(-9, 9, (57, 1)).float())
    q = ops.quantize(x, fp8_dtype=fp8_dtype, scale_layout=in_layout)
    scale = q.scale_inv[:, :57].T if in_layout == "gemm" else q.scale_inv
    probs = torch.rand(57, 3)
    y, row_probs = ops.permute_pad(q, c.plan, probs, scale_layout=out_layout)
    n = len(c.rows)
    got_scale = y.scale_inv[:, :n].T if out_layout == "gemm" else y.scale_inv[:n]
    assert torch.equal(y.data.view(torch.uint8)[:n], c.gathered(q.data.view(torch.uint8)))
    assert torch.equal(got_scale, c.gathered(scale))
    assert torch.equal(row_probs[:n], torch.where(c.valid, probs[c.tokens, c.slots], 0.0))
    assert (y.fp8_dtype, y.scale_layout) == (fp8_dtype, out_layout)


@pytest.mark.parametrize("layout", ["row", "gemm"])
def test_rows_of_prob_0_are_padding_when_asked(layout: str) -> None:
    """Data and scale are zero there, the prob is what it was; without the word they move."""
    c = case(random_ids("dropped"), 6, align=16)
    x, probs = torch.randn(57, 336), torch.rand(57, 3)
    probs[torch.rand(57, 3) < 0.4] = 0.0
    probs[3] = -0.0
    n, q = len(c.rows), ops.quantize(x)
    weighted = c.valid & (probs[c.tokens, c.slots] != 0)
    assert 0 < int(weighted.sum()) < int(c.valid.sum())

    y, row_probs = ops.permute_pad(x, c.plan, probs, zero_unweighted=True)
    assert torch.equal(y[:n], c.gathered(x) * weighted[:, None])
    assert torch.equal(row_probs[:n], ops.permute_pad(x, c.plan, probs)[1][:n])
    y8, _ = ops.permute_pad(q, c.plan, probs, scale_layout=layout, zero_unweighted=True)
    scale = y8.scale_inv[:, :n].T if layout == "gemm" else y8.scale_inv[:n]
    assert torch.equal(scale, c.gathered(q.scale_inv) * weighted[:, None])
    codes = c.gathered(q.data.view(torch.uint8)) * weighted[:, None]
    assert torch.equal(y8.data.view(torch.uint8)[:n], codes)
    with pytest.raises(ValueError, match=r"\[permute_pad\] zero_unweighted needs probs"):
        ops.permute_pad(x, c.plan, zero_unweighted=True)


def test_rows_past_the_plan_are_not_written() -> None:
    c = case(torch.tensor([[0], [1], [-1], [1]]), 4, align=16)
    y = torch.full((c.plan.rows, 16), 7.0)
    row_probs = torch.full((c.plan.rows,), 7.0)
    assert c.plan.rows > 48  # more than this routing needs
    ops.permute_pad(torch.randn(4, 16), c.plan, torch.rand(4, 1), out=(y, row_probs))
    assert (y[32:] == 7).all()
    assert (row_probs[32:] == 7).all()
    assert (y[1:16] == 0).all()
    assert (y[18:32] == 0).all()


def test_capacity_drops_the_last_ranks() -> None:
    """What did not fit has no row: the rest of the tensor is as if it had not been routed."""
    c = case(random_ids("random"), 6, 16, capacity=100)
    x = torch.randn(57, 32)
    y, _ = ops.permute_pad(x, c.plan)
    assert torch.equal(y[: len(c.rows)], c.gathered(x))
    out = ops.unpermute_unpad(y, c.plan)
    kept = (c.plan.row_of >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(out, x * kept)
    assert int(kept.sum()) == 100


def test_masks() -> None:
    mask = torch.rand(40, 5) < 0.4
    plan = ops.route(5, routing_map=mask, capacity=int(mask.sum()), align=16)
    ids = torch.where(mask, torch.arange(5), -1)
    want = reference.route(ids.numpy(), 5, 16, int(mask.sum()))
    c = Case(mask, plan, torch.from_numpy(want.sources()))
    x, probs = torch.randn(40, 32), torch.rand(40, 5)
    y, row_probs = ops.permute_pad(x, plan, probs)
    n = len(c.rows)
    assert torch.equal(y[:n], c.gathered(x))
    assert torch.equal(row_probs[:n], torch.where(c.valid, probs[c.tokens, c.slots], 0.0))
    out = ops.unpermute_unpad(y, plan, probs)
    torch.testing.assert_close(out, x * (probs * mask).sum(1, keepdim=True))


def test_from_counts_moves_packed_rows() -> None:
    counts = torch.tensor([5, 0, 130, 1])
    plan = ops.plan_from_counts(counts, capacity=150, align=32)
    packed = torch.randn(150, 16)
    y, _ = ops.permute_pad(packed, plan)
    start = plan.row_offsets.tolist()
    want = packed[:136].split(counts.tolist())
    for e, rows in enumerate(want):
        assert torch.equal(y[start[e] : start[e] + len(rows)], rows)
        assert (y[start[e] + len(rows) : start[e + 1]] == 0).all()
    back = ops.unpermute_unpad(y, plan)
    assert torch.equal(back[:136], packed[:136])
    assert (back[136:] == 0).all()


# ---- sums ---------------------------------------------------------------------------------------


def slot_sum(y: Tensor, plan: RoutingPlan, probs: Tensor | None) -> Tensor:
    """Slots ascending, a fused multiply-add each, in float64 rounded to float32 at every step."""
    sum = torch.zeros(plan.tokens, y.shape[1])
    for s in range(plan.slots):
        row = plan.row_of[:, s].long()
        term = y[row.clamp_min(0)].double()
        if probs is not None:
            term = term * probs[:, s, None].double()  # exact: 24 bits times at most 24
        sum = torch.where(row[:, None] < 0, sum, (sum.double() + term).float())
    return sum.to(y.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_unpermute_sums_slots_in_order(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit: float64 holds the product of a 16-bit value and a float32, and all but holds its
    sum with a float32 (a second rounding that matters is far rarer than this test's sizes)."""
    c = case(random_ids(kind), 6, 16)
    y, probs = torch.randn(c.plan.rows, 624).to(dtype), torch.rand(57, 3)
    assert torch.equal(
        bits(ops.unpermute_unpad(y, c.plan, probs)), bits(slot_sum(y, c.plan, probs))
    )
    expected = bits(slot_sum(y, c.plan, None))
    assert torch.equal(bits(ops.unpermute_unpad(y, c.plan)), expected)
    narrow = y[:, :12].float()
    expected_narrow = slot_sum(narrow, c.plan, None)
    assert torch.equal(ops.unpermute_unpad(narrow, c.plan), expected_narrow)
    row_grads = torch.randn(c.plan.rows)
    dx, dprobs = ops.permute_pad_backward(y, c.plan, row_grads)
    assert torch.equal(bits(dx), expected)
    row = c.plan.row_of.long()
    assert torch.equal(dprobs, torch.where(row < 0, 0.0, row_grads[row.clamp_min(0)]))


def tree_dot(a: Tensor, b: Tensor) -> Tensor:
    """The pinned order of common/reduce.h: neighbours added in tiles of 128, tiles ascending."""
    terms = a.float() * b.float()
    terms = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % 128))
    tiles = terms.unflatten(-1, (-1, 128))
    while tiles.shape[-1] > 1:
        tiles = tiles[..., 0::2] + tiles[..., 1::2]
    sum = torch.zeros(terms.shape[:-1])
    for j in range(tiles.shape[-2]):
        sum = sum + tiles[..., j, 0]
    return sum


@pytest.mark.parametrize(
    ("width", "dtype"), [*product([16, 128, 720], DTYPES), (4, torch.float32), (532, torch.float32)]
)
def test_unpermute_backward(width: int, dtype: torch.dtype) -> None:
    for kind in KINDS:
        c = case(random_ids(kind), 6, 16)
        dout, y = torch.randn(57, width).to(dtype), torch.randn(c.plan.rows, width).to(dtype)
        probs, n = torch.rand(57, 3), len(c.rows)
        dy, dprobs = ops.unpermute_unpad_backward(dout, c.plan, y, probs)
        scaled = probs[c.tokens, c.slots, None] * dout[c.tokens].float()
        scaled[~c.valid] = 0
        assert torch.equal(bits(dy[:n]), bits(scaled.to(dtype)))
        row = c.plan.row_of.long()
        dots = tree_dot(y[row.clamp_min(0)], dout[:, None])
        assert torch.equal(dprobs, torch.where(row < 0, 0.0, dots))
        moved, none = ops.unpermute_unpad_backward(dout, c.plan)
        assert none is None
        assert torch.equal(bits(moved[:n]), bits(c.gathered(dout)))


# ---- together -----------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_unpermute_undoes_permute(data: st.DataObject) -> None:
    """out[t] = (kept slots of t) x[t], exactly: small integers, for any routing."""
    experts = data.draw(st.integers(1, 12))
    tokens, slots = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 6))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    ids = torch.randint(-1, experts, (tokens, slots), generator=g)
    capacity = data.draw(st.one_of(st.none(), st.integers(0, tokens * slots)))
    plan = ops.route(
        experts, topk_idx=ids, align=data.draw(st.sampled_from(ALIGNS)), capacity=capacity
    )
    x = torch.randint(-16, 17, (tokens, 16 * data.draw(st.integers(1, 20))), generator=g)
    x = x.to(data.draw(st.sampled_from(DTYPES)))
    y, _ = ops.permute_pad(x, plan)
    out = ops.unpermute_unpad(y, plan)
    assert torch.equal(out, x * (plan.row_of >= 0).sum(1, keepdim=True))


def test_gradients_are_autograds() -> None:
    """Of out[t] = sum_s p[t,s] w[row] * x[t] in plain torch and float64, w standing for experts."""
    c = case(random_ids("dropped", tokens=31), 6, 16)
    x = torch.randn(31, 64, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(31, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(c.plan.rows, 64, dtype=torch.float64)
    dout = torch.randn(31, 64, dtype=torch.float64)
    row = c.plan.row_of.long()
    terms = probs[..., None] * w[row.clamp_min(0)] * x[:, None]
    torch.where(row[..., None] < 0, 0.0, terms).sum(1).backward(dout)

    y, _ = ops.permute_pad(x.detach().float(), c.plan)
    y *= w
    dy, dprobs = ops.unpermute_unpad_backward(dout.float(), c.plan, y, probs.detach().float())
    dx, _ = ops.permute_pad_backward(dy * w.float(), c.plan)
    torch.testing.assert_close(dx.double(), x.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dprobs.double(), probs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["permute_pad", "permute_pad of FP8", "unpermute_unpad"])
def test_a_second_derivative_is_refused(name: str) -> None:
    """Also past a constant gradient."""
    plan = case(random_ids("dropped", tokens=31), 6, 16).plan
    probs = torch.rand(31, 3, requires_grad=True)
    if name == "unpermute_unpad":
        out = autograd.unpermute_unpad(torch.randn(plan.rows, 128), plan, probs)
    else:
        x = torch.randn(31, 128)
        of_fp8 = name == "permute_pad of FP8"
        _, out = autograd.permute_pad(ops.quantize(x) if of_fp8 else x, plan, probs)
    with pytest.raises(RuntimeError, match="has no second derivative; got create_graph=True"):
        torch.autograd.grad(out.sum(), probs, create_graph=True)


def test_no_tokens() -> None:
    plan = ops.route(3, topk_idx=torch.zeros(0, 2, dtype=torch.int32), align=16)
    x, probs = torch.zeros(0, 32), torch.zeros(0, 2)
    y, row_probs = ops.permute_pad(x, plan, probs)
    assert (y.shape, row_probs.shape) == ((0, 32), (0,))
    assert ops.unpermute_unpad(y, plan, probs).shape == (0, 32)
    dy, dprobs = ops.unpermute_unpad_backward(x, plan, y, probs)
    assert (dy.shape, dprobs.shape) == ((0, 32), (0, 2))
    dx, _ = ops.permute_pad_backward(y, plan, row_probs)
    assert dx.shape == (0, 32)


def test_all_dropped() -> None:
    plan = ops.route(3, topk_idx=torch.full((5, 2), -1), align=16)
    y = torch.full((plan.rows, 32), torch.nan)
    assert (ops.unpermute_unpad(y, plan, torch.rand(5, 2)) == 0).all()
    _, dprobs = ops.unpermute_unpad_backward(torch.randn(5, 32), plan, y, torch.rand(5, 2))
    assert (dprobs == 0).all()


# ---- bad input ----------------------------------------------------------------------------------


def test_bad_input_is_an_error_and_writes_nothing() -> None:
    c = case(random_ids("random"), 6, 16)
    plan, rows = c.plan, c.plan.rows
    x, y, probs = torch.randn(57, 32), torch.full((rows, 32), 7.0), torch.rand(57, 3)
    q = ops.quantize(x)
    gemm = ops.quantize(x, scale_layout="gemm")
    bad = [
        (r"x must be \[57, 32\]; got \[56, 32\]", lambda: ops.permute_pad(x[:56], plan)),
        ("x must have 2 dim", lambda: ops.permute_pad(x[0], plan, out=(y, None))),
        ("multiple of 16; got 24", lambda: ops.permute_pad(x[:, :24].contiguous(), plan)),
        ("one of float32, float16, bfloat16; got int32", lambda: ops.permute_pad(x.int(), plan)),
        ("y must be", lambda: ops.permute_pad(x, plan, out=(y[:-1], None))),
        ("y must be one of float32", lambda: ops.permute_pad(x, plan, out=(y.half(), None))),
        ("probs must be", lambda: ops.permute_pad(x, plan, probs[:, :2].contiguous())),
        ("probs must be one of float32", lambda: ops.permute_pad(x, plan, probs.half())),
        (r"\] probs must .* got float64", lambda: ops.permute_pad(x, plan, probs.double())),
        (
            r"\] probs must .* got float64",
            lambda: ops.unpermute_unpad_backward(x, plan, y, probs.double()),
        ),
        (
            r"\] row_dprobs must .* got float64",
            lambda: ops.permute_pad_backward(y, plan, torch.rand(rows).double()),
        ),
        (
            "scale_inv must be",
            lambda: ops.permute_pad(Fp8Tensor(q.data, gemm.scale_inv, scale_layout="row"), plan),
        ),
        ("y must be", lambda: ops.unpermute_unpad(y[1:], plan)),
        ("multiple of 4; got 6", lambda: ops.unpermute_unpad(y[:, :6].contiguous(), plan)),
        (
            "multiple of 16; got 8",
            lambda: ops.unpermute_unpad(y[:, :8].bfloat16().contiguous(), plan),
        ),
        ("out must be one of", lambda: ops.unpermute_unpad(y, plan, out=x.half())),
        ("given together", lambda: ops.unpermute_unpad_backward(x, plan, probs=probs)),
        ("dy must be", lambda: ops.permute_pad_backward(y[1:], plan)),
        (
            "row_dprobs must be",
            lambda: ops.permute_pad_backward(y, plan, dprobs=probs),
        ),
    ]
    for message, call in bad:
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    assert (y == 7).all()


@CPU_ONLY
def test_outputs_are_aligned_and_apart() -> None:
    plan = case(random_ids("random"), 6, 16).plan
    x, y = torch.randn(57, 32), torch.full((plan.rows, 32), 7.0)
    misaligned = torch.zeros(y.numel() + 1)[1:].view_as(y)
    with pytest.raises(ValueError, match="16 bytes"):
        ops.permute_pad(x, plan, out=(misaligned, None))
    with pytest.raises(ValueError, match="not share memory"):
        ops.unpermute_unpad(y, plan, out=y.view(-1)[: 57 * 32].view(57, 32))
    assert (y == 7).all()


# ---- beside the CPU backend: over poison, twice, bit for bit ------------------------------------


def check_all(plan: RoutingPlan, width: int, dtype: torch.dtype) -> None:
    x, y = awkward(plan.tokens, width, dtype=dtype), awkward(plan.rows, width, dtype=dtype)
    probs, row_grad = torch.rand(plan.tokens, plan.slots), torch.randn(plan.rows)
    check("permute_pad", x, plan)
    check("permute_pad", x, plan, probs)
    check("permute_pad_backward", y, plan)
    check("permute_pad_backward", y, plan, row_grad)
    check("unpermute_unpad", y, plan)
    check("unpermute_unpad", y, plan, probs)
    check("unpermute_unpad_backward", x, plan)
    check("unpermute_unpad_backward", x, plan, y, probs)


@LARGE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("align", [1, 16, 32, 128])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_routings(kind: str, align: int, dtype: torch.dtype) -> None:
    _, plan = plan_of(kind, tokens=150, experts=7, slots=3, align=align)
    for width in (16, 720, 1024):
        check_all(plan, width, dtype)


@LARGE
@pytest.mark.parametrize("out_layout", ["row", "gemm"])
@pytest.mark.parametrize("in_layout", ["row", "gemm"])
@pytest.mark.parametrize("fp8_dtype", ["e4m3", "e5m2"])
def test_fp8_with_scales(fp8_dtype: str, in_layout: str, out_layout: str) -> None:
    """More than 64 scale tiles, a partial last tile, rows off the tile of 32."""
    for kind, align in (("random", 1), ("dropped", 16), ("empty experts", 128)):
        _, plan = plan_of(kind, tokens=333, experts=6, slots=2, align=align)
        for width in (16, 2880, 8448):
            x = awkward(plan.tokens, width)
            q = ops.quantize(x, fp8_dtype=fp8_dtype, scale_layout=in_layout)
            check("permute_pad", q, plan, scale_layout=out_layout)
            probs = torch.rand(plan.tokens, plan.slots)
            check("permute_pad", q, plan, probs, scale_layout=out_layout)
            probs[torch.rand(probs.shape) < 0.5] = 0.0
            check("permute_pad", q, plan, probs, scale_layout=out_layout, zero_unweighted=True)
            check("permute_pad", x, plan, probs, zero_unweighted=True)


@LARGE
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
        q = ops.quantize(awkward(tokens, width), fp8_dtype=draw.choice(("e4m3", "e5m2")))
        check("permute_pad", q, plan, scale_layout=draw.choice(("row", "gemm")))


@LARGE
@pytest.mark.parametrize("align", [1, 128])
def test_model_sizes(align: int) -> None:
    if ops.device.type == "cpu" and align > 1:
        pytest.skip("36,000 rows of 7168: half a minute")
    _, plan = plan_of("random", tokens=512, experts=256, slots=8, align=align)
    check_all(plan, 7168, torch.bfloat16)
    check("permute_pad", ops.quantize(awkward(512, 7168)), plan, torch.rand(512, 8))


@LARGE
@pytest.mark.parametrize("align", [1, 16, 128])
def test_blocks_of_many_warps(align: int) -> None:
    """FP8 rows that all fit in the shared memory of 132 SMs at once, 32 a block; align 128 pads too
    much for that."""
    _, plan = plan_of("random", tokens=4090, experts=32, slots=2, align=align)
    q = ops.quantize(awkward(4090, 7168))
    check("permute_pad", q, plan, torch.rand(4090, 2))
    check("permute_pad", q, plan, scale_layout="row")


@LARGE
def test_rows_in_pieces() -> None:
    """Rows of more than 32 KiB, and their padding, move a piece at a time."""
    for align in (1, 16):
        _, plan = plan_of("dropped", tokens=37, experts=3, slots=2, align=align)
        for width in (8208, 20000):
            check("permute_pad", awkward(37, width, dtype=torch.float32), plan, torch.rand(37, 2))
            q = ops.quantize(awkward(37, 4 * width))
            check("permute_pad", q, plan, scale_layout="row")


def test_infinities_and_nans() -> None:
    _, plan = plan_of("random", tokens=100, experts=4, slots=2, align=16)
    for dtype in DTYPES:
        x, y = awkward(100, 256, dtype=dtype), awkward(plan.rows, 256, dtype=dtype)
        for t in (x, y):
            at = torch.rand(t.shape)
            t[at < 0.01] = float("inf")
            t[at > 0.99] = float("nan")
        probs = torch.rand(100, 2)
        check("unpermute_unpad", y, plan, probs)
        check("unpermute_unpad_backward", x, plan, y, probs)
        check("permute_pad_backward", y, plan)
