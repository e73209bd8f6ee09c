"""The quantizers and dequantize: CUDA against the CPU backend, bit for bit."""

from __future__ import annotations

import pytest
import torch

from backends import assert_same, awkward, on_both
from fp8moe_cutlass import Fp8Tensor, ops
from fp8moe_cutlass.tensor import scale_shape

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = ["e4m3", "e5m2"]
SCALES = ["pow2", "fp32", "amax"]


def check(op, *args, plan=None, **kwargs):
    expected, (first, again) = on_both(op, *args, **kwargs)
    assert_same(expected, first, plan, op.__name__)
    assert_same(first, again, plan, f"{op.__name__}, second run")


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


@pytest.mark.parametrize("layout", ["row", "gemm"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fp8_dtype", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(dtype, fp8_dtype, scale, layout):
    options = {"fp8_dtype": fp8_dtype, "scale": scale, "scale_layout": layout}
    for m, k in [(1, 16), (8, 128), (131, 272), (257, 2880), (64, 1024), (5, 7168)]:
        x = awkward(m, k, dtype=dtype)
        check(ops.quantize, x, **options)
        if m >= 8:
            check(ops.quantize, with_specials(x), **options, eps=0.0)


@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_every_bfloat16_value(fp8_dtype):
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for top in (448.0 if fp8_dtype == "e4m3" else 57344.0, torch.inf):
        x = torch.zeros(521, 128, dtype=torch.bfloat16)
        x[:, 1:] = torch.nn.functional.pad(values, (0, 521 * 127 - 65536)).view(521, 127)
        x[:, 0] = top
        check(ops.quantize, x, fp8_dtype=fp8_dtype, eps=0.0)


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
    dtype = pick(DTYPES)
    x = bits.view(torch.float32) if dtype == torch.float32 else bits.to(torch.int16).view(dtype)
    check(
        ops.quantize,
        x,
        fp8_dtype=pick(FORMATS),
        scale=pick(SCALES),
        eps=pick([0.0, 1e-10]),
        scale_layout=pick(["row", "gemm"]),
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_weight(dtype, scale):
    for shape in [(1, 16, 16), (3, 144, 272), (2, 512, 256), (2, 2880, 160)]:
        check(ops.quantize_weight, awkward(*shape, dtype=dtype), scale=scale)
    each = with_specials(awkward(16, 272, dtype=dtype))  # an expert of one kind of row each
    check(ops.quantize_weight, each[:, None].repeat(1, 144, 1), scale=scale)


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 144, 272), (2, 512, 256), (130, 2880, 160)])
def test_turn_weight(shape):
    codes = torch.randint(256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    q = Fp8Tensor(codes, torch.rand(scale_shape(shape, "block")), "block", pow2=False)
    check(ops.turn_weight, q)


@pytest.mark.parametrize("layout", ["row", "gemm", "block"])
@pytest.mark.parametrize("fp8_dtype", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(dtype, fp8_dtype, layout):
    for m, k in [(1, 16), (131, 272), (64, 2880)]:
        codes = torch.arange(m * k).to(torch.uint8).view(m, k)
        scale = torch.rand(scale_shape((m, k), layout)) * 8
        data = codes.view(torch.float8_e4m3fn if fp8_dtype == "e4m3" else torch.float8_e5m2)
        t = Fp8Tensor(data, scale, layout, pow2=False)
        check(ops.dequantize, t, dtype=dtype)
    q, _ = ops.quantize_weight(awkward(3, 144, 272))
    check(ops.dequantize, q, dtype=dtype)


def test_nothing_to_do(device):
    x = torch.empty(0, 128, device=device)
    assert ops.quantize(x).shape == (0, 128)
    q, q_t = ops.quantize_weight(torch.empty(0, 256, 128, device=device))
    assert (q.shape, q_t.shape) == ((0, 256, 128), (0, 128, 256))


@pytest.mark.slow
def test_more_than_2_31_elements(device):
    """The last rows of a huge tensor are quantized as they are alone."""
    m, k = 300_032, 7168
    x = torch.randn(1024, k, device=device, dtype=torch.bfloat16).repeat(m // 1024, 1)
    assert x.numel() > 2**31
    for layout in ("row", "gemm"):
        q, part = (ops.quantize(t, scale_layout=layout) for t in (x, x[-1024:]))
        assert torch.equal(q.data[-1024:].view(torch.uint8), part.data.view(torch.uint8))
        rows = {"row": q.scale_inv[-1024:], "gemm": q.scale_inv[:, -1024:]}
        assert torch.equal(rows[layout], part.scale_inv)
        values = ops.dequantize(q)
        assert torch.equal(values[-1024:], ops.dequantize(part))
        del q, values
    w = x.view(-1, 1024, k)
    (q, q_t), (part, part_t) = ops.quantize_weight(w), ops.quantize_weight(w[-1:])
    assert torch.equal(q.data[-1:].view(torch.uint8), part.data.view(torch.uint8))
    assert torch.equal(q_t.data[-1:].view(torch.uint8), part_t.data.view(torch.uint8))
