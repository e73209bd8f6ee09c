"""bench --ep at tiny sizes over gloo: rows, counted bytes, the trace's lanes, the soak."""

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

from fp8moe_cutlass import cli
from fp8moe_cutlass.bench import ep, ep_report, ep_runs, ep_soak, ep_trace
from fp8moe_cutlass.bench.layer_runs import Inputs
from fp8moe_cutlass.nn import MoEExperts
from ranks import Pool, results

CPU = torch.device("cpu")
RANKS = 2
TINY = ep.QUICK["tiny"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(RANKS, {RANKS: list(range(RANKS))})
    yield made
    made.close()


def bench(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fp8moe_cutlass", "bench", *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


# ---- the command --------------------------------------------------------------------------------


def test_command_writes_table_json_and_plot(tmp_path: Path) -> None:
    out, plot = tmp_path / "ep.json", tmp_path / "ep.png"
    done = bench("--ep", RANKS, "--quick", "--json", out, "--plot", plot)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["environment"]["ranks"] == RANKS
    assert record["environment"]["backend"] == "gloo"
    rows = record["results"]
    exchanges = ["dispatch", "dispatch of a gradient", "combine", "plan and sizes"]
    layers = ["layer, forward", "layer, forward+backward"]
    variants = ["random, exact", "zipf, exact", "random, capacity 1.25"]
    assert [(r["variant"], r["op"]) for r in rows] == [
        (variant, op) for variant in variants for op in exchanges + layers
    ]
    for row in rows:
        assert row["shape"] == {"W": 2, **TINY, "E": 8}
        assert 0 < row["repeat"]["min"] <= row["ms"] <= row["repeat"]["max"]
        assert row["rows_sent"] <= TINY["T"]
        assert done.stdout.count(row["variant"]) >= 6
        timed = f"{row['op']} tiny {row['variant']} "
        assert [line.startswith(timed) for line in done.stdout.splitlines()].count(True) == 1
        if row["op"] == "plan and sizes":
            continue
        assert row["limit_ms"] > 0
        # Rows of 256 codes, 2 scales, 2 ids and 2 probs: 288 bytes; a gradient's 272; bf16's 512.
        there, back = (288, 272), (512, 512 + 8)
        width = dict(zip(exchanges, (288, 272, 512), strict=False)) | {
            "layer, forward": there[0] + back[0],
            "layer, forward+backward": sum(there) + sum(back),
        }
        assert row["bytes"] == round(row["rows_sent"] * width[row["op"]])
        if row["op"] in layers:
            assert row["flops"] == (3 if "backward" in row["op"] else 1) * 6 * 32 * 2 * 256 * 128
            assert row["efficiency"] == pytest.approx(row["alone_ms"] / row["ms"])
            assert row["tokens_per_s"] == pytest.approx(2 * 32 / row["ms"] * 1e3)
            assert row["peers"].keys() == {ep_report.SAME}
            assert row["dropped"] == 0 or "capacity" in row["variant"]
    fixed = {r["rows_sent"] for r in rows if "capacity" in r["variant"]}
    assert len(fixed) == 1
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_command_soaks(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    done = bench("--ep", RANKS, "--soak", 20, "--json", out, "--plot", tmp_path / "soak.png")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["results"]
    assert row["passed"]
    assert len(row["loss"]) == len(row["loss_alone"]) == 20
    assert "passed" in done.stdout
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--soak", 100), "need --ep"),
        (("--ep", 2, "--layer"), "exclude each other"),
        (("--ep", 2, "--soak", 20, "--trace", "t.json"), "--soak and --trace exclude each other"),
        (("--ep", 0), "must be at least 1; got 0"),
    ],
)
def test_command_refuses(
    args: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fp8moe-cutlass", "bench", *map(str, args)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


# ---- counting -----------------------------------------------------------------------------------


def rows_of(group: Any) -> tuple[int, int, int, int]:
    """Rows and copies the legs count, and the same by hand."""
    team = ep_runs.Team(group, CPU)
    torch.manual_seed(team.rank)
    e, h, i = (TINY[name] for name in "EHI")
    layer = MoEExperts(e * team.size, h, i, group=group)
    inputs = Inputs.random({**TINY, "E": e * team.size}, CPU)
    legs = ep_runs.Legs(layer, inputs)
    others = inputs.topk_idx // e != team.rank
    by_hand = int(others.any(dim=1).sum())  # of two ranks, the other one
    return legs.rows_to_others(), legs.copies_to_others(), by_hand, int(others.sum())


def test_rows_are_counted_once_a_rank(pool: Pool) -> None:
    for rows, copies, rows_by_hand, copies_by_hand in results(pool.run(RANKS, rows_of)):
        assert (rows, copies) == (rows_by_hand, copies_by_hand)
        assert rows < copies


def slowest(group: Any) -> dict[str, float]:
    import time

    team = ep_runs.Team(group, CPU)
    runs = {"equal": lambda: time.sleep(0.002), "one": lambda: time.sleep(0.02 * team.rank)}
    return {name: sample.ms for name, sample in team.measure(runs, 2, 2).items()}


def test_the_slowest_rank_counts(pool: Pool) -> None:
    for found in results(pool.run(RANKS, slowest)):
        assert 2.0 <= found["equal"] < 15.0
        assert found["one"] >= 20.0


def capturing(group: Any, fails_on: int) -> list[str]:
    """What is left to time where one rank's capture fails."""
    team = ep_runs.Team(group, CPU)

    class Step:
        def step(self) -> None:
            pass

        def graph(self, run: Any) -> Any:
            if team.rank == fails_on:
                raise RuntimeError("no capture here")
            return run

    limits: Any = None
    contender: Any = Step()
    return list(ep.Group("tiny", TINY, team, limits, True)._captured(contender))


def test_a_step_is_captured_on_all_ranks_or_on_none(pool: Pool) -> None:
    assert results(pool.run(RANKS, capturing, -1)) == [["captured"]] * RANKS
    assert results(pool.run(RANKS, capturing, 1)) == [[]] * RANKS


# ---- the trace ----------------------------------------------------------------------------------


def kernel(name: str, stream: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}


def test_lanes_and_overlap_of_a_gpu_trace(tmp_path: Path) -> None:
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
    ep_trace.draw(boxes, tmp_path / "trace.png", "three lanes")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_overlap_counts_time_once() -> None:
    box = ep_trace.Box
    boxes = [
        box("exchange", "exchange", "a", (0.0, 4.0)),
        box("exchange", "exchange", "b", (2.0, 6.0)),
    ]
    boxes += [box("s", "torch", "c", (1.0, 3.0)), box("t", "fp8moe", "d", (2.0, 3.0))]
    assert ep_trace.overlapped(boxes) == pytest.approx(2.0 / 6.0)
    assert ep_trace.overlapped(boxes[2:]) == 0.0


def traced(group: Any, path: Path) -> dict[str, Any]:
    return ep_trace.run_trace(ep_runs.Team(group, CPU), "tiny", TINY, path)


def test_trace_of_a_step(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    row = results(pool.run(RANKS, traced, path))[0]
    boxes = ep_trace.boxes_of(json.loads(path.read_text())["traceEvents"])
    # Sizes and two exchanges forward; three backward: the gradient, dprobs, dx.
    assert sum(b.kind == "exchange" for b in boxes) == 6
    assert {"fp8moe::quantize_pack", "fp8moe::grouped_gemm_wgrad"} <= {b.name for b in boxes}
    assert 0.0 < row["exchange_ms"] <= row["ms"]
    assert 0.0 <= row["overlapped"] <= 1.0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


# ---- the soak -----------------------------------------------------------------------------------


def soaked(group: Any) -> tuple[dict[str, Any], list[int]]:
    team = ep_runs.Team(group, CPU)
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
    team = ep_runs.Team(group, CPU)
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
