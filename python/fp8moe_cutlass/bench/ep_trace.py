"""What runs beside the exchange: a trace of one step of nn.MoE over a group, and its picture.

    python -m fp8moe_cutlass.bench.ep_trace TRACE.json     draws TRACE.png again

The trace is torch.profiler's, for chrome://tracing or perfetto. The picture has a lane for each
stream (on the CPU each thread); the lane of the exchange is that of the collectives.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8moe_cutlass.nn import MoE

from .ep_runs import Team
from .kernels import trace
from .layer_runs import Shape

Event = dict[str, Any]
Span = tuple[float, float]  # ms from the first event
EXCHANGE = "exchange"
COLORS = {EXCHANGE: "tab:orange", "fp8moe": "tab:green", "torch": "tab:gray"}


@dataclass(frozen=True)
class Box:
    """One kernel, or on the CPU one operator."""

    lane: str
    kind: str  # a key of COLORS
    name: str
    span: Span


def run_trace(team: Team, name: str, mine: Shape, path: Path) -> Event:
    """Trace a forward and backward with a shared expert, the third; rank 0 writes `path` (JSON) and
    the picture beside it. The row says for what share of the exchange something ran beside it."""
    e, s, h, i = (mine[name] for name in "ESHI")
    group, device = team.group, team.device
    layer = MoE(h, i, e * team.size, s, group=group, shared_intermediate_size=2 * i, device=device)
    x = torch.randn(mine["T"], h, device=device).bfloat16().requires_grad_()

    def step() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    for _ in range(3):
        step()
    team.together()
    events = trace(step, device)
    team.together()
    boxes = boxes_of(events)
    if team.rank == 0:
        path.write_text(json.dumps({"traceEvents": events}))
        draw(boxes, path.with_suffix(".png"), f"{name}, {team.size} ranks, {device.type}, rank 0")
    exchange = union([b.span for b in boxes if b.kind == EXCHANGE])
    return {
        "op": "trace",
        "model": name,
        "shape": {"W": team.size, **mine, "E": e * team.size},
        "ms": max((b.span[1] for b in boxes), default=0.0),
        "exchange_ms": sum(last - first for first, last in exchange),
        "overlapped": overlapped(boxes),
        "files": [path.name, path.with_suffix(".png").name],
    }


COLUMNS = ("model", "W", "step, ms", "exchange, ms", "of it beside something", "files")


def lines(row: Event) -> list[tuple[str, ...]]:
    return [
        (
            row["model"],
            str(row["shape"]["W"]),
            f"{row['ms']:.2f}",
            f"{row['exchange_ms']:.2f}",
            f"{100 * row['overlapped']:.0f}%",
            ", ".join(row["files"]),
        )
    ]


def boxes_of(events: Iterable[Event]) -> list[Box]:
    """Kernels by stream; where there are none, operators by thread (the outermost of torch and this
    library) and what gloo does."""
    events = list(events)
    kept = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    gpu = bool(kept)
    if not gpu:
        kept = outermost([e for e in events if e["name"].startswith(("aten::", "fp8moe::"))])
        kept += [e for e in events if kind_of(e["name"]) == EXCHANGE]
    start = min((float(e["ts"]) for e in kept), default=0.0)
    found = []
    for e in kept:
        kind = kind_of(e["name"])
        place = f"stream {e['args'].get('stream')}" if gpu else f"thread {e['tid']}"
        first = (float(e["ts"]) - start) / 1e3
        span = (first, first + float(e["dur"]) / 1e3)
        found.append(Box(EXCHANGE if kind == EXCHANGE else place, kind, e["name"], span))
    return found


def kind_of(name: str) -> str:
    if "nccl" in name.lower() or name.startswith("gloo:"):
        return EXCHANGE
    return "fp8moe" if "fp8moe" in name else "torch"


def outermost(events: list[Event]) -> list[Event]:
    """Those that no other of the same thread spans."""
    kept: list[Event] = []
    ends: dict[Any, float] = {}
    for e in sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
        if float(e["ts"]) >= ends.get(e["tid"], -math.inf):
            kept.append(e)
            ends[e["tid"]] = float(e["ts"]) + float(e["dur"])
    return kept


def overlapped(boxes: list[Box]) -> float:
    """Of the time in which the exchange ran, the share in which something else did too."""
    exchange = union([b.span for b in boxes if b.kind == EXCHANGE])
    others = union([b.span for b in boxes if b.kind != EXCHANGE])
    total = sum(last - first for first, last in exchange)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in exchange for b in others)
    return both / total if total else 0.0


def union(spans: list[Span]) -> list[Span]:
    """The same time in spans that do not meet."""
    joined: list[Span] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def draw(boxes: list[Box], path: Path, title: str) -> None:
    """A lane for each stream, the exchange at the bottom."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lanes = [*sorted({b.lane for b in boxes} - {EXCHANGE}), EXCHANGE]
    figure, axes = pyplot.subplots(figsize=(12, 1.4 + 0.55 * len(lanes)), layout="constrained")
    for y, lane in enumerate(lanes):
        for kind, color in COLORS.items():
            mine = [b.span for b in boxes if (b.lane, b.kind) == (lane, kind)]
            bars = [(first, last - first) for first, last in mine]
            axes.broken_barh(bars, (y - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.2)
    for kind, color in COLORS.items():
        axes.barh([0], [0], color=color, label=kind)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend(fontsize=7, ncols=3, loc="upper right")
    share = 100 * overlapped(boxes)
    axes.set_title(f"{title}: {share:.0f}% of the exchange has something beside it", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    loaded = json.loads(source.read_text())["traceEvents"]
    draw(boxes_of(loaded), source.with_suffix(".png"), source.stem)
