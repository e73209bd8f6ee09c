"""What `bench --ep` runs in each process: the timings, the soak, or the trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import ep_report, ep_soak, ep_trace
from .ep import QUICK, SHAPES, run_ep, world_of
from .ep_runs import Team

Record = dict[str, Any]


def run_mode(
    device: torch.device,
    quick: bool,
    soak: int | None,
    trace: Path | None,
    show: Callable[[Record], None],
) -> tuple[Any, Record]:
    """(the view of the record, the record); (None, {}) but on the first rank, which alone shows
    rows. Collective."""
    team = Team(dist.group.WORLD, device)
    on_row = show if team.rank == 0 else lambda row: None
    view: Any = ep_report
    if soak is not None:
        view, record = ep_soak, _record(device, ep_soak.run_soak(team, soak, on_step=on_row))
    elif trace is not None:
        name, mine = next(iter((QUICK if quick else SHAPES[device.type]).items()))
        view, record = ep_trace, _record(device, ep_trace.run_trace(team, name, mine, trace))
    else:
        record = run_ep(device, quick, on_row)
    return (view, record) if team.rank == 0 else (None, {})


def _record(device: torch.device, row: Record) -> Record:
    from . import environment
    from .timing import Limits

    where = environment(Limits(device)) | world_of(device)
    return {"environment": where, "results": [row]}
