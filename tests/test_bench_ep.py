"""What benchmarks/ep*.py count at tiny sizes over gloo: rows, time, overlap, losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ep
import ep_soak
import ep_team
import ep_trace
import plot
import ranks
import table
from contender import Inputs
from fp8moe_cutlass.nn import MoEExperts
from ranks import Pool, results

CPU = torch.device("cpu")
RANKS = 2
TINY = ep.SHAPES["quick"]["tiny"]


pool = ranks.pool(RANKS)


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


def kept(group: Any) -> tuple[list[int], int]:
    """The rows of the record after each of two shapes, of which the second fails; all reported."""
    rows: list[int] = []
    seen: list[Any] = []

    def failing(self: Any) -> Any:
        yield {"op": "one"}
        if self.name == "second":
            raise RuntimeError("ended")

    ep.SHAPES["quick"] = {"first": TINY, "second": TINY}
    ep.Group.rows = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="ended"):
        ep.run_ep(CPU, True, seen.append, keep=lambda record: rows.append(len(record["results"])))
    return rows, len(seen)


def test_a_run_that_ends_keeps_the_shapes_it_has_done() -> None:
    pool = Pool(RANKS, {RANKS: [0, 1]})  # whose processes run nothing else
    try:
        found = results(pool.run(RANKS, kept))
    finally:
        pool.close()
    assert found[0] == ([1], 2)


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
    plot.draw({"traceEvents": events}, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"plot\.py"):
        list(table.tables_of({"traceEvents": events}))


# ---- the soak -----------------------------------------------------------------------------------


def soaked(group: Any, transport: str) -> tuple[dict[str, Any], list[int]]:
    team = ep_team.Team(group, CPU)
    soak = ep_soak.Soak(team, ep_soak.SHAPES["cpu"])
    sizes = [len(soak.batch(step, rank)[0]) for step in range(30) for rank in range(RANKS)]
    return ep_soak.run_soak(team, 30, transport=transport), sizes


@pytest.mark.parametrize("transport", ["nccl", "peer"])
def test_soak_is_the_run_of_one_process(pool: Pool, transport: str) -> None:
    (row, sizes), (other, _) = results(pool.run(RANKS, soaked, transport))
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
