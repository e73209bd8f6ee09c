"""grouped_gemm gives DeepGEMM's bits, where that library is installed."""

from __future__ import annotations

import pytest
import torch

from fp8moe_cutlass import ops
from fp8moe_cutlass.typing import ScaleKind
from gemm_baselines import padded_rows

deep_gemm = pytest.importorskip("deep_gemm")


@pytest.mark.parametrize("scale", ["pow2", "fp32", "amax"])
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
