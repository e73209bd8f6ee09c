"""bench ep, benchmarks/ep_soak.py and ep_trace.py at tiny sizes over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ep_soak
import ep_trace
from fp8moe_cutlass.bench import ep, ep_team
from fp8moe_cutlass.bench.contender import Inputs
from fp8moe_cutlass.nn import MoEExperts
from ranks import Pool, results

CPU = torch.device("cpu")
RANKS = 2
TINY = ep.SHAPES["quick"]["tiny"]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(RANKS, {RANKS: list(range(RANKS))})
    yield made
    made.close()


def python(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


# ---- the commands -------------------------------------------------------------------------------


def test_command_writes_what_it_shows(tmp_path: Path) -> None:
    out = tmp_path / "ep.json"
    command = ("-m", "fp8moe_cutlass", "bench", "ep", "--ranks", RANKS, "--quick", "--json", out)
    done = python(*command)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["environment"]["ranks"] == RANKS
    assert record["environment"]["backend"] == "gloo"
    rows = record["results"]
    exchanges = ["dispatch", "dispatch of a gradient", "combine"]
    layers = ["layer, forward", ep.STEP]
    variants = ["random, exact", "zipf, exact", "random, capacity 1.25"]
    assert [(r["variant"], r["op"]) for r in rows] == [
        (variant, op) for variant in variants for op in exchanges + layers
    ]
    for row in rows:
        assert row["shape"] == {"W": 2, **TINY, "E": 8}
        assert 0 < row["repeat"]["min"] <= row["ms"] <= row["repeat"]["max"]
        assert row["limit_ms"] > 0
        assert row["rows_sent"] <= TINY["T"]
        timed = f"tiny, {row['op']}, {row['variant']}, "
        assert [line.startswith(timed) for line in done.stdout.splitlines()].count(True) == 1
        # Rows of 256 codes, 2 scales, 2 ids and 2 probs: 288 bytes; a gradient's 272; bf16's 512.
        there, back = (288, 272), (512, 512 + 8)
        width = dict(zip(exchanges, (288, 272, 512), strict=True)) | {
            "layer, forward": there[0] + back[0],
            ep.STEP: sum(there) + sum(back),
        }
        assert row["bytes"] == round(row["rows_sent"] * width[row["op"]])
        if row["op"] in layers:
            assert row["flops"] == (3 if "backward" in row["op"] else 1) * 6 * 32 * 2 * 256 * 128
            assert row["efficiency"] == pytest.approx(row["alone_ms"] / row["ms"])
            assert row["tokens_per_s"] == pytest.approx(2 * 32 / row["ms"] * 1e3)
            assert row["peers"].keys() == {ep.SAME_EXCHANGE}
            assert row["dropped"] == 0 or "capacity" in row["variant"]
    assert len({r["rows_sent"] for r in rows if "capacity" in r["variant"]}) == 1


def test_the_soak_as_a_script(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    given = ("--device", "cpu", "--ranks", RANKS, "--steps", 20, "--json", out)
    done = python(BENCHMARKS / "ep_soak.py", *given)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["results"]
    assert row["passed"]
    assert len(row["loss"]) == len(row["loss_alone"]) == 20
    assert "passed" in done.stdout


# ---- counting -----------------------------------------------------------------------------------


def rows_of(group: Any) -> tuple[int, int, int]:
    """The rows that the legs count, the same by hand, and the copies without deduplication."""
    team = ep_team.Team(group, CPU)
    torch.manual_seed(team.rank)
    e, h, i = (TINY[name] for name in "EHI")
    layer = MoEExperts(e * team.size, h, i, group=group)
    inputs = Inputs.random({**TINY, "E": e * team.size}, CPU)
    legs = ep_team.Legs(layer, inputs)
    others = inputs.topk_idx // e != team.rank
    by_hand = int(others.any(dim=1).sum())  # of two ranks, the other one
    return legs.rows_to_others(), by_hand, int(others.sum())


def test_rows_are_counted_once_per_rank(pool: Pool) -> None:
    for rows, by_hand, copies in results(pool.run(RANKS, rows_of)):
        assert rows == by_hand < copies


def slowest(group: Any) -> dict[str, float]:
    import time

    team = ep_team.Team(group, CPU)
    runs = {"equal": lambda: time.sleep(0.002), "one": lambda: time.sleep(0.02 * team.rank)}
    return {name: sample.ms for name, sample in team.measure(runs, 2, 2).items()}


def test_the_slowest_rank_counts(pool: Pool) -> None:
    for found in results(pool.run(RANKS, slowest)):
        assert 2.0 <= found["equal"] < 15.0
        assert found["one"] >= 20.0


# ---- the trace ----------------------------------------------------------------------------------


def kernel(name: str, stream: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}


def test_lanes_and_overlap_of_a_gpu_trace() -> None:
    events = [
        kernel("fp8moe::cuda::quantize_pack", 7, 1000.0, 1000.0),
        kernel("ncclDevKernel_SendRecv", 20, 1500.0, 2000.0),
        kernel("nvjet_gemm", 23, 2500.0, 500.0),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9000.0, "tid": 1},
    ]
    boxes = ep_trace.boxes_of(events)
    assert [(b.lane, b.kind, b.span) for b in boxes] == [
        ("stream 7", "fp8moe", (0.0, 1.0)),
        ("exchange", "exchange", (0.5, 2.5)),
        ("stream 23", "torch", (1.5, 2.0)),
    ]
    assert ep_trace.overlapped(boxes) == pytest.approx((0.5 + 0.5) / 2.0)


def test_overlap_counts_time_once() -> None:
    box = ep_trace.Box
    boxes = [
        box("exchange", "exchange", "a", (0.0, 4.0)),
        box("exchange", "exchange", "b", (2.0, 6.0)),
    ]
    boxes += [box("s", "torch", "c", (1.0, 3.0)), box("t", "fp8moe", "d", (2.0, 3.0))]
    assert ep_trace.overlapped(boxes) == pytest.approx(2.0 / 6.0)
    assert ep_trace.overlapped(boxes[2:]) == 0.0


def traced(group: Any) -> list[dict[str, Any]]:
    return ep_trace.trace_of(ep_team.Team(group, CPU), TINY)


def test_trace_of_a_step(pool: Pool) -> None:
    boxes = ep_trace.boxes_of(results(pool.run(RANKS, traced))[0])
    # Sizes and two exchanges forward; three backward: the gradient, dprobs, dx.
    assert sum(b.kind == "exchange" for b in boxes) == 6
    assert {"fp8moe::quantize_pack", "fp8moe::grouped_gemm_wgrad"} <= {b.name for b in boxes}
    assert 0.0 <= ep_trace.overlapped(boxes) <= 1.0


# ---- the soak -----------------------------------------------------------------------------------


def soaked(group: Any) -> tuple[dict[str, Any], list[int]]:
    team = ep_team.Team(group, CPU)
    soak = ep_soak.Soak(team, ep_soak.SHAPES["cpu"])
    sizes = [len(soak.batch(step, rank)[0]) for step in range(30) for rank in range(RANKS)]
    return ep_soak.run_soak(team, 30), sizes


def test_soak_is_the_run_of_one_process(pool: Pool) -> None:
    (row, sizes), (other, _) = results(pool.run(RANKS, soaked))
    assert row["loss"] == other["loss"]
    assert row["passed"]
    assert 0 in sizes
    assert len(set(sizes)) > 10
    assert 0 < row["deviation_max"] < ep_soak.BOUND
    assert row["loss"][-1] != row["loss"][0]


def broken(group: Any) -> bool:
    """A soak whose ranks after the first scale what they give back."""
    team = ep_team.Team(group, CPU)
    forward = MoEExperts.forward

    def off(self: MoEExperts, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * (1.0 + 0.05 * team.rank)

    MoEExperts.forward = off  # type: ignore[method-assign]
    try:
        return bool(ep_soak.run_soak(team, 20)["passed"])
    finally:
        MoEExperts.forward = forward  # type: ignore[method-assign]


def test_soak_notices_a_wrong_rank(pool: Pool) -> None:
    assert results(pool.run(RANKS, broken)) == [False, False]
