"""Which option gives whose bits: docs/reference/numerics.md's table, a test per row.

Each rule below is a library's, from its source, step by step in float32. `quantize` and
`quantize_weight` have to give the same codes and scales under the options of the row.

Sources: deepseek-ai/DeepGEMM 38939a4 (deep_gemm/utils/math.py), deepseek-ai/DeepSeek-V3 0623163
(inference/kernel.py), DeepSeek-V3.2's act_quant in tilelang, DeepEP's calculate_fp8_scales,
vllm-project/vllm 0ba022c (csrc/quantization/fp8/per_token_group_quant.cu), transformers 5.17.0
(integrations/finegrained_fp8.py, Fp8Quantize), NVIDIA/TransformerEngine 01c24fe
(common/recipe/recipe_common.cuh), Paddle's ComputeScale, pytorch/ao 0598012
(prototype/blockwise_fp8_training/kernels.py), sgl-project/sglang 037cd6e
(sgl-kernel/csrc/gemm/per_token_group_quant_8bit*.cu).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fp8moe_cutlass import Fp8Tensor
from on_device import ops

pytestmark = pytest.mark.usefixtures("device")

F32 = NDArray[np.float32]
f32 = np.float32
LARGEST = f32(448)
INVERSE = f32(1) / LARGEST  # rounded, as a constant of float32 is


class Quantized(NamedTuple):
    """values [tiles, n] before the last rounding, to codes; one stored scale per tile."""

    values: F32
    scale: F32


Rule = Callable[[F32], Quantized]


def largest_of(x: F32, floor: float = 0.0) -> F32:
    """Of each tile of x [tiles, n], [tiles, 1], at least `floor`."""
    return np.maximum(np.abs(x).max(1, keepdims=True), f32(floor))


def up_to_pow2(scale: F32) -> F32:
    """The least power of two that is not smaller: 2^ceil(log2(scale)), exactly."""
    fraction, exponent = np.frexp(scale)
    return np.ldexp(f32(1), exponent - (fraction == 0.5)).astype(f32)


def down_to_pow2(scale: F32) -> F32:
    return np.ldexp(f32(1), np.frexp(scale)[1] - 1).astype(f32)


# ---- power-of-two scales ------------------------------------------------------------------------


def deepgemm_ue8m0(x: F32) -> Quantized:
    scale = up_to_pow2(largest_of(x, 1e-4) / LARGEST)
    return Quantized(x * (f32(1) / scale), scale)


def deepseek_round_scale(x: F32) -> Quantized:
    """Of DeepSeek-V3.2's kernels and DeepEP's: the product with a rounded 1 / 448."""
    scale = up_to_pow2(largest_of(x, 1e-4) * INVERSE)
    return Quantized(x / scale, scale)


def vllm_ue8m0(x: F32) -> Quantized:
    """A floor of the magnitude, 1e-10, and one of the scale, the same number."""
    scale = up_to_pow2(np.maximum(largest_of(x, 1e-10) / LARGEST, f32(1e-10)))
    return Quantized(x / scale, scale)


def transformers_ue8m0(x: F32) -> Quantized:
    a = largest_of(x)
    scale = np.where(a > 0, LARGEST / np.where(a > 0, a, f32(1)), f32(1))
    stored = up_to_pow2(np.maximum(f32(1) / scale, np.finfo(f32).tiny))
    return Quantized(x * (f32(1) / stored), stored)


def transformer_engine_pow2(x: F32) -> Quantized:
    a = largest_of(x)
    scale = np.where(a == 0, f32(1), down_to_pow2(LARGEST / np.where(a > 0, a, f32(1))))
    return Quantized(x * scale, f32(1) / scale)


# ---- float32 scales -----------------------------------------------------------------------------


def transformer_engine_fp32(x: F32) -> Quantized:
    a = largest_of(x)
    scale = np.where(a == 0, f32(1), LARGEST / np.where(a > 0, a, f32(1)))
    scale = np.minimum(scale, np.finfo(f32).max)  # of float32 tiles; narrower dtypes have their own
    return Quantized(x * scale, f32(1) / scale)


def torchao(x: F32) -> Quantized:
    """The quotient in float64, then float32."""
    scale = (448.0 / largest_of(x, 1e-12).astype(np.float64)).astype(f32)
    return Quantized(x * scale, f32(1) / scale)


def amax_over_largest(floor: float) -> Rule:
    """DeepSeek-V3's, with a floor vLLM 0.25's: a / 448, and a division per value."""

    def rule(x: F32) -> Quantized:
        scale = largest_of(x, floor) / LARGEST
        return Quantized(x / scale, scale)

    return rule


def deepgemm_fp32(x: F32) -> Quantized:
    """a / 448, but the codes by its rounded reciprocal."""
    scale = largest_of(x, 1e-4) / LARGEST
    return Quantized(x * (f32(1) / scale), scale)


def deepseek_v32_fp32(x: F32) -> Quantized:
    """A division per value, but a scale from a rounded 1 / 448."""
    scale = largest_of(x, 1e-4) * INVERSE
    return Quantized(x / scale, scale)


def deepep_fp32(floor: float) -> Rule:
    """Codes by 448 / a, and a stored scale that is not its reciprocal. SGLang's kernel, too, but
    for its division, which is the GPU's approximate one."""

    def rule(x: F32) -> Quantized:
        a = largest_of(x, floor)
        return Quantized(x * (LARGEST / a), a * INVERSE)

    return rule


# ---- data ---------------------------------------------------------------------------------------

M, K = 384, 512


def tiles_of_many_magnitudes(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """[M, K]: each 1x128 tile has a magnitude of its own, from 2^-115 (the table's limit is
    448 2^-126) to the largest float32, or of float16's range. A tile in 16 is zero; one in 8 has a
    maximum of 448 2^k or one of its neighbours."""
    g = torch.Generator().manual_seed(seed)
    reach = 10 if dtype is torch.float16 else 100
    shape = (M, K // 128, 1)
    kind = torch.randint(0, 16, shape, generator=g)
    power = torch.exp2(torch.randint(-reach, reach + 1, shape, generator=g).float())
    x = torch.randn(M, K // 128, 128, generator=g) * power
    top = torch.tensor([448.0, np.nextafter(f32(448), f32(0)), np.nextafter(f32(448), f32(512))])
    top = top[torch.randint(0, 3, shape, generator=g)] * torch.exp2((power.log2() / 2).round())
    x = torch.where((kind == 1) | (kind == 2), torch.minimum(torch.maximum(x, -top), top), x)
    x[..., :1] = torch.where((kind == 1) | (kind == 2), top, x[..., :1])
    x = torch.where(kind == 0, 0.0, x).view(M, K)
    x[128:256, 128:256] = 0  # of 128x128
    if dtype is torch.float16:
        return x.clamp(-6e4, 6e4).to(dtype)
    x[:128, :128] *= 2.0**-15
    x[256:, :128] *= 2.0**26
    return x.clamp(-3.38e38, 3.38e38).to(dtype)


def tiled(x: F32, rows: int) -> F32:
    """[M, K] -> [tiles, rows * 128]"""
    m, k = x.shape
    return x.reshape(m // rows, rows, k // 128, 128).swapaxes(1, 2).reshape(-1, rows * 128)


def untiled(tiles: F32, rows: int, shape: tuple[int, int]) -> F32:
    m, k = shape
    return tiles.reshape(m // rows, k // 128, rows, 128).swapaxes(1, 2).reshape(m, k)


def by_rule(x: torch.Tensor, rule: Rule, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes [M, K] and scales [M / rows, K / 128]. Codes are torch's cast of clamped
    values."""
    with np.errstate(all="ignore"):
        values, scale = rule(tiled(x.float().numpy(), rows))
    values = torch.from_numpy(untiled(values, rows, (M, K)).copy()).clamp(-448, 448)
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.from_numpy(scale.reshape(M // rows, K // 128).copy())


def ours(x: torch.Tensor, rows: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if rows == 1:
        q: Fp8Tensor = ops.quantize(x, **options)
        return q.data.view(torch.uint8), q.scale_inv
    q = ops.quantize_weight(x[None], transposed=False, **options)
    return q.data[0].view(torch.uint8), q.scale_inv[0]


# ---- bit for bit --------------------------------------------------------------------------------

ROWS: dict[str, tuple[Rule, str, float]] = {
    "DeepGEMM, ue8m0": (deepgemm_ue8m0, "pow2", 1e-4),
    "DeepSeek-V3.2 and DeepEP, rounded scales": (deepseek_round_scale, "pow2", 1e-4),
    "vLLM, ue8m0": (vllm_ue8m0, "pow2", 4.48e-8),
    "transformers, ue8m0 weights": (transformers_ue8m0, "pow2", 0.0),
    "TransformerEngine and Paddle, pow2": (transformer_engine_pow2, "pow2", 0.0),
    "TransformerEngine and Paddle, fp32": (transformer_engine_fp32, "fp32", 0.0),
    "torchao": (torchao, "fp32", 1e-12),
    "DeepSeek-V3": (amax_over_largest(0.0), "amax", 0.0),
    "vLLM 0.25": (amax_over_largest(1e-10), "amax", 1e-10),
}


@pytest.mark.parametrize("rows", [1, 128], ids=["1x128", "128x128"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_bit_equal(name: str, dtype: torch.dtype, rows: int) -> None:
    rule, scale, eps = ROWS[name]
    for seed in range(3):
        x = tiles_of_many_magnitudes(seed, dtype)
        codes, scales = ours(x, rows, scale=scale, eps=eps)
        want_codes, want_scales = by_rule(x, rule, rows)
        if name == "DeepSeek-V3":  # 0 / 0 in a tile of zeros; here codes 0 and scale 1
            zero = torch.from_numpy(largest_of(tiled(x.float().numpy(), rows))).view(scales.shape)
            zero = zero == 0
            assert zero.any()
            assert (scales[zero] == 1).all()
            want_scales[zero] = 1
            wide = zero.repeat_interleave(rows, 0).repeat_interleave(128, 1)
            assert ((codes[wide] & 0x7F) == 0).all()
            want_codes[wide] = codes[wide]
        assert torch.equal(scales.view(torch.int32), want_scales.view(torch.int32))
        assert torch.equal(codes, want_codes)


SMALL_TILES_DIFFER = ("TransformerEngine and Paddle, pow2", "DeepSeek-V3")


@pytest.mark.parametrize("name", [name for name in ROWS if name not in SMALL_TILES_DIFFER])
def test_small_tiles(name: str) -> None:
    """Maxima from 2^-149 to 448 2^-126, where scales leave the range of normal numbers."""
    rule, scale, eps = ROWS[name]
    g = torch.Generator().manual_seed(3)
    power = torch.exp2(torch.randint(-149, -117, (M, K // 128, 1), generator=g).double())
    x = (torch.randn(M, K // 128, 128, generator=g).double() * power).float().view(M, K)
    for rows in (1, 128):
        codes, scales = ours(x, rows, scale=scale, eps=eps)
        want_codes, want_scales = by_rule(x, rule, rows)
        assert torch.equal(scales.view(torch.int32), want_scales.view(torch.int32))
        assert torch.equal(codes, want_codes)


# ---- codes alone, or scales alone ---------------------------------------------------------------


def ordinal(codes: torch.Tensor) -> torch.Tensor:
    """Codes as integers that order like their values: neighbours differ by one."""
    magnitude = (codes & 0x7F).int()
    return torch.where(codes >= 0x80, -magnitude, magnitude)


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.view(torch.int32) - b.view(torch.int32)).abs().max())


@pytest.mark.parametrize(("rule", "ulp"), [(deepgemm_fp32, 0), (deepseek_v32_fp32, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_near_amax(dtype: torch.dtype, rule: Rule, ulp: int) -> None:
    """A code is at most a neighbour, where the quotient is next to a midpoint."""
    for rows in (1, 128):
        x = tiles_of_many_magnitudes(5, dtype)
        codes, scales = ours(x, rows, scale="amax", eps=1e-4)
        want_codes, want_scales = by_rule(x, rule, rows)
        assert ulps(scales, want_scales) <= ulp
        apart = (ordinal(codes) - ordinal(want_codes)).abs()
        assert apart.max() <= 1
        assert (apart != 0).float().mean() < 1e-3


@pytest.mark.parametrize("floor", [1e-4, 1e-10], ids=["DeepEP", "SGLang"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deepep_has_the_codes_of_fp32(dtype: torch.dtype, floor: float) -> None:
    """Its scales are at most 2 ulp away, as the product with 1 / 448 is rounded twice."""
    for rows in (1, 128):
        x = tiles_of_many_magnitudes(6, dtype)
        codes, scales = ours(x, rows, scale="fp32", eps=floor)
        want_codes, want_scales = by_rule(x, deepep_fp32(floor), rows)
        assert torch.equal(codes, want_codes)
        assert ulps(scales, want_scales) <= 2


@pytest.mark.parametrize("floor", [1e-4, 1e-10], ids=["DeepEP", "SGLang"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_approx(dtype: torch.dtype, floor: float, device: torch.device) -> None:
    """DeepEP's and SGLang's scales. A GPU's codes are SGLang's: by an approximate division, at most
    2 ulp off, and so a neighbour where a product is next to a midpoint."""
    for rows in (1, 128):
        x = tiles_of_many_magnitudes(8, dtype)
        codes, scales = ours(x, rows, scale="approx", eps=floor)
        want_codes, want_scales = by_rule(x, deepep_fp32(floor), rows)
        assert torch.equal(scales.view(torch.int32), want_scales.view(torch.int32))
        apart = (ordinal(codes) - ordinal(want_codes)).abs()
        assert apart.max() <= (0 if device.type == "cpu" else 1)
        assert (apart != 0).float().mean() < 5e-3


def test_approx_of_extreme_tiles() -> None:
    """Without a floor, tiles of any magnitude: scales are normal numbers, and codes as they give
    the values."""
    x = torch.zeros(4, 128)
    x[1, 0], x[2, 0], x[3, :] = 1e-44, 3e38, torch.nan
    x[2, 1] = torch.inf
    q = ops.quantize(x, scale="approx", eps=0.0)
    assert q.scale_inv.flatten().tolist() == [1.0, 2.0**-126, 1.0, 1.0]
    assert (q.data[3].view(torch.uint8) == 0x7F).all()
    x[2, 1] = 0
    q = ops.quantize(x, scale="approx", eps=0.0)
    assert q.dequantize("float32")[2, 0] == pytest.approx(3e38)


def test_fp32_and_amax_are_two_rules() -> None:
    """They agree in most scales and codes: a client who needs the bits has to choose."""
    x = tiles_of_many_magnitudes(7, torch.float32)
    a, b = (ours(x, 1, scale=scale, eps=1e-10) for scale in ("fp32", "amax"))
    assert 0 < (a[0] != b[0]).float().mean() < 2.3e-3
    assert ulps(a[1], b[1]) == 1
