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


@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax", "approx"])
@pytest.mark.parametrize(
    ("counts", "n", "k"),
    [
        ([128, 0, 5, 300, 1, 193], 1408, 2048),
        ([1030, 990, 64, 65], 4096, 7168),
        ([200, 3896], 4096, 256),  # tail tiles of several rows fill the last wave
    ],
)
def test_fprop_has_the_same_bits(counts: list[int], n: int, k: int, scale: ScaleKind) -> None:
    """Its groups begin at multiples of 128 rows; ours do not."""
    rows, experts = sum(counts), len(counts)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    w = torch.randn(experts, n, k, device="cuda").bfloat16()
    a = ops.quantize(x, scale=scale, scale_layout="gemm")
    w_q = ops.quantize_weight(w, scale=scale)[0]
    sizes = torch.tensor(counts, dtype=torch.int32, device="cuda")
    d = ops.grouped_gemm(a, w_q, ops.plan_from_counts(sizes, capacity=rows))
    data, scale_inv, of_row = padded_rows(a, counts)
    theirs = torch.zeros(len(of_row), n, dtype=torch.bfloat16, device="cuda")
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (data, scale_inv), (w_q.data, w_q.scale_inv), theirs, of_row, disable_ue8m0_cast=True
    )
    assert d.abs().max() > 0
    assert torch.equal(theirs[of_row >= 0].view(torch.int16), d.view(torch.int16))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_layer_is_the_engines_rules_around_deep_gemm(engine: Any) -> None:
    """vLLM's in every bit. SGLang's but for rows in which an approximate instruction decides, which
    the reference computes exactly."""
    p = problem(300, 2, 4, 1024, 512)
    q = p.to("cuda")
    layer = q.experts(recipe=Fp8Recipe.rollout(engine))
    weights = layer.quantize_weights()

    def gemm(rows: engines.Quantized, expert: int, projection: str) -> Tensor:
        w = getattr(weights, projection)
        count = len(rows.codes)
        scale = torch.nn.functional.pad(rows.scale.T, (0, -count % 4)).contiguous()
        a = Fp8Tensor(rows.codes.cuda(), scale.cuda(), "gemm", w.pow2)
        data, scale_inv, of_row = padded_rows(a, [count])
        d = torch.zeros(len(of_row), w.shape[1], dtype=torch.bfloat16, device="cuda")
        one = (w.data[expert][None], w.scale_inv[expert][None])
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (data, scale_inv), one, d, of_row, disable_ue8m0_cast=True
        )
        return d[:count].cpu()

    with torch.no_grad():
        out = layer(q.x, q.topk_idx, q.probs).cpu()
    want = engines.experts(p.x, p.topk_idx, p.probs, engine, gemm)
    equal = (out == want).all(1).float().mean()
    assert equal == 1 if engine == "vllm" else equal > 0.3
    assert (out - want).norm() < 1e-2 * want.norm()
