"""benchmarks/gemm*.py, as far as a machine without a GPU goes: cases, baselines, accuracy."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

import gemm
import gemm_accuracy
import gemm_baselines
from cases import transposed
from common import ignore
from fp8moe_cutlass import RoutingPlan, ops

CPU = torch.device("cpu")


def test_geometric_means() -> None:
    row = {"op": "fprop", "ms": 1.0, "peers": {"a": 2.0}}
    rows = [row, {**row, "peers": {"a": 8.0}}, {**row, "op": "wgrad", "peers": {}}]
    assert list(gemm.summary({"results": rows})) == ["fprop, burst: 4.000 of a over 2 cases"]


def test_cases_have_every_model_and_kind() -> None:
    cases = gemm.all_cases()
    assert len(set(cases)) == len(cases)
    assert all(c.m % c.e == 0 for c in cases)
    for name in gemm.PASSES:
        assert {c.model for c in cases if c.gemm == name} >= set(gemm.MODELS)
    kinds = {(c.dtype, c.columns, c.accumulate) for c in cases if c.gemm == "wgrad"}
    assert kinds == {
        ("float32", "block", False),
        ("float32", "block", True),
        ("bfloat16", "block", False),
        ("float32", "column", False),
    }


def test_padded_rows_are_the_same_product() -> None:
    counts = [5, 0, 130, 64]
    plan = RoutingPlan.from_counts(torch.tensor(counts), capacity=sum(counts))
    q = ops.quantize(torch.randn(sum(counts), 384), scale_layout="gemm")
    data, scale, of_row = gemm_baselines.padded_rows(q, counts)
    assert data.shape == (128 + 256 + 128, 384)
    assert scale.shape == (data.shape[0], 3)
    assert scale.stride() == (1, data.shape[0])
    value = data.float() * scale.repeat_interleave(128, 1)
    exact = q.dequantize("float32")
    for e, count in enumerate(counts):
        at = of_row == e
        assert int(at.sum()) == count
        first = int(plan.row_offsets[e])
        assert torch.equal(value[at], exact[first : first + count])
        if count:  # groups start at multiples of 128
            assert int(at.nonzero()[0]) % 128 == 0
    assert not value[of_row < 0].any()


@pytest.mark.parametrize("columns", ["block", "column"])
def test_flat_segments_are_the_same_product(columns: str) -> None:
    counts = [5, 0, 130, 128]
    plan = RoutingPlan.from_counts(torch.tensor(counts), capacity=sum(counts))
    x = torch.randn(sum(counts), 272)
    t = transposed(x, plan, columns)  # type: ignore[arg-type]
    padded = gemm_baselines.whole_tiles(counts)
    assert padded == [128, 0, 256, 128]
    data, scale = gemm_baselines.flat_segments(t, padded)
    assert scale.shape == (272, sum(padded) // 128)
    assert scale.stride() == (1, 272)
    dw = ops.grouped_gemm_wgrad(t, t, plan)
    start = 0
    for e, k in enumerate(padded):
        part = data[272 * start : 272 * (start + k)].view(272, k).float()
        value = part * scale[:, start // 128 : (start + k) // 128].repeat_interleave(128, 1)
        assert torch.allclose(value @ value.t(), dw[e], rtol=1e-4, atol=1e-3)
        start += k


def test_accuracy_rows() -> None:
    record = gemm_accuracy.run(CPU, Namespace(quick=True), ignore)
    assert {row["op"] for row in record["results"]} == set(gemm_accuracy.OPERANDS)
    # The CPU sums in float32: a few hundredths of the tensor core's unit.
    assert max(row["c"] for row in record["results"]) < 0.1
    assert {row["who"] for row in record["results"]} == {"ours"}


def test_accuracy_sees_a_lost_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ops.grouped_gemm

    def lossy(*args: Any, **kwargs: Any) -> torch.Tensor:
        return honest(*args, **kwargs) * (1 + 2.0**-7)

    monkeypatch.setattr(gemm_accuracy.ops, "grouped_gemm", lossy)
    rows = gemm_accuracy.compare("largest", gemm_accuracy.largest, 384, CPU)
    assert all(row["c"] > 1 for row in rows)
