"""grouped_gemm, and a layer by an engine's rules, have DeepGEMM's bits, where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reference_engines as engines
from fp8moe_cutlass import Fp8Recipe, Fp8Tensor, ops
from fp8moe_cutlass.typing import ScaleKind
from gemm_baselines import padded_rows
from moe_problem import problem

deep_gemm = pytest.importorskip("deep_gemm")

RAGGED = [300, 128, 5, 0, 250, 193, 77, 400]
MODELS = {  # hidden, intermediate
    "DeepSeek-V3": (7168, 2048),
    "DeepSeek-V2-Lite": (2048, 1408),
    "Qwen3-30B": (2048, 768),
    "Qwen3-235B": (4096, 1536),
    "GLM-4.5": (5120, 1536),
}
SHAPES = {
    **{f"{name}, gate and up": (RAGGED, 2 * i, h) for name, (h, i) in MODELS.items()},
    **{f"{name}, down": (RAGGED, h, i) for name, (h, i) in MODELS.items()},
    "full waves": ([1030, 990, 64, 65], 4096, 7168),
    "tail": ([200, 3896], 4096, 256),  # tail tiles of several rows fill the last wave
}


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def contiguous(a: Fp8Tensor, w: Fp8Tensor, counts: list[int]) -> Tensor:
    """DeepGEMM's product of a [M, K] and w [E, N, K], its groups padded to 128 rows."""
    data, scale_inv, of_row = padded_rows(a, counts)
    d = torch.zeros(len(of_row), w.shape[1], dtype=torch.bfloat16, device="cuda")
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (data, scale_inv), (w.data, w.scale_inv), d, of_row, disable_ue8m0_cast=True
    )
    return d[of_row >= 0]


def masked(a: Fp8Tensor, w: Fp8Tensor, counts: list[int]) -> Tensor:
    """DeepGEMM's masked product: each group has room for equally many rows."""
    room = -(-max(counts) // 128) * 128
    data = torch.zeros(len(counts), room, a.shape[1], dtype=torch.uint8, device="cuda")
    scale = torch.zeros(len(counts), a.scale_inv.shape[0], room, device="cuda")
    start = 0
    for e, count in enumerate(counts):
        data[e, :count] = a.data.view(torch.uint8)[start : start + count]
        scale[e, :, :count] = a.scale_inv[:, start : start + count]
        start += count
    d = torch.zeros(len(counts), room, w.shape[1], dtype=torch.bfloat16, device="cuda")
    sizes = torch.tensor(counts, dtype=torch.int32, device="cuda")
    expected = sum(counts) // len(counts)
    name = "m_grouped_fp8_gemm_nt_masked"  # sgl-deep-gemm has another
    multiply = getattr(deep_gemm, name, None) or deep_gemm.fp8_m_grouped_gemm_nt_masked
    operands = (data.view(a.data.dtype), scale.transpose(1, 2)), (w.data, w.scale_inv)
    multiply(*operands, d, sizes, expected, disable_ue8m0_cast=True)
    return torch.cat([d[e, :count] for e, count in enumerate(counts)])


@pytest.mark.parametrize("layout", [contiguous, masked])
@pytest.mark.parametrize("shape", SHAPES)
def test_fprop_has_the_same_bits(shape: str, layout: Any) -> None:
    """By every rule of scales. Its groups begin at multiples of 128 rows; ours do not."""
    counts, n, k = SHAPES[shape]
    rows, experts = sum(counts), len(counts)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    w = torch.randn(experts, n, k, device="cuda").bfloat16()
    sizes = torch.tensor(counts, dtype=torch.int32, device="cuda")
    plan = ops.plan_from_counts(sizes, capacity=rows)
    scales: tuple[ScaleKind, ...] = ("pow2", "fp32", "amax", "approx")
    for scale in scales:
        a = ops.quantize(x, scale=scale, scale_layout="gemm")
        w_q = ops.quantize_weight(w, scale=scale)[0]
        d = ops.grouped_gemm(a, w_q, plan)
        assert d.abs().max() > 0
        assert same(layout(a, w_q, counts), d), scale


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_layer_is_the_engines_rules_around_deep_gemm(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every bit of the outputs of 100 routings."""
    if engine == "sglang":
        monkeypatch.setattr(engines, "largest_over", engines.on_gpu(engines.LARGEST_OVER))
        monkeypatch.setattr(engines, "silu", engines.on_gpu(engines.SILU))
    p = problem(128, 2, 4, 1024, 512)
    q = p.to("cuda")
    layer = q.experts(recipe=Fp8Recipe.rollout(engine))
    weights = layer.quantize_weights()

    def gemm(rows: engines.Quantized, expert: int, projection: str) -> Tensor:
        w = getattr(weights, projection)
        count = len(rows.codes)
        scale = torch.nn.functional.pad(rows.scale.T, (0, -count % 4)).contiguous()
        a = Fp8Tensor(rows.codes.cuda(), scale.cuda(), "gemm", w.pow2)
        one = Fp8Tensor(w.data[expert][None], w.scale_inv[expert][None], "block", w.pow2)
        return contiguous(a, one, [count]).cpu()

    for _ in range(100):
        x = torch.randn_like(p.x)
        ids = torch.rand(len(x), 4).topk(2).indices
        probs = torch.rand(len(x), 2)
        with torch.no_grad():
            out = layer(x.cuda(), ids.cuda(), probs.cuda(), weights=weights).cpu()
        assert same(out, engines.experts(x, ids, probs, engine, gemm))
