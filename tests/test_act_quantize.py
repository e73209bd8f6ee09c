"""act_quantize and its backward against float64, and their quantization against its rule.

What is quantized is known here only up to a few float32 roundings, so codes may be one code off the
float64 reference's, and a scale off by a factor of two where the tile's largest value lies within
8 ulp of a boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import backends
import reference_columns as columns_of
from activations import ACTIVATIONS, GATED, formula
from fp8moe_cutlass import Activation, Fp8Tensor, RoutingPlan
from fp8moe_cutlass.activation import SWIGLU
from fp8moe_cutlass.tools.verify import reference as ref
from on_device import LARGE, ops

pytestmark = pytest.mark.usefixtures("device")

TILE = 128


@dataclass
class Truth:
    """The float64 values: h, and for a gradient dh of h also dz and dprob (without the factor)."""

    h: Tensor
    dz: Tensor
    dprobs: Tensor


def truth(
    z: Tensor,
    dh: Tensor | None = None,
    probs: Tensor | None = None,
    activation: Activation = SWIGLU,
) -> Truth:
    """Autograd of the activation times prob in float64."""
    z64 = z.double().requires_grad_()
    p64 = (torch.ones(z.shape[0]) if probs is None else probs).double().requires_grad_()
    h = formula(z64, activation) * p64[:, None]
    h.backward((torch.zeros_like(h) if dh is None else dh).double())
    assert z64.grad is not None
    assert p64.grad is not None
    return Truth(h.detach(), z64.grad, p64.grad)


def codes_and_scales(q: Fp8Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes [M, K] and scale_inv [M, cdiv(K, 128)]."""
    scale = q.scale_inv[:, : q.shape[0]].T if q.scale_layout == "gemm" else q.scale_inv
    return q.data.view(torch.uint8), scale


def ordinal(codes: Tensor) -> Tensor:
    """Codes as integers that order like their values: neighbours differ by one."""
    magnitude = (codes & 0x7F).int()
    return torch.where(codes >= 0x80, -magnitude, magnitude)


def assert_quantized(q: Fp8Tensor, values: Tensor, scale: str = "pow2") -> None:
    """q is Q(values) [M, K] by 1x128 tiles, up to what float32 arithmetic may do to the values."""
    codes, scale_inv = codes_and_scales(q)
    fmt = ref.FORMATS[str(q.fp8_dtype)]
    want_codes, want_scale = ref.quantize(
        values.float().numpy(), 1, str(q.fp8_dtype), scale, largest=ref.LARGEST["float32"]
    )
    tiles = torch.nn.functional.pad(values.abs(), (0, -values.shape[1] % TILE))
    amax = tiles.unflatten(-1, (-1, TILE)).amax(-1)
    ratio = scale_inv.double() / torch.from_numpy(want_scale).double()
    if scale == "pow2":
        # fmt.maximum / amax is a power of two up to 8 ulp: the scale may fall on either side.
        octave = torch.log2(fmt.maximum / amax.clamp_min(1e-30))
        near = (octave - octave.round()).abs() < 8 * 2.0**-23 / 0.69
        assert ((ratio == 1) | (near & ((ratio == 2) | (ratio == 0.5)))).all()
    else:
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=4e-6, atol=0)
    same = (ratio - 1).abs().repeat_interleave(TILE, 1)[:, : values.shape[1]] < 0.1
    apart = (ordinal(codes) - ordinal(torch.from_numpy(want_codes))).abs()
    assert int(apart[same].max()) <= 1


def awkward(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(rows, width) * torch.exp2(torch.randint(-6, 4, (rows, 1)).float())
    x[torch.rand(rows, width) < 0.03] = 0
    return x.to(dtype)


def plan_of(counts: list[int], align: int = 16) -> RoutingPlan:
    return ops.plan_from_counts(torch.tensor(counts), capacity=sum(counts), align=align)


def valid_rows(plan: RoutingPlan) -> Tensor:
    starts, counts = plan.row_offsets.tolist(), plan.tokens_per_expert.tolist()
    parts = [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=False)]
    return torch.cat(parts)


def padding_rows(plan: RoutingPlan) -> Tensor:
    everything = torch.arange(int(plan.row_offsets[-1]))
    return everything[~torch.isin(everything, valid_rows(plan))]


# ---- forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_forward(dtype: torch.dtype, scale: str) -> None:
    for inner in (16, 128, 368):
        z, probs = awkward(40, 2 * inner, dtype), torch.rand(40)
        for layout in ("row", "gemm"):
            h = ops.act_quantize(z, probs=probs, scale=scale, scale_layout=layout)
            assert_quantized(h, truth(z, probs=probs).h, scale)
        assert_quantized(ops.act_quantize(z, scale=scale), truth(z).h, scale)


@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_clamp(limit: float) -> None:
    z, dh = 4 * torch.randn(50, 512), torch.randn(50, 256)
    limited = Activation(limit=limit)
    want = truth(z, dh, activation=limited)
    assert_quantized(ops.act_quantize(z, activation=limited), want.h)
    dz, *_ = ops.act_quantize_backward(dh, z, activation=limited)
    assert_quantized(dz, want.dz)
    shut = torch.cat([z[:, :256] > limit, z[:, 256:].abs() > limit], 1)
    assert shut.any()
    assert ((dz.data.view(torch.uint8)[shut] & 0x7F) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name: str, dtype: torch.dtype) -> None:
    """Forward, backward and dprobs against float64, at sizes on and off the tile."""
    activation = ACTIVATIONS[name]
    for inner in (16, 128, 176, 384, 704, 1856, 2880):
        z = awkward(40, activation.parts * inner, dtype)
        dh, probs = awkward(40, inner, dtype), torch.rand(40)
        want = truth(z, dh, probs, activation)
        h, z_q = ops.act_quantize(z, probs=probs, activation=activation, save_z=True)
        assert h.shape == (40, inner)
        assert_quantized(h, want.h)
        assert torch.equal(z_q.data.view(torch.uint8), ops.quantize(z).data.view(torch.uint8))
        dz, *_, dprobs = ops.act_quantize_backward(dh, z, probs=probs, activation=activation)
        assert_quantized(dz, want.dz)
        terms = (dh.double() * formula(z.double(), activation)).abs().sum(-1)
        assert ((dprobs - want.dprobs).abs() <= 1e-5 * terms + 1e-30).all()


@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_columns_of_every_activation(name: str, columns: str) -> None:
    """The columns are one quantization of the values; zero tokens and empty experts have none."""
    activation = ACTIVATIONS[name]
    for counts, inner in (([3, 0, 200, 128], 128), ([70], 176), ([0, 0], 256)):
        plan = plan_of(counts)
        z = awkward(plan.rows, activation.parts * inner, torch.bfloat16)
        dh, probs = awkward(plan.rows, inner, torch.bfloat16), torch.rand(plan.rows)
        want = truth(z, dh, probs, activation)
        dz, dz_t, h_t, _ = ops.act_quantize_backward(
            dh, z, plan, probs, columns=columns, activation=activation
        )
        assert dz_t.shape == (activation.parts * inner, plan.columns)
        assert h_t.shape == (inner, plan.columns)
        plain = ops.act_quantize_backward(dh, z, plan, probs, activation=activation)[0]
        used = int(plan.row_offsets[-1])
        for got, rows in zip(codes_and_scales(dz), codes_and_scales(plain), strict=True):
            assert torch.equal(got[:used], rows[:used])
        for q, values in ((dz_t, want.dz), (h_t, want.h)):
            got = q.dequantize("float32")
            for g in columns_of.groups_of(counts, 16):
                exact = values[g.row : g.row + g.tokens].T
                part = got[:, g.col : g.col + g.tokens]
                if exact.numel():
                    most = exact.abs().max()
                    assert ((part - exact).abs() <= exact.abs() / 16 + most * 2.0**-16).all()


@pytest.mark.parametrize("name", [n for n in GATED if ACTIVATIONS[n].limit is not None])
def test_gradients_at_a_limit(name: str) -> None:
    """A value at its limit passes its gradient, as torch.clamp's; what is beyond has none; and an
    infinity is the limit."""
    activation = replace(ACTIVATIONS[name], interleaved=False, limit=2.0)
    beyond = float(torch.nextafter(torch.tensor(2.0), torch.tensor(3.0)))
    ups = [2.0, -2.0, beyond, -beyond, torch.inf, -torch.inf]
    z = torch.full((6, 32), 1.0)
    z[:, 16] = torch.tensor(ups)
    dh = torch.zeros(6, 16)
    dh[:, 0] = 1.0
    dz = ops.act_quantize_backward(dh, z, activation=activation)[0].dequantize("float32")
    assert (dz[:, 16] != 0).tolist() == [True, True, False, False, False, False]
    gates = [2.0, beyond, torch.inf]
    after = activation.kind == "swiglu_limit_after"
    if after:  # silu(2.2268...) = 2
        gates = [2.2, 2.25, torch.inf]
    z = torch.full((3, 32), 1.0)
    z[:, 0] = torch.tensor(gates)
    dz = ops.act_quantize_backward(dh[:3], z, activation=activation)[0].dequantize("float32")
    assert (dz[:, 0] != 0).tolist() == [True, False, False]
    h = ops.act_quantize(z, activation=activation).dequantize("float32")
    z[2, 0] = 2.0 if not after else 50.0
    want = truth(z, activation=activation).h.float()
    torch.testing.assert_close(h[:, 0], want[:, 0], rtol=2**-4, atol=0)


@pytest.mark.parametrize("name", GATED)
def test_interleaved_is_concatenated_taken_apart(name: str) -> None:
    """The same h, dprobs, and values of dz, whose tiles are others."""
    side_by_side = replace(ACTIVATIONS[name], interleaved=False)
    in_turns = replace(ACTIVATIONS[name], interleaved=True)
    z, dh, probs = awkward(40, 352), awkward(40, 176), torch.rand(40)
    turns = z.view(40, 2, 176).mT.reshape(40, 352)
    h = ops.act_quantize(z, probs=probs, activation=side_by_side)
    assert torch.equal(
        h.data.view(torch.uint8),
        ops.act_quantize(turns, probs=probs, activation=in_turns).data.view(torch.uint8),
    )
    *_, dprobs = ops.act_quantize_backward(dh, z, probs=probs, activation=side_by_side)
    dz, *_, same = ops.act_quantize_backward(dh, turns, probs=probs, activation=in_turns)
    assert torch.equal(dprobs, same)
    want = truth(z, dh, probs, side_by_side).dz.view(40, 2, 176).mT.reshape(40, 352)
    assert_quantized(dz, want)


def test_extreme_gates() -> None:
    """silu far out: -0 on the left, the identity on the right; zero and denormal tiles."""
    gates = [0.0, -0.0, 1e-40, -1e-40, 30.0, -30.0, 86.9, -86.9, 88.0, -88.0, 500.0, -500.0, 1e30]
    z = torch.ones(len(gates), 256)
    z[:, :128] = torch.tensor(gates)[:, None]
    h = ops.act_quantize(z, scale="fp32", eps=0.0).dequantize("float32")
    want = truth(z).h.float()
    # One value a tile: nearly exact. The sigmoid is 0 below -87.
    torch.testing.assert_close(h, want, rtol=2**-4, atol=1e-36)


def test_nan_and_inf_stay_in_their_place() -> None:
    z = torch.randn(6, 256)
    z[1, 3], z[2, 130], z[3, 5] = torch.nan, torch.nan, torch.inf
    codes = ops.act_quantize(z).data.view(torch.uint8)
    nan = (codes & 0x7F) == 0x7F
    assert nan.nonzero().tolist() == [[1, 3], [2, 2]]
    assert int(codes[3, 5] & 0x7F) == 0x7E  # saturated
    dz, *_, dprobs = ops.act_quantize_backward(torch.ones(6, 128), z, probs=torch.ones(6))
    assert dprobs.isnan().tolist() == [False, True, True, False, False, False]
    nan = (dz.data.view(torch.uint8) & 0x7F) == 0x7F
    assert nan[1].nonzero().flatten().tolist() == [3, 131]
    assert nan[2].nonzero().flatten().tolist() == [2]  # d up does not see up


def test_saved_z_is_quantize() -> None:
    z = awkward(33, 544, torch.bfloat16)
    _, z_q = ops.act_quantize(z, save_z=True)
    want = ops.quantize(z)
    assert torch.equal(z_q.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(z_q.scale_inv, want.scale_inv)


# ---- backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8_dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_backward(dtype: torch.dtype, scale: str, fp8_dtype: str) -> None:
    """Tiles of dz run over 2I as one row: with I = 368 one of them holds gate and up."""
    for inner in (16, 128, 368):
        z, dh, probs = awkward(40, 2 * inner, dtype), awkward(40, inner, dtype), torch.rand(40)
        want = truth(z, dh, probs)
        dz, *_, dprobs = ops.act_quantize_backward(
            dh, z, probs=probs, scale=scale, fp8_dtype=fp8_dtype
        )
        assert_quantized(dz, want.dz, scale)
        size = truth(z.abs(), dh.abs(), probs).dprobs.abs()
        assert ((dprobs - want.dprobs).abs() <= 1e-5 * size + 1e-30).all()
        alone, *_, none = ops.act_quantize_backward(dh, z, scale_layout="row")
        assert none is None
        assert_quantized(alone, truth(z, dh).dz)


# ---- with a plan: padding and columns -----------------------------------------------------------

COUNTS = [[3, 0, 200, 128], [0, 0, 1], [300]]


@pytest.mark.parametrize("align", [1, 16, 128])
@pytest.mark.parametrize("counts", COUNTS)
def test_padding_rows_are_zero_and_not_read(counts: list[int], align: int) -> None:
    plan = plan_of(counts, align)
    z, dh, probs = awkward(plan.rows, 512), awkward(plan.rows, 256), torch.rand(plan.rows)
    valid, padding = valid_rows(plan), padding_rows(plan)
    z[padding], dh[padding], probs[padding] = torch.nan, torch.nan, torch.nan
    h, z_q = ops.act_quantize(z, plan, probs, save_z=True)
    dz, *_, dprobs = ops.act_quantize_backward(dh, z, plan, probs)
    for q in (h, z_q, dz):
        codes, scale = codes_and_scales(q)
        assert (codes[padding] == 0).all()
        assert (scale[padding] == 0).all()
    assert (dprobs[padding] == 0).all()
    plain = ops.act_quantize(z[valid], probs=probs[valid])
    plain_dz, *_, plain_dprobs = ops.act_quantize_backward(dh[valid], z[valid], probs=probs[valid])
    for q, want in ((h, plain), (dz, plain_dz)):
        for got, expected in zip(codes_and_scales(q), codes_and_scales(want), strict=True):
            assert torch.equal(got[valid], expected)
    assert torch.equal(dprobs[valid], plain_dprobs)


@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("fp8_dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("counts", COUNTS)
def test_columns(counts: list[int], fp8_dtype: str, columns: str) -> None:
    """Columns are one quantization of the values, per expert, zero past its tokens."""
    plan = plan_of(counts)
    inner = 208
    z, dh, probs = awkward(plan.rows, 2 * inner), awkward(plan.rows, inner), torch.rand(plan.rows)
    want = truth(z, dh, probs)
    _dz, dz_t, h_t, _ = ops.act_quantize_backward(
        dh, z, plan, probs, columns=columns, fp8_dtype=fp8_dtype
    )
    groups = columns_of.groups_of(counts, 16)
    used = int(plan.col_offsets[-1])
    for q, values, name in (
        (dz_t, want.dz, fp8_dtype),
        (h_t, want.h, "e4m3"),
    ):
        codes, scale = columns_of.quantize_columns(
            values.float().numpy(), groups, plan.columns, name, columns
        )
        c = values.shape[1]
        got_scale = q.scale_inv if columns == "block" else q.scale_inv[:, :c]
        blocks = used // TILE
        at = np.s_[:, :blocks] if columns == "block" else np.s_[:blocks]
        ratio = got_scale[at].double() / torch.from_numpy(scale[at]).double()
        assert ((ratio == 1) | (ratio == 2) | (ratio == 0.5)).all()
        assert (ratio == 1).double().mean() > 0.99  # next to a power of two either is right
        tiles = ratio.repeat_interleave(TILE, 0)[:c] if columns == "block" else ratio.T
        same = tiles.repeat_interleave(TILE, 1) == 1
        apart = ordinal(q.data.view(torch.uint8)) - ordinal(torch.from_numpy(codes))
        assert int(apart[:, :used][same].abs().max()) <= 1
        tail = torch.ones(used, dtype=torch.bool)
        for g in groups:
            tail[g.col : g.col + g.tokens] = False
        assert (q.data.view(torch.uint8)[:, :used][:, tail] == 0).all()


def test_columns_hold_what_rows_hold_when_nothing_rounds() -> None:
    """Values that FP8 holds exactly come out of rows and columns alike: no second quantization."""
    plan = plan_of([150, 70])
    z = torch.zeros(plan.rows, 512)
    z[:, :256] = 100.0  # silu(100) = 100
    z[:, 256:] = torch.randint(-15, 16, (plan.rows, 256)) / 100.0
    for columns in ("block", "column"):
        h = ops.act_quantize(z, plan)
        h_t = ops.act_quantize_backward(torch.ones(plan.rows, 256), z, plan, columns=columns)[2]
        rows, cols = h.dequantize("float32"), h_t.dequantize("float32")
        for g in columns_of.groups_of([150, 70], 16):
            torch.testing.assert_close(
                cols[:, g.col : g.col + g.tokens].T,
                rows[g.row : g.row + g.tokens],
                rtol=1e-6,
                atol=0,
            )


# ---- any shape, bad input -----------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_shape(data: st.DataObject) -> None:
    rows, inner = data.draw(st.integers(0, 20)), 16 * data.draw(st.integers(1, 24))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    activation = ACTIVATIONS[data.draw(st.sampled_from(list(ACTIVATIONS)))]
    width = activation.parts * inner
    z, dh, probs = awkward(rows, width, dtype), awkward(rows, inner, dtype), torch.rand(rows)
    h = ops.act_quantize(z, probs=probs, activation=activation)
    dz, *_, dprobs = ops.act_quantize_backward(dh, z, probs=probs, activation=activation)
    assert (h.shape, dz.shape, dprobs.shape) == ((rows, inner), (rows, width), (rows,))
    if rows:
        want = truth(z, dh, probs, activation)
        assert_quantized(h, want.h)
        assert_quantized(dz, want.dz)


def test_bad_input_is_an_error_and_writes_nothing() -> None:
    plan = plan_of([3, 20])
    z, dh = torch.randn(plan.rows, 64), torch.randn(plan.rows, 32)
    out = ops.act_quantize(z, plan)
    before = out.data.view(torch.uint8).clone()
    swiglu, backward = ops.act_quantize, ops.act_quantize_backward
    bad = [
        ("twice a multiple of 16; got 48", lambda: swiglu(torch.randn(3, 48))),
        ("z must have the plan's 48 rows; got 47", lambda: swiglu(z[:-1], plan, out=out)),
        ("z must be one of float32", lambda: swiglu(z.int(), plan, out=out)),
        (
            "activation must be an Activation; got 'relu2'",
            lambda: swiglu(z, plan, activation="relu2", out=out),
        ),
        ("h must be", lambda: swiglu(z, plan, activation=Activation("relu2"), out=out)),
        ("z must be", lambda: backward(dh, z, plan, activation=Activation("relu2"))),
        ("need a plan", lambda: backward(dh, z, columns="block")),
        ("'block' or 'column'", lambda: backward(dh, z, plan, columns="rows")),
        (r"probs must be \[48\]", lambda: swiglu(z, plan, torch.rand(47), out=out)),
        ("probs must be one of float32", lambda: swiglu(z, plan, torch.rand(48).half(), out=out)),
        (r"\] probs must .* got float64", lambda: backward(dh, z, plan, torch.rand(48).double())),
        ("h must be", lambda: swiglu(torch.randn(48, 96), plan, out=out)),
        ("z must be", lambda: backward(dh, z[:, :32].contiguous(), plan)),
        ("dh must be one of", lambda: backward(dh.int(), z, plan)),
    ]
    for message, call in bad:
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    assert torch.equal(out.data.view(torch.uint8), before)


# ---- beside the CPU backend: over poison, twice, bit for bit ------------------------------------


def inputs(plan, intermediate, dtype=torch.bfloat16):
    z = backends.awkward(plan.rows, 2 * intermediate, dtype=dtype)
    dh = backends.awkward(plan.rows, intermediate, dtype=dtype)
    return z, dh, torch.rand(plan.rows)


@LARGE
@pytest.mark.parametrize("fp8_dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "intermediate"), [(1, 16), (7, 128), (300, 256), (129, 720), (64, 2048)]
)
def test_without_plan(rows, intermediate, dtype, scale, fp8_dtype):
    z = backends.awkward(rows, 2 * intermediate, dtype=dtype)
    dh = backends.awkward(rows, intermediate, dtype=dtype)
    probs = torch.rand(rows)
    backends.check("act_quantize", z, scale=scale)
    backends.check("act_quantize", z, probs=probs, activation=Activation(limit=1.5), scale=scale)
    options = {"scale": scale, "fp8_dtype": fp8_dtype}
    backends.check("act_quantize_backward", dh, z, **options)
    options["activation"] = Activation(limit=1.5)
    backends.check("act_quantize_backward", dh, z, probs=probs, **options)


@LARGE
@pytest.mark.parametrize("columns", [None, "block", "column"])
@pytest.mark.parametrize("align", [1, 16, 128])
@pytest.mark.parametrize("kind", backends.ROUTINGS)
def test_with_plan(kind, align, columns):
    """Padding rows are written data 0, scale 0; columns hold each expert's tokens, tail zero."""
    _, plan = backends.plan_of(kind, tokens=150, experts=5, slots=3, align=align)
    for intermediate in (128, 208, 384):
        z, dh, probs = inputs(plan, intermediate)
        backends.check("act_quantize", z, probs=probs, plan=plan)
        options = {"probs": probs, "columns": columns, "plan": plan}
        backends.check("act_quantize_backward", dh, z, **options)


@pytest.mark.parametrize("columns", [None, "block", "column"])
@pytest.mark.parametrize("fp8_dtype", ["e4m3", "e5m2"])
def test_scale_layouts_and_saved_z(fp8_dtype, columns):
    """Row and gemm layouts of h; the backward from the FP8 pre-activation the forward saved."""
    _, plan = backends.plan_of("random", tokens=97, experts=4, slots=2, align=16)
    for intermediate in (256, 336):
        z, dh, probs = inputs(plan, intermediate)
        for layout in ("row", "gemm"):
            options = {"save_z": True, "scale_layout": layout}
            backends.check("act_quantize", z, probs=probs, plan=plan, **options)
        options = {"probs": probs, "columns": columns, "plan": plan, "fp8_dtype": fp8_dtype}
        backends.check("act_quantize_backward", dh, ops.dequantize(ops.quantize(z)), **options)


@LARGE
def test_every_bf16_sigmoid():
    """dprob of a one-hot dh is silu(gate): over all 65,536 gates the CPU's bits."""
    rows, intermediate = 65536, 16
    gates = torch.arange(rows, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    z = torch.ones(rows, 2 * intermediate, dtype=torch.bfloat16)
    z[:, 3] = gates
    dh = torch.zeros(rows, intermediate, dtype=torch.bfloat16)
    dh[:, 3] = 1.0
    backends.check("act_quantize_backward", dh, z, probs=torch.ones(rows))
    backends.check("act_quantize", z)


@LARGE
@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if "interleaved" not in n])
@pytest.mark.parametrize("columns", [None, "block", "column"])
@pytest.mark.parametrize("intermediate", [128, 64])
def test_every_gate(columns, name, intermediate):
    """All 65,536 bf16 gates through the fast kernels, which may look sigmoids up."""
    rows = 65536 // intermediate
    counts = torch.tensor([rows - 212, 0, 212], dtype=torch.int32)
    plan = ops.plan_from_counts(counts, capacity=rows)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    activation, z = ACTIVATIONS[name], every.view(rows, intermediate)
    dh = torch.ones(rows, intermediate, dtype=torch.bfloat16)
    if activation.gated:
        z = torch.cat([z, dh], dim=1)
    backends.check("act_quantize", z, plan=plan, activation=activation)
    options = {"plan": plan, "activation": activation, "columns": columns}
    backends.check("act_quantize_backward", dh, z, probs=torch.rand(rows), **options)


@LARGE
@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("intermediate", [128, 1088, 1152])
def test_many_tiles(intermediate, columns):
    """More tiles than teams of blocks, across experts. Backward, I 1088 and 1152: SMs with a few
    tiles of blocks of tokens of nine, whose sums of dprob go on to the next."""
    counts = torch.tensor([2500, 0, 3100, 1, 1903], dtype=torch.int32)
    plan = ops.plan_from_counts(counts, capacity=7600, align=16)
    z, dh, probs = inputs(plan, intermediate)
    backends.check("act_quantize", z, probs=probs, plan=plan)
    backends.check("act_quantize_backward", dh, z, probs=probs, columns=columns, plan=plan)


@LARGE
@pytest.mark.parametrize("columns", [None, "block", "column"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_beside_the_cpu(name, columns):
    """Every activation by every kernel: sizes of whole tiles and others, both formats."""
    activation = ACTIVATIONS[name]
    counts = torch.tensor([700, 0, 300, 1, 127], dtype=torch.int32)
    plan = ops.plan_from_counts(counts, capacity=1128, align=16)
    sizes = (
        (128, "e4m3"),
        (1152, "e5m2"),
        (176, "e4m3"),
        (704, "e5m2"),
        (16, "e4m3"),
        (1856, "e4m3"),
        (2880, "e5m2"),
        (80, "e5m2"),  # [gate | up]: less than a tile, and a tile of dup alone
        (208, "e5m2"),  # more of dup waits for the next tile
        (240, "e4m3"),  # more than a kernel has place for
    )
    for intermediate, fp8_dtype in sizes:
        z = backends.awkward(plan.rows, activation.parts * intermediate)
        dh, probs = backends.awkward(plan.rows, intermediate), torch.rand(plan.rows)
        options = {"probs": probs, "plan": plan, "activation": activation}
        backends.check("act_quantize", z, **options)
        options |= {"columns": columns, "fp8_dtype": fp8_dtype}
        backends.check("act_quantize_backward", dh, z, **options)


@LARGE
@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("intermediate", [896, 960])
def test_shares_of_several_blocks_of_tokens(intermediate, columns):
    """Backward: an SM's tiles are the end of a block of tokens, whole ones and the start of one."""
    counts = torch.tensor([4100, 0, 13000, 77, 15000], dtype=torch.int32)
    plan = ops.plan_from_counts(counts, capacity=32300, align=16)
    z, dh, probs = inputs(plan, intermediate)
    backends.check("act_quantize_backward", dh, z, probs=probs, columns=columns, plan=plan)


@LARGE
@pytest.mark.parametrize("limit", [None, 1.3])
@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("intermediate", [6144, 6208, 48256])
def test_large_intermediate(intermediate, columns, limit):
    """Backward: sums of dprob apart, and sums that go through many SMs."""
    counts = torch.tensor([3, 0, 17], dtype=torch.int32)
    plan = ops.plan_from_counts(counts, capacity=32, align=1)
    z, dh, probs = inputs(plan, intermediate)
    options = {"probs": probs, "columns": columns, "plan": plan}
    options["activation"] = Activation(limit=limit)
    backends.check("act_quantize_backward", dh, z, **options)


@pytest.mark.parametrize("inner", [256, 208])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_infinities_and_nans(name, inner):
    activation = ACTIVATIONS[name]
    z = backends.awkward(200, inner * activation.parts)
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 3e38, -3e38, 1e-40])
    z[torch.rand(z.shape) < 0.01] = values[0]
    for i, value in enumerate(values):
        z[10 + i, :: 7 + i] = value.to(torch.bfloat16)
    dh = backends.awkward(200, inner)
    dh[5, 5] = float("nan")
    backends.check("act_quantize", z, activation=activation)
    options = {"probs": torch.rand(200), "activation": activation}
    backends.check("act_quantize_backward", dh, z, **options)


@pytest.mark.parametrize("columns", [None, "block"])
def test_empty(columns):
    for tokens in (0, 3):
        idx = torch.full((tokens, 2), -1)
        plan = ops.route(4, topk_idx=idx)
        z, dh, probs = inputs(plan, 128)
        backends.check("act_quantize", z, probs=probs, plan=plan)
        backends.check("act_quantize_backward", dh, z, probs=probs, columns=columns, plan=plan)
