"""The quantizers and dequantize: bit-equal to the reference of `verify`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends import awkward, check
from fp8moe_cutlass import Fp8Tensor
from fp8moe_cutlass.tensor import scale_shape
from fp8moe_cutlass.tools.verify import reference as ref
from on_device import LARGE, ops

pytestmark = pytest.mark.usefixtures("device")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FORMATS = ["e4m3", "e5m2"]
SCALES = ["pow2", "fp32", "amax"]


def codes_of(t: torch.Tensor) -> NDArray[np.uint8]:
    return t.view(torch.uint8).numpy()


def scales_of(t: Fp8Tensor) -> NDArray[np.float32]:
    """scale_inv with one row per row of tiles, whatever the layout."""
    s = t.scale_inv.numpy()
    return s[:, : t.shape[0]].T if t.scale_layout == "gemm" else s


def assert_same(got: Fp8Tensor, codes: NDArray[np.uint8], scale_inv: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(scales_of(got).view(np.uint32), scale_inv.view(np.uint32))
    np.testing.assert_array_equal(codes_of(got.data), codes)


def special_rows(seed: int, k: int) -> torch.Tensor:
    """Rows of every kind a tile can be: a float32 tensor [16, k]."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(16, k, generator=g)
    x[1] = 0
    x[2] = -0.0
    x[3] *= 1e-41  # denormal in float32
    x[4, ::7] = torch.nan
    x[5] = torch.nan
    x[6, 3] = torch.inf
    x[7, 5] = -torch.inf
    x[7, 6] = torch.nan
    x[8] = 0
    x[8, k - 1] = -3e-5
    x[9] *= 1e30
    x[10] *= 1e-11  # under the default eps
    x[11] *= torch.exp2(torch.randint(-30, 30, (k,), generator=g).float())
    x[12] = torch.finfo(torch.float32).max
    x[13] *= 2.0**-120
    x[14, :] = 448.0
    x[15, :] = 448.0 * (1 + 2.0**-23)
    return x


@pytest.mark.parametrize("layout", ["row", "gemm"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fp8_dtype", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_tile(dtype: str, fp8_dtype: str, scale: str, layout: str) -> None:
    x = torch.cat([special_rows(1, 272), special_rows(2, 272)]).to(DTYPES[dtype])
    for eps in (0.0, 1e-40, 1e-10):  # under 1e-36 largest / eps overflows
        q = ops.quantize(x, fp8_dtype=fp8_dtype, scale=scale, eps=eps, scale_layout=layout)
        args = (fp8_dtype, scale, eps, ref.LARGEST[dtype])
        assert_same(q, *ref.quantize(x.float().numpy(), 1, *args))


@pytest.mark.parametrize("fp8_dtype", FORMATS)
@pytest.mark.parametrize("saturating", [False, True], ids=["finite tiles", "tiles with Inf"])
def test_all_bfloat16_values(fp8_dtype: str, saturating: bool) -> None:
    """Every bfloat16 under scale 1, which a maximum of FMAX or of Inf gives."""
    fmt = ref.FORMATS[fp8_dtype]
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if not saturating:
        values = values[values.abs() <= fmt.maximum]
    count = -(-values.numel() // 127)
    x = torch.zeros(count, 128, dtype=torch.bfloat16)
    x[:, 0] = torch.inf if saturating else fmt.maximum
    x[:, 1:] = torch.cat([values, values.new_zeros(count * 127 - values.numel())]).view(count, 127)
    q = ops.quantize(x, fp8_dtype=fp8_dtype, eps=0.0)
    assert (q.scale_inv == 1).all()
    np.testing.assert_array_equal(codes_of(q.data), fmt.encode(x.double().numpy()))
    if not saturating:  # torch's casts saturate in one format and not in the other
        cast = x.to(torch.float8_e4m3fn if fp8_dtype == "e4m3" else torch.float8_e5m2)
        np.testing.assert_array_equal(codes_of(q.data), codes_of(cast))


@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_ties_between_codes(fp8_dtype: str) -> None:
    """Midpoints of neighbouring codes and their float32 neighbours, in finite and in Inf tiles."""
    fmt = ref.FORMATS[fp8_dtype]
    finite = fmt.values[: fmt.largest + 1]
    middle = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    near = np.stack([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.inf)], 1)
    x = torch.from_numpy(np.pad(np.concatenate([near, -near], 1), ((0, 0), (0, 122))))
    for top in (fmt.maximum, float("inf")):
        x[:, 127] = top
        q = ops.quantize(x, fp8_dtype=fp8_dtype, eps=0.0)
        np.testing.assert_array_equal(codes_of(q.data), fmt.encode(x.double().numpy()))


@pytest.mark.parametrize(("m", "k"), [(0, 128), (1, 16), (5, 128), (130, 144), (3, 2880)])
@pytest.mark.parametrize("layout", ["row", "gemm"])
def test_sizes_off_the_tile(m: int, k: int, layout: str) -> None:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = ops.quantize(x, scale_layout=layout)
    assert_same(q, *ref.quantize(x.float().numpy()))
    again = ops.quantize(x, scale_layout=layout)
    assert torch.equal(q.data.view(torch.uint8), again.data.view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_values(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    fp8_dtype = data.draw(st.sampled_from(FORMATS))
    scale = data.draw(st.sampled_from(SCALES))
    eps = data.draw(st.sampled_from([0.0, 1e-10, 1.0]))
    k = 16 * data.draw(st.integers(1, 17))
    bits = data.draw(st.binary(min_size=8 * k, max_size=8 * k))
    x = torch.frombuffer(bytearray(bits), dtype=DTYPES[dtype]).reshape(-1, k)
    q = ops.quantize(x, fp8_dtype=fp8_dtype, scale=scale, eps=eps)
    args = (fp8_dtype, scale, eps, ref.LARGEST[dtype])
    assert_same(q, *ref.quantize(x.float().numpy(), 1, *args))


# ---- quantize_weight ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 256, 144), (3, 48, 2880 // 10), (1, 16, 16), (0, 16, 16)])
@pytest.mark.parametrize("scale", SCALES)
def test_weight_and_its_transpose(shape: tuple[int, ...], scale: str) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    w[:, : shape[1] // 2] *= 100
    q, q_t = ops.quantize_weight(w, scale=scale)
    for e in range(shape[0]):
        codes, scale_inv = ref.quantize(w[e].numpy(), 128, rule=scale)
        np.testing.assert_array_equal(codes_of(q.data[e]), codes)
        np.testing.assert_array_equal(q.scale_inv[e].numpy(), scale_inv)
        np.testing.assert_array_equal(codes_of(q_t.data[e]), codes.T)
        np.testing.assert_array_equal(q_t.scale_inv[e].numpy(), scale_inv.T)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_of_every_kind_of_tile(dtype: str, scale: str) -> None:
    """Each row of special_rows repeated, an expert each: a tile of nothing else."""
    w = special_rows(1, 272).to(DTYPES[dtype])[:, None].expand(-1, 144, -1).contiguous()
    w[:, 1::3] *= 0.5
    for eps in (0.0, 1e-40, 1e-10):
        q, q_t = ops.quantize_weight(w, scale=scale, eps=eps)
        args = ("e4m3", scale, eps, ref.LARGEST[dtype])
        for e in range(w.shape[0]):
            codes, scale_inv = ref.quantize(w[e].float().numpy(), 128, *args)
            for got, axes in ((q, (0, 1)), (q_t, (1, 0))):
                np.testing.assert_array_equal(
                    got.scale_inv[e].numpy().view(np.uint32),
                    scale_inv.transpose(axes).copy().view(np.uint32),
                )
                np.testing.assert_array_equal(codes_of(got.data[e]), codes.transpose(axes))


@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
def test_one_of_the_two_weights(scale):
    w = torch.randn(3, 144, 272)
    q, q_t = ops.quantize_weight(w, scale=scale)
    for which, want in ((False, q), ("only", q_t)):
        got = ops.quantize_weight(w, scale=scale, transposed=which)
        again = ops.quantize_weight(w, scale=scale, transposed=which, out=got)
        assert again is got
        assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(got.scale_inv, want.scale_inv)
    with pytest.raises(ValueError, match="transposed must be True, False or 'only'; got 'both'"):
        ops.quantize_weight(w, transposed="both")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("upper", "lower"), [(128, 128), (256, 48), (128, 0), (0, 144)])
def test_weight_in_two_tensors(upper: int, lower: int, scale: str) -> None:
    """`below` stands below w in each expert: the bits of one tensor."""
    w, below = torch.randn(3, upper, 272), 100 * torch.randn(3, lower, 272)
    whole = torch.cat([w, below], dim=1)
    for which in (True, False, "only"):
        got = ops.quantize_weight(w, below=below, scale=scale, transposed=which)
        want = ops.quantize_weight(whole, scale=scale, transposed=which)
        for g, t in zip(*([x] if which is not True else x for x in (got, want)), strict=True):
            assert torch.equal(g.data.view(torch.uint8), t.data.view(torch.uint8))
            assert torch.equal(g.scale_inv, t.scale_inv)


def test_weight_in_two_tensors_that_do_not_fit() -> None:
    w = torch.randn(2, 128, 32)
    for wrong, below in [
        ("[quantize_weight] w.shape[1] must be a multiple of 128; got 144", torch.randn(2, 16, 32)),
        (
            "[quantize_weight] below must have w's dtype float32; got float16",
            torch.randn(2, 16, 32).half(),
        ),
        ("[quantize_weight] below must be [2, 16, 32]; got [3, 16, 32]", torch.randn(3, 16, 32)),
        ("[quantize_weight] below must have 3 dimensions; got [16, 32]", torch.randn(16, 32)),
        ("[quantize_weight] below.shape[1] must be a multiple of 16; got 8", torch.randn(2, 8, 32)),
    ]:
        with pytest.raises(ValueError, match=re.escape(wrong)):
            ops.quantize_weight(torch.randn(2, 144, 32) if "144" in wrong else w, below=below)


# ---- turn_weight --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 256, 384), (3, 144, 272), (1, 16, 16), (2, 400, 128)])
def test_turned_weight(shape: tuple[int, ...]) -> None:
    """All codes under any scales: zeros, subnormal, infinite and NaN ones among them."""
    e, n, k = shape
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(8))
    scale = torch.rand(e, -(-n // 128), -(-k // 128), generator=torch.Generator().manual_seed(9))
    scale.view(-1)[:4] = torch.tensor([0.0, 1e-40, torch.inf, torch.nan])[: scale.numel()]
    q = Fp8Tensor(codes.view(torch.float8_e4m3fn), scale, "block", pow2=False)
    given = Fp8Tensor(
        torch.full((e, k, n), 0x55, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.zeros(e, scale.shape[2], scale.shape[1]),
        "block",
        pow2=False,
    )
    for got in (ops.turn_weight(q), ops.turn_weight(q, out=given)):
        assert not got.pow2
        assert torch.equal(got.data.view(torch.uint8), codes.mT)
        assert torch.equal(got.scale_inv.view(torch.int32), scale.mT.view(torch.int32))
        back = ops.turn_weight(got)
        assert torch.equal(back.data.view(torch.uint8), codes)


def test_turned_weight_is_the_transpose_of_quantize_weight() -> None:
    for scale in SCALES:
        q, q_t = ops.quantize_weight(torch.randn(3, 144, 272), scale=scale)
        got = ops.turn_weight(q)
        assert got.pow2 is q_t.pow2
        assert torch.equal(got.data.view(torch.uint8), q_t.data.view(torch.uint8))
        assert torch.equal(got.scale_inv, q_t.scale_inv)


def test_turn_weight_of_no_experts() -> None:
    q = ops.quantize_weight(torch.randn(0, 16, 144), transposed=False)
    assert ops.turn_weight(q).shape == (0, 144, 16)


@pytest.mark.parametrize(
    ("shape", "layout", "dtype", "rule"),
    [
        ((144, 272), "block", torch.float8_e4m3fn, r"q must have 3 dimensions"),
        ((2, 24, 272), "block", torch.float8_e4m3fn, r"q.shape\[1\] must be a multiple of 16"),
        ((2, 272, 24), "block", torch.float8_e4m3fn, r"q.shape\[2\] must be a multiple of 16"),
        ((2, 144, 272), "block", torch.float8_e5m2, r"q must be float8_e4m3fn"),
    ],
)
def test_turn_weight_refuses(shape: Any, layout: str, dtype: torch.dtype, rule: str) -> None:
    scale = torch.ones(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    q = Fp8Tensor(torch.zeros(shape).to(dtype), scale, layout)
    with pytest.raises(ValueError, match=r"\[turn_weight\] " + rule):
        ops.turn_weight(q)


# ---- dequantize ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["row", "gemm", "block"])
@pytest.mark.parametrize("fp8_dtype", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(layout: str, fp8_dtype: str, dtype: str) -> None:
    m, k = 131, 272
    codes = torch.arange(256, dtype=torch.uint8).repeat(-(-m * k // 256))[: m * k].view(m, k)
    fp8 = torch.float8_e4m3fn if fp8_dtype == "e4m3" else torch.float8_e5m2
    g = torch.Generator().manual_seed(6)
    rows, tiles = (2 if layout == "block" else m), 3
    scale = torch.rand(rows, tiles, generator=g) * torch.exp2(torch.tensor([-40.0, 0.5, 38.0]))
    full = scale.repeat_interleave(128, 0)[:m] if layout == "block" else scale
    if layout == "gemm":
        stored = torch.full((tiles, 132), torch.nan)
        stored[:, :m] = scale.T
        scale = stored
    t = Fp8Tensor(codes.view(fp8), scale, layout, pow2=False)
    full = full.repeat_interleave(128, 1)[:, :k]
    expected = (codes.view(fp8).float() * full).to(DTYPES[dtype])
    torch.testing.assert_close(t.dequantize(dtype), expected, rtol=0, atol=0, equal_nan=True)


def test_dequantize_experts() -> None:
    w = torch.randn(3, 144, 48, generator=torch.Generator().manual_seed(7))
    q, q_t = ops.quantize_weight(w)
    back = q.dequantize("float32")
    assert torch.equal(back, q_t.dequantize("float32").transpose(1, 2))
    assert float((back - w).norm() / w.norm()) < 0.03


# ---- what is refused ----------------------------------------------------------------------------


def test_refusals_write_nothing() -> None:
    x = torch.randn(4, 128)
    fp8 = torch.full((4, 128), 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    bad = [
        (torch.randn(4, 120), fp8, torch.ones(4, 1), "multiple of 16"),
        (torch.randn(4), fp8, torch.ones(4, 1), "2 dimensions"),
        (x.double(), fp8, torch.ones(4, 1), "x"),
        (x.int(), fp8, torch.ones(4, 1), "float32"),
        (x, fp8[:3], torch.ones(3, 1), "q"),
        (x, fp8, torch.ones(4, 2), "scale_inv"),
        (x, fp8, torch.ones(4, 1).double(), "scale"),
        (x.t().contiguous().t(), fp8, torch.ones(4, 1), "x"),
        (x.to("meta"), fp8, torch.ones(4, 1), "x"),
    ]
    for values, data, scale, words in bad:
        with pytest.raises(ValueError, match=words):
            ops.quantize(values, out=Fp8Tensor(data, scale))
        assert (fp8.view(torch.uint8) == 1).all()
        assert (scale == 1).all()
    for arguments in (
        {"fp8_dtype": "e3m4"},
        {"scale": "fp16"},
        {"scale_layout": "block"},
    ):
        with pytest.raises(ValueError, match=r"\[quantize\]"):
            ops.quantize(x, **arguments)


# ---- beside the CPU backend: over poison, twice, bit for bit ------------------------------------


def with_specials(x):
    """NaN, Inf, zeros, denormals and tiles of each alone among the rows of x [>= 8, K]."""
    x[0] = 0
    x[1, ::3] = torch.nan
    x[2] = torch.nan
    x[3, 5] = torch.inf
    x[4, 7] = -torch.inf
    x[5] *= 1e-41
    x[6] = torch.finfo(x.dtype).max
    x[7] *= 1e-11
    return x


@LARGE
@pytest.mark.parametrize("layout", ["row", "gemm"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fp8_dtype", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_sizes_and_specials(dtype, fp8_dtype, scale, layout):
    options = {"fp8_dtype": fp8_dtype, "scale": scale, "scale_layout": layout}
    for m, k in [(1, 16), (8, 128), (131, 272), (257, 2880), (64, 1024), (5, 7168)]:
        x = awkward(m, k, dtype=dtype)
        check("quantize", x, **options)
        if m >= 8:
            check("quantize", with_specials(x), **options, eps=0.0)


@LARGE
@pytest.mark.parametrize("seed", range(40))
def test_random_cases(seed):
    g = torch.Generator().manual_seed(seed)

    def pick(things):
        return things[int(torch.randint(len(things), (1,), generator=g))]

    m, k = (
        int(torch.randint(1, 400, (1,), generator=g)),
        16 * int(torch.randint(1, 90, (1,), generator=g)),
    )
    bits = torch.randint(-(2**31), 2**31, (m, k), generator=g, dtype=torch.int64).to(torch.int32)
    dtype = pick([*DTYPES.values()])
    x = bits.view(torch.float32) if dtype == torch.float32 else bits.to(torch.int16).view(dtype)
    check(
        "quantize",
        x,
        fp8_dtype=pick(FORMATS),
        scale=pick(SCALES),
        eps=pick([0.0, 1e-10]),
        scale_layout=pick(["row", "gemm"]),
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_weight_sizes(dtype, scale):
    for shape in [(1, 16, 16), (3, 144, 272), (2, 512, 256), (2, 2880, 160)]:
        check("quantize_weight", awkward(*shape, dtype=dtype), scale=scale)
    each = with_specials(awkward(16, 272, dtype=dtype))  # an expert of one kind of row each
    check("quantize_weight", each[:, None].repeat(1, 144, 1), scale=scale)


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 144, 272), (2, 512, 256), (130, 2880, 160)])
def test_turn_weight_sizes(shape):
    codes = torch.randint(256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    q = Fp8Tensor(codes, torch.rand(scale_shape(shape, "block")), "block", pow2=False)
    check("turn_weight", q)


@pytest.mark.parametrize("layout", ["row", "gemm", "block"])
@pytest.mark.parametrize("fp8_dtype", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_dequantize_sizes(dtype, fp8_dtype, layout):
    for m, k in [(1, 16), (131, 272), (64, 2880)]:
        codes = torch.arange(m * k).to(torch.uint8).view(m, k)
        scale = torch.rand(scale_shape((m, k), layout)) * 8
        data = codes.view(torch.float8_e4m3fn if fp8_dtype == "e4m3" else torch.float8_e5m2)
        t = Fp8Tensor(data, scale, layout, pow2=False)
        check("dequantize", t, dtype=dtype)
    q, _ = ops.quantize_weight(awkward(3, 144, 272))
    check("dequantize", q, dtype=dtype)
