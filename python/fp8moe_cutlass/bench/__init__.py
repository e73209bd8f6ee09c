"""Time of each op beside its limit and its peers, and the host's share of a call.

`run(device)` returns the record that design calls one JSON a run; report.py turns it into a table
and a plot.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from .cases import CASES, Work
from .host import host_overhead
from .peers import PEERS
from .shapes import QUICK, SHAPES, Shape
from .timing import Limits

Record = dict[str, Any]


def environment(limits: Limits) -> Record:
    """Where the figures were taken, and the two limits of that place."""
    cuda = limits.device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "driver": driver() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "launch_us": 1e3 * limits.launch.ms if limits.launch else None,
        "launch_host_us": limits.launch.host_us if limits.launch else None,
        "copy_tb_s": limits.copy_tb_s,
        "tensor_tflops": limits.tensor_tflops,
        "bf16_tflops": limits.bf16_tflops,
    }


def processor() -> str:
    """The CPU's name as Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def output_of(*command: str) -> str | None:
    """First line a command prints, or None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def driver() -> str | None:
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def commit() -> str | None:
    """Of the sources: FP8MOE_COMMIT, for those that are no clone, else what git says."""
    return os.environ.get("FP8MOE_COMMIT") or output_of(
        "git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"
    )


def measure(op: str, shape: Shape, work: Work, limits: Limits) -> Record:
    """One result row; the call, its peers and, where it is a call, its limit run interleaved."""
    peers = {name: factory(work.inputs) for name, factory in PEERS.get(op, {}).items()}
    calls = {name: call for name, call in peers.items() if call is not None}
    limit = None
    if work.mnk is None:
        limit = limits.copy(work.bytes)
    elif limits.device.type == "cpu":
        limit = limits.matmul(*work.mnk)
    sample, *others = limits.timer.measure(
        work.run, *calls.values(), *([] if limit is None else [limit])
    )
    limit_ms = others[-1].ms if limit else work.flops / limits.tensor_tflops / 1e9
    row = {
        "op": op,
        "shape": shape,
        "variant": work.variant,
        "ms": sample.ms,
        "host_us": sample.host_us,
        "bytes": work.bytes,
        "flops": work.flops,
        "limit_ms": limit_ms,
        "peers": {name: other.ms for name, other in zip(calls, others, strict=False)},
        "repeat": sample.repeat,
    }
    sustained = limits.timer.sustained(work.run) if work.flops else None
    return row if sustained is None else {**row, "sustained_ms": sustained}


def run(
    device: torch.device,
    ops: Iterable[str] | None = None,
    quick: bool = False,
    on_result: Callable[[Record], None] = lambda row: None,
) -> Record:
    """Time `ops` (default: all) on `device`. quick: one tiny shape an op.

    Raises ValueError for an op that has no case.
    """
    names = list(CASES) if ops is None else list(ops)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise ValueError(f"[bench] ops must be among {', '.join(CASES)}; got {', '.join(unknown)}")
    torch.manual_seed(0)
    limits = Limits(device)
    limits.wake()
    results: list[Record] = []
    for op in names:
        for shape in [QUICK[op]] if quick else SHAPES[device.type][op]:
            for work in CASES[op](shape, device):
                results.append(measure(op, shape, work, limits))
                on_result(results[-1])
    if device.type == "cpu" and ops is None:
        for row in host_overhead():
            results.append(row)
            on_result(row)
    return {"environment": environment(limits), "results": results}
