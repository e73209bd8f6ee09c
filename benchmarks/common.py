"""What the scripts share: their arguments, what a record says of the machine, the form of its rows,
and how a record is shown and written."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp8moe_cutlass.tools.doctor import driver
from timing import Limits, Sample

Record = dict[str, Any]
OnResult = Callable[[Record], None]
Run = Callable[[torch.device, argparse.Namespace, OnResult], Record]


def parser(about: str | None, json_required: bool = True) -> argparse.ArgumentParser:
    """--device, --quick and --json; a script adds its own."""
    made = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--quick", action="store_true", help="tiny shapes: does everything run?")
    made.add_argument("--json", type=Path, required=json_required, help="where the record goes")
    return made


def main(arguments: argparse.ArgumentParser, run: Run) -> None:
    """Run with the command line's arguments, print a line per row, write the record."""
    given = arguments.parse_args()
    write(run(torch.device(given.device), given, show), given.json)


def show(row: dict[str, Any]) -> None:
    """One line per row: a log keeps what a killed run has done."""
    words = (row["op"], row.get("model"), row.get("variant"), row.get("who"))
    ms = f": {row['ms']:.3f} ms" if row.get("ms") else ""
    print(", ".join(filter(None, (*words, shape_text(row["shape"])))) + ms, flush=True)


def shape_text(shape: dict[str, int]) -> str:
    return " ".join(f"{name}{value}" for name, value in shape.items())


def write(record: Record, path: Path) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}; `python benchmarks/table.py {path}` shows it")


def earlier(path: Path) -> list[Record]:
    """The rows that --json has already: such a script's second run goes on."""
    rows: list[Record] = json.loads(path.read_text())["results"] if path.exists() else []
    return rows


def ignore(row: Record) -> None:
    """An OnResult that shows nothing."""


def row(
    op: str,
    shape: dict[str, int],
    variant: str,
    sample: Sample,
    *,
    peers: dict[str, float],
    limit_ms: float | None,
    bytes: int = 0,
    flops: int = 0,
    **more: Any,
) -> Record:
    """One result. limit_ms: what the machine's limit allows; peers: others' milliseconds."""
    return {
        "op": op,
        "shape": shape,
        "variant": variant,
        "ms": sample.ms,
        "host_us": sample.host_us,
        "bytes": bytes,
        "flops": flops,
        "limit_ms": limit_ms,
        "peers": peers,
        "repeat": sample.repeat,
        **more,
    }


def environment(limits: Limits) -> Record:
    """What `machine` says, and the limits measured in this run."""
    return {
        **machine(limits.device),
        "threads": torch.get_num_threads(),
        "launch_us": 1e3 * limits.launch.ms if limits.launch else None,
        "launch_host_us": limits.launch.host_us if limits.launch else None,
        "copy_tb_s": limits.copy_tb_s,
        "tensor_tflops": limits.tensor_tflops,
    }


def machine(device: torch.device) -> Record:
    """Machine, software, commit and date."""
    cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": processor(),
        "driver": driver() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def processor() -> str:
    """The CPU's name as Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def commit() -> str | None:
    """The sources' commit: FP8MOE_COMMIT where they are no clone, else what git says."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        said = ""
    return os.environ.get("FP8MOE_COMMIT") or said or None
