"""bench --layer: the arithmetic of its rows, the peer's numbers, and all of it at tiny sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8moe_cutlass.bench import layer_report, memory
from fp8moe_cutlass.bench.kernels import Kernel, kernels_of, profile, roles
from fp8moe_cutlass.bench.layer import SHAPES, block, limit, run_layer
from fp8moe_cutlass.bench.layer_peers import IndexingTorchExperts, TorchExperts, peers
from fp8moe_cutlass.bench.layer_runs import Burst, routing
from moe_problem import problem
from reference import relative_error

CPU = torch.device("cpu")
V3 = SHAPES["cuda"]["DeepSeek-V3, 32 experts"]


# ---- arithmetic ---------------------------------------------------------------------------------


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


def test_weight_bytes() -> None:
    got = memory.weight_bytes(3, 200, 144)
    parameters = 3 * (288 * 200 + 200 * 144)
    scales = 3 * 4 * (3 * 2 + 2 * 2)  # blocks of [288, 200] and of [200, 144]
    assert got["bf16 parameters"] == got["bf16 gradients"] == 2 * parameters
    assert got["fp32 main_grad"] == 4 * parameters
    assert got["fp8 copies"] == got["fp8 transposes"] == parameters + scales


def test_limit_is_arithmetic_for_many_tokens_and_bytes_for_few() -> None:
    limits: Any = SimpleNamespace(tensor_tflops=1200.0, copy_tb_s=4.0)  # of an H200, about
    many = limit(V3, limits, parts=3, experts_used=32)
    assert many["flops"] == 3 * 2 * 32768 * (4096 * 7168 + 7168 * 2048)
    assert many["limit_ms"] == pytest.approx(many["flops"] / 1200e9)
    few = limit({**V3, "T": 1}, limits, parts=1, experts_used=8)
    assert few["bytes"] == 8 * 3 * 7168 * 2048 + 2 * 2 * 7168
    assert few["limit_ms"] == pytest.approx(few["bytes"] / 4e9)


def test_routings() -> None:
    for kind in ("random", "zipf"):
        idx = routing(kind, 500, 16, 4, CPU)
        assert idx.shape == (500, 4)
        assert all(len(set(row)) == 4 for row in idx.tolist())
        counts = torch.bincount(idx.flatten(), minlength=16)
        assert (counts[0] > 3 * counts[12:].float().mean()) == (kind == "zipf")
    assert not routing("one-hot", 5, 16, 4, CPU).any()


# ---- contenders and kernels ---------------------------------------------------------------------


@pytest.mark.parametrize("peer", [TorchExperts, IndexingTorchExperts])
def test_the_torch_peers_compute_the_block(peer: type[TorchExperts]) -> None:
    p = problem(200, 3, 5)
    layer = p.experts()
    got, want = p.run(peer(layer, 3)), p.truth()
    for name in vars(want):
        assert relative_error(getattr(got, name), getattr(want, name)) < 0.006, name


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


def test_roles_of_a_step() -> None:
    p = problem(64)
    layer = p.experts()
    layer.quantize_weights()
    p.run(layer)
    found = roles(profile(lambda: p.run(layer), CPU))
    assert list(found) == [
        *("route", "quantize x", "permute x", "fprop-1", "swiglu", "fprop-2", "unpermute"),
        *("quantize dout", "permute dout", "dgrad-2", "swiglu backward", "dgrad-1"),
        *("permute backward", "transpose x", "wgrad-1", "transpose dout", "wgrad-2"),
    ]
    assert min(found.values()) > 0


# ---- the whole ----------------------------------------------------------------------------------


LIMITS: Any = SimpleNamespace(
    device=CPU, launch=None, tensor_tflops=0.1, copy_tb_s=0.01, bf16_tflops=0.1
)


@pytest.fixture(scope="module")
def record() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8moe_cutlass.bench.layer.Limits", lambda device: LIMITS)
        yield run_layer(CPU, quick=True)


def test_the_record_has_designs_schema(record: dict[str, Any]) -> None:
    rows = {(r["variant"], r["shape"]["T"]): r for r in json.loads(json.dumps(record))["results"]}
    assert {"copy_tb_s", "tensor_tflops", "commit", "torch"} <= record["environment"].keys()
    schema = {"op", "shape", "variant", "ms", "host_us", "bytes", "flops", "limit_ms", "peers"}
    for row in rows.values():
        assert schema | {"repeat"} <= row.keys()
        assert row["ms"] > 0
        assert row["repeat"]["min"] <= row["ms"] <= row["repeat"]["max"]
        assert "errors" not in row
    variants = {variant for variant, _ in rows}
    for part in ("zipf", "one-hot", "main_grad", "recompute", "pre-activation", "no_grad", "quant"):
        assert any(part in variant for variant in variants), part
    assert {t for v, t in rows if v == "forward, no_grad"} == {1, 16, 64}
    headline = rows["forward+backward", 64]
    assert headline["peers"]["torch bf16"] > 0
    assert len(headline["kernels"]) == 17
    # By arithmetic for those whose saved tensors are known alone.
    saved = {who: m.get("saved_arithmetic") for who, m in headline["memory"].items()}
    assert saved.pop("fp8moe") < saved.pop("torch bf16")
    assert saved == {"torch bf16, index_select and index_add": None}


def test_tables_and_plot(record: dict[str, Any], tmp_path: Path) -> None:
    failed = {**record["results"][0], "ms": None, "error": "out of memory"}
    shown = {**record, "results": [*record["results"], failed]}
    text = layer_report.tables(shown)
    for row in record["results"]:
        assert f"| {row['variant']} | {layer_report.ms_text(row['ms'])} |" in text
    assert "out of memory" in text
    layer_report.plot(shown, tmp_path / "layer.png")
    assert (tmp_path / "layer.png").stat().st_size > 10_000


def test_the_headline_has_who_ran_and_is_in_the_readme() -> None:
    row = {"model": "one", "variant": "forward+backward", "ms": 2.0}
    rows = [{**row, "peers": {"a": 3.0}}, {**row, "model": "two", "peers": {"b": 5.0}}]
    lines = layer_report.headline({"results": [*rows, {**row, "error": "no"}]}).splitlines()
    assert lines[0] == "| forward and backward, ms | fp8moe | a | b |"
    assert lines[2:] == ["| one | 2.00 | 3.00 (1.50x) |  |", "| two | 2.00 |  | 5.00 (2.50x) |"]

    root = Path(__file__).parents[1]
    record = json.loads((root / "docs/benchmarks/layer-h200.json").read_text())
    assert layer_report.headline(record) in (root / "README.md").read_text()


def test_a_failing_contender_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(TorchExperts, "forward", broken)
    monkeypatch.setattr("fp8moe_cutlass.bench.layer.Limits", lambda device: LIMITS)
    monkeypatch.setattr("fp8moe_cutlass.bench.layer.QUICK", {"tiny": block(16, 2, 2, 128, 128)})
    monkeypatch.setattr(Burst, "__init__", lambda self, device: _once(self))
    rows = run_layer(CPU, quick=True)["results"]
    errors = dict.fromkeys(peers(CPU), "RuntimeError: no such kernel")
    assert all(row["errors"] == errors for row in rows)
    assert all(row["ms"] > 0 and not row["peers"] for row in rows)


def _once(burst: Any) -> None:
    burst.cuda, burst.count, burst.rounds = False, 1, 1
