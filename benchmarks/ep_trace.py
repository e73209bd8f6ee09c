"""A trace of one step of nn.MoE over a group of ranks: what runs while the exchange runs.

The trace is torch.profiler's, for chrome://tracing or perfetto; `plot.py` draws a lane per stream
(on the CPU per thread), and one for the collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from common import parser, write
from contender import Shape
from ep import SHAPES
from ep_team import Team
from fp8moe_cutlass.nn import MoE, MoEExperts, Router, SharedExpert
from kernel_trace import trace
from launch import processes

Event = dict[str, Any]
Span = tuple[float, float]  # ms from the first event
EXCHANGE = "exchange"


@dataclass(frozen=True)
class Box:
    """One kernel, or on the CPU one operator."""

    lane: str
    kind: str  # "exchange", "fp8moe" or "torch"
    name: str
    span: Span


def trace_of(team: Team, mine: Shape) -> list[Event]:
    """The events of a forward and backward with a shared expert, the third; collective."""
    e, s, h, i = (mine[name] for name in "ESHI")
    group, device = team.group, team.device
    layer = MoE(
        Router(h, e * team.size, s, device=device),
        MoEExperts(e * team.size, h, i, group=group, device=device),
        SharedExpert(h, 2 * i, device=device),
    )
    x = torch.randn(mine["T"], h, device=device).bfloat16().requires_grad_()

    def step() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    for _ in range(3):
        step()
    team.together()
    events = trace(step, device)
    team.together()
    return events


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


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    given = arguments.parse_args()
    with processes(given.ranks, torch.device(given.device)) as device:
        team = Team(dist.group.WORLD, device)
        name, mine = next(iter(SHAPES["quick" if given.quick else device.type].items()))
        events = trace_of(team, mine)
        if team.rank == 0:
            title = f"{name}, {team.size} ranks, rank 0"
            write({"title": title, "traceEvents": events}, given.json)
            print(f"{100 * overlapped(boxes_of(events)):.0f}% of the exchange has work beside it")


if __name__ == "__main__":
    main()
