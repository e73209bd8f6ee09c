"""benchmarks/sweep.py: its grid, its budget, and a point that fails."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import plot
import sweep
from torch_experts import TorchExperts

CPU = torch.device("cpu")


class Limits:
    """Measured nowhere."""

    device, launch, copy_tb_s, tensor_tflops = CPU, None, 0.02, 0.1

    def __init__(self, device: torch.device) -> None:
        pass


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"tokens": (4, 12), "I": (128,), "E": (2, 3), "H": (128,)}
    monkeypatch.setitem(sweep.GRIDS, "cpu", grid)
    monkeypatch.setattr(sweep, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "Limits", Limits)


def test_the_grid_spans_its_axes_and_stays_in_bounds() -> None:
    points = sweep.points("cuda")
    assert len({tuple(p.values()) for p in points}) == len(points) > 40
    for axis in ("E", "I"):
        assert {p[axis] for p in points} == set(sweep.GRIDS["cuda"][axis])
    assert {sweep.tokens_per_expert(p) for p in points} == set(sweep.GRIDS["cuda"]["tokens"])
    assert max(sweep.flops(p) for p in points) <= sweep.MOST_FLOPS
    # The first third has small and large of everything.
    first = points[: len(points) // 3]
    assert len({p["E"] for p in first}) > 1
    assert len({sweep.tokens_per_expert(p) for p in first}) > 2


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
