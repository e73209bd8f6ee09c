"""What the figures of benchmarks/ are made by, on a CPU: orders, baselines, records."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gemm_accuracy
import gemm_baselines
import layer
import layer_memory as memory
import plot
import sweep
import timing
from cases import transposed
from fp8moe_cutlass import ops
from fp8moe_cutlass.nn import MoEExperts
from kernel_trace import Kernel, kernels_of
from layer import OURS, QUANTIZING, REUSING, SHAPES
from layer_baselines import TORCH, IndexingTorchExperts
from moe_problem import problem
from reference import relative_error
from timing import CpuTimer, balanced_orders
from torch_experts import TorchExperts

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", range(1, 9))
def test_each_call_follows_every_other_equally_often(count: int) -> None:
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert len(pairs) == count * (count - 1)
    assert len(set(pairs.values())) <= 1


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still but for what a call adds to it."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_calls_take_turns_and_the_best_counts(ticks: list[float]) -> None:
    order: list[str] = []
    taken = iter([9.0, 0.004, 0.002, 0.003, 0.002, 0.005])  # seconds; the first warms up

    def slow() -> None:
        order.append("slow")
        ticks[0] += next(taken)

    samples = CpuTimer(seconds=0.0).measure(slow, lambda: order.append("none"))
    assert order == ["slow", "none"] * 6
    assert samples[0].ms == pytest.approx(2.0)
    assert samples[0].repeat == pytest.approx({"min": 2.0, "median": 3.0, "max": 5.0})
    assert samples[1].ms == 0.0


def test_padded_rows_are_the_same_product() -> None:
    counts = [5, 0, 130, 64]
    plan = ops.plan_from_counts(torch.tensor(counts), capacity=sum(counts))
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
    plan = ops.plan_from_counts(torch.tensor(counts), capacity=sum(counts))
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


def test_accuracy_sees_a_lost_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ops.grouped_gemm

    def lossy(*args: Any, **kwargs: Any) -> torch.Tensor:
        return honest(*args, **kwargs) * (1 + 2.0**-7)

    monkeypatch.setattr(gemm_accuracy.ops, "grouped_gemm", lossy)
    rows = gemm_accuracy.compare("largest", gemm_accuracy.largest, 384, CPU)
    assert all(row["c"] > 1 for row in rows)


V3 = SHAPES["cuda"]["DeepSeek-V3, 32 experts"]


@pytest.mark.parametrize(("keep", "kib"), [("bf16", 72), ("fp8", 41), ("none", 7.5)])
def test_saved_per_token_at_v3(keep: str, kib: float) -> None:
    t, e, s, h, i = V3.values()
    saved = memory.saved_bytes(t, s, e, h, i, keep=keep)
    # Codes and scales of x, probs, the plan's three indices an assignment, its offsets and blocks.
    expected = t * (h + 4 * h // 128) + 4 * t * s + 4 * (3 * t * s + 3 * e + 2 + 8)
    expected += 16 * ((t * s + 127 * e) // 128)
    expected += {"bf16": t * s * 4 * i, "fp8": t * s * (2 * i + 4 * 2 * i // 128), "none": 0}[keep]
    assert expected <= saved <= expected + 64  # sections of the plan start at multiples of 16 bytes
    assert saved / t < kib * 1024
    assert memory.bf16_saved_bytes(t, s, h, i) / t == 208 * 1024


@pytest.mark.parametrize("peer", [TorchExperts, IndexingTorchExperts])
def test_the_torch_peers_compute_the_block(peer: type[TorchExperts]) -> None:
    p = problem(200, 3, 5)
    layer = p.experts()
    got, want = p.run(peer(layer)), p.truth()
    for name in vars(want):
        assert relative_error(getattr(got, name), getattr(want, name)) < 0.006, name


def test_the_torch_peer_has_the_biases() -> None:
    """Output and the biases' gradients are those of the layer in bf16."""
    torch.manual_seed(0)
    layer = MoEExperts(5, 64, 80, bias=True, recipe=None)
    p, x = problem(200, 3, 5), torch.randn(200, 64).bfloat16()
    made = []
    for module in (layer, TorchExperts(layer)):
        layer.zero_grad()
        out = module(x, p.topk_idx, p.probs)
        out.backward(torch.ones_like(out))
        made.append([out.detach(), *(bias.grad for bias in layer.local_biases())])
    for got, want in zip(*made, strict=True):
        assert relative_error(got, want) < 0.02  # torch adds up gradients of biases in bf16


def test_kernels_belong_to_the_operator_that_launched_them() -> None:
    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, link: int = 0) -> Any:
        args = {"correlation": link}
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events = [
        event("cpu_op", "fp8moe::quantize", 0, 10),
        event("cuda_runtime", "cudaLaunchKernelExC", 5, 1, link=1),
        event("cpu_op", "aten::add", 11, 10),
        event("cuda_runtime", "cudaLaunchKernel", 12, 1, link=2),
        event("kernel", "rows", 20, 7, tid=99, link=1),
        event("cpu_op", "fp8moe::quantize", 30, 10, tid=2),
        event("cuda_runtime", "cudaLaunchKernel", 31, 1, tid=1, link=3),  # of another thread
        event("cuda_driver", "cuLaunchKernelEx", 32, 1, tid=2, link=4),
        event("kernel", "add", 40, 3, tid=99, link=2),
        event("kernel", "other", 50, 2, tid=99, link=3),
        event("kernel", "rows", 60, 5, tid=99, link=4),
    ]
    assert kernels_of(events, cuda=True) == [
        Kernel("quantize", 0, "rows", 7),
        Kernel("torch", 0, "add", 3),
        Kernel("torch", 0, "other", 2),
        Kernel("quantize", 1, "rows", 5),
    ]


LIMITS: Any = SimpleNamespace(device=CPU, launch=None, tensor_tflops=0.1, copy_tb_s=0.01)


def test_the_full_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "Limits", lambda device: LIMITS)
    record = layer.run_layer(CPU, quick=True)
    rows = {(r["variant"], r["shape"]["T"]): r for r in record["results"]}
    assert [r["variant"] for r in record["results"]][:2] == [QUANTIZING, REUSING]
    for row in rows.values():
        assert row["repeat"]["min"] <= row["ms"] <= row["repeat"]["max"]
        assert "errors" not in row
    variants = {variant for variant, _ in rows}
    for part in ("zipf", "one-hot", "main_grad", "recompute", "pre-activation", "no_grad"):
        assert any(part in variant for variant in variants), part
    assert {t for v, t in rows if v == "forward, no_grad"} == {1, 16, 64}
    assert rows[QUANTIZING, 64]["peers"].keys() == {TORCH}
    reused = rows[REUSING, 64]
    assert reused["peers"][TORCH] > 0
    assert len(reused["kernels"]) == 17
    # By arithmetic only for those whose saved tensors are known.
    saved = {who: m.get("saved_arithmetic") for who, m in reused["memory"].items()}
    assert saved.pop(OURS) < saved.pop(TORCH)
    assert saved == {"torch bf16, index_select and index_add": None}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"tokens": (4, 12), "I": (128,), "E": (2, 3), "H": (128,)}
    monkeypatch.setitem(sweep.GRIDS, "cpu", grid)
    monkeypatch.setattr(sweep, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "Limits", lambda device: LIMITS)


@pytest.mark.usefixtures("tiny")
def test_a_budget_cuts_and_a_second_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.chain([0.0, 0.0, 0.0], itertools.repeat(99.0))
    with monkeypatch.context() as patch:
        patch.setattr(sweep.time, "monotonic", lambda: next(clock))
        cut = sweep.run_sweep(CPU, 50.0, [])
    assert (len(cut["results"]), cut["points"]) == (2, 4)
    measured: list[Any] = []
    whole = sweep.run_sweep(CPU, 60.0, cut["results"], measured.append)
    assert whole["results"] == cut["results"] + measured
    assert [row["shape"] for row in whole["results"]] == sweep.points("cpu")
    for row in whole["results"]:
        assert row["ms"] > 0
        assert row["peers"]["torch bf16"] > 0
        assert row["weights_ms"] > 0


@pytest.mark.usefixtures("tiny")
def test_a_failing_point_is_named_and_not_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(self: Any, *args: Any) -> Any:
        raise RuntimeError("out of memory")

    good = sweep.point(sweep.points("cpu")[0], CPU)
    monkeypatch.setattr(TorchExperts, "forward", broken)
    bad = sweep.point(sweep.points("cpu")[1], CPU)
    assert bad["error"] == "RuntimeError: out of memory"
    environment = {"gpu": None, "cpu": "one", "torch": "2"}
    plot.draw({"environment": environment, "results": [good, bad]}, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
