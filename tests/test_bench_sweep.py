"""bench --sweep and --memory: the grid, the model, resuming, and the pages they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8moe_cutlass.bench import memory, memory_report, sweep, sweep_report
from fp8moe_cutlass.bench.layer import SHAPES, block
from fp8moe_cutlass.bench.layer_peers import TorchExperts
from fp8moe_cutlass.bench.sweep_model import bf16_seconds, fp8_seconds, weights_seconds

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).parents[1] / "docs" / "benchmarks"


class Limits:
    """Measured nowhere."""

    device, launch, copy_tb_s, tensor_tflops, bf16_tflops = CPU, None, 0.02, 0.1, 0.05

    def __init__(self, device: torch.device) -> None:
        pass


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"tokens": (4, 12), "I": (128,), "E": (2, 3), "H": (128,)}
    monkeypatch.setitem(sweep.GRIDS, "cpu", grid)
    monkeypatch.setattr(sweep, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "Limits", Limits)


# ---- the sweep ----------------------------------------------------------------------------------


def test_the_grid_spans_its_axes_and_stays_in_bounds() -> None:
    points = sweep.points("cuda")
    assert len({tuple(p.values()) for p in points}) == len(points) > 40
    for axis in ("E", "I"):
        assert {p[axis] for p in points} == set(sweep.GRIDS["cuda"][axis])
    assert {sweep.tokens_an_expert(p) for p in points} == set(sweep.GRIDS["cuda"]["tokens"])
    assert max(sweep.flops(p) for p in points) <= sweep.MOST_FLOPS
    # The first third has small and large of everything.
    first = points[: len(points) // 3]
    assert len({p["E"] for p in first}) > 1
    assert len({sweep.tokens_an_expert(p) for p in first}) > 2


@pytest.mark.usefixtures("tiny")
def test_a_budget_cuts_and_a_second_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep.run_sweep(CPU, 0.0)["results"] == []
    clock = iter([0.0, 0.0, 0.0, 99.0])
    with monkeypatch.context() as patch:
        patch.setattr(sweep.time, "monotonic", lambda: next(clock))
        cut = sweep.run_sweep(CPU, 50.0)
    assert (len(cut["results"]), cut["points"]) == (2, 4)
    measured: list[Any] = []
    whole = sweep.run_sweep(CPU, 60.0, cut["results"], measured.append)
    assert whole["results"] == cut["results"] + measured
    assert len(measured) == 2
    assert [row["shape"] for row in whole["results"]] == sweep.points("cpu")
    for row in whole["results"]:
        assert row["ms"] > 0
        assert row["peers"]["torch bf16"] > 0
        assert row["weights_ms"] > 0
        assert f"{row['ms']:.3f}" in sweep_report.cells(row)


@pytest.mark.usefixtures("tiny")
def test_a_failing_point_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(self: Any, *args: Any) -> Any:
        raise RuntimeError("out of memory")

    good = sweep.point(sweep.points("cpu")[0], CPU)
    monkeypatch.setattr(TorchExperts, "forward", broken)
    bad = sweep.point(sweep.points("cpu")[1], CPU)
    assert bad["error"] == "RuntimeError: out of memory"
    record = {"environment": None, "results": [good, bad], "points": 2}
    assert "out of memory" in sweep_report.markdown(record)
    sweep_report.plot(record, tmp_path / "map.png")


# ---- the model ----------------------------------------------------------------------------------


def measured(name: str) -> list[dict[str, Any]]:
    record = json.loads((BENCHMARKS / f"{name}-h200.json").read_text())
    return record["results"]  # type: ignore[no-any-return]


def test_the_model_meets_the_layer_measured_on_an_h200() -> None:
    """Within a fifth in FP8, in bf16 and for the weights alone."""
    rows = [r for r in measured("layer") if r["variant"] == "forward+backward"]
    assert len(rows) == 5
    for row in rows:
        assert 1e3 * fp8_seconds(row["shape"]) == pytest.approx(row["ms"], rel=0.2)
        torch_ms = row["peers"]["torch bf16"]
        assert 1e3 * bf16_seconds(row["shape"]) == pytest.approx(torch_ms, rel=0.2)
    rows = [r for r in measured("memory") if "weights_ms" in r]
    assert len(rows) == 5
    for row in rows:
        assert 1e3 * weights_seconds(row["shape"]) == pytest.approx(row["weights_ms"], rel=0.2)


def test_the_model_meets_the_sweep_measured_on_an_h200() -> None:
    rows = measured("sweep")
    assert len(rows) > 40
    for row in rows:
        fp8, bf16 = row["graph_ms"], row["graph_peers"]["torch bf16"]
        assert 1e3 * fp8_seconds(row["shape"], graph=True) == pytest.approx(fp8, rel=0.2)
        assert 1e3 * bf16_seconds(row["shape"], graph=True) == pytest.approx(bf16, rel=0.2)
        # Eager, what the device does sooner is the host's, which was busy in that run.
        if fp8 > 1.2:
            assert 1e3 * fp8_seconds(row["shape"]) == pytest.approx(row["ms"], rel=0.2)
        if bf16 > 2.0:
            eager = row["peers"]["torch bf16"]
            assert 1e3 * bf16_seconds(row["shape"]) == pytest.approx(eager, rel=0.2)
        if row["weights_ms"] > 0.1:
            assert 1e3 * weights_seconds(row["shape"]) == pytest.approx(row["weights_ms"], rel=0.2)


def test_the_model_at_its_ends() -> None:
    few, many = block(8, 128, 8, 4096, 2048), block(65536, 8, 8, 4096, 2048)
    # Few tokens: the weights are read and their gradients written. Many: arithmetic.
    parameters = 3 * 64 * 4096 * 2048
    assert fp8_seconds(few, graph=True) > 3 * parameters / 4.2e12
    assert fp8_seconds(many) > sweep.flops(many) / 1300e12
    assert 1.7 < bf16_seconds(many) / fp8_seconds(many) < 2.2
    # One token: eager is the host's time.
    assert fp8_seconds(block(1, 8, 8, 1024, 512)) == 0.95e-3


# ---- pages --------------------------------------------------------------------------------------


def test_the_page_says_whether_it_was_measured(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = "<!-- sweep: written by bench.sweep_report -->", "<!-- end of sweep -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    record = sweep.predicted()
    sweep_report.write(page, record)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "PREDICTED by the model, not measured" in text
    assert (tmp_path / "page.png").stat().st_size > 10_000
    environment = {
        **{"gpu": "NVIDIA H200", "torch": "2.11", "copy_tb_s": 4.2, "tensor_tflops": 1400.0},
    }
    sweep_report.write(page, {**record, "environment": environment})
    assert "PREDICTED" not in page.read_text()
    assert "Measured on NVIDIA H200" in page.read_text()


def test_crossover_is_where_fp8_stays_ahead() -> None:
    def row(tokens: int, fp8: float, bf16: float) -> dict[str, Any]:
        shape = block(tokens, 8, 8, 128, 128)
        ms = {"ms": fp8, "peers": {"torch bf16": bf16}, "weights_ms": 1.0, "graph_peers": {}}
        return {"shape": shape, **ms}

    record = {
        "results": [row(8, 1.0, 2.5), row(16, 2.0, 1.0), row(32, 3.0, 3.5), row(64, 4.0, 6.0)]
    }
    assert sweep_report.crossover(record)[-1] == "| 8 | 128 | 32 | none | 64 |"


def test_the_committed_pages_are_what_the_scripts_write() -> None:
    docs = BENCHMARKS.parent
    text = (docs / "when-fp8-helps.md").read_text()
    assert "PREDICTED" not in text
    swept = json.loads((BENCHMARKS / "sweep-h200.json").read_text())
    assert sweep_report.markdown(swept) in text
    assert "\n".join(sweep_report.crossover(swept)) in text
    record = json.loads((BENCHMARKS / "layer-peers-h200.json").read_text())
    assert memory_report.tables(record) in (docs / "layer.md").read_text()


# ---- memory -------------------------------------------------------------------------------------


def test_memory_by_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_report, "Limits", Limits)
    seen: list[Any] = []
    record = memory_report.run_memory(CPU, on_result=seen.append)
    assert record["results"] == seen
    assert len(seen) == 3 * len(SHAPES["cuda"])
    text = memory_report.tables(record)
    assert "| DeepSeek-V3, 32 experts | default | fp8moe | 71.3 |" in text
    assert "| DeepSeek-V3, 32 experts | recompute | fp8moe | 7.3 |" in text
    assert "| torch bf16 | 208.0 |" in text


def test_break_even() -> None:
    """Tokens at which both sides hold as much."""
    shape = SHAPES["cuda"]["DeepSeek-V3, 32 experts"]
    t, e, s, h, i = shape.values()
    tokens = memory.break_even(shape)
    copies = memory.weight_bytes(e, h, i)
    ours = copies["fp8 copies"] + copies["fp8 transposes"]
    ours += tokens * memory.saved_bytes(t, s, e, h, i) / t
    assert ours == pytest.approx(tokens * memory.bf16_saved_bytes(t, s, h, i) / t)
    assert 4 * 4096 < tokens < 6 * 4096
