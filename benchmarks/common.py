"""What the scripts share: their arguments, and how a record is shown and written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fp8moe_cutlass.bench.record import OnResult, Record

Run = Callable[[torch.device, argparse.Namespace, OnResult], Record]


def parser(about: str | None) -> argparse.ArgumentParser:
    """--device, --quick and --json; a script adds its own."""
    made = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--quick", action="store_true", help="tiny shapes: does everything run?")
    made.add_argument("--json", type=Path, required=True, help="where the record goes")
    return made


def main(arguments: argparse.ArgumentParser, run: Run) -> None:
    """Run with the command line's arguments, print a line per row, write the record."""
    given = arguments.parse_args()
    write(run(torch.device(given.device), given, show), given.json)


def show(row: dict[str, Any]) -> None:
    """One line per row: a log keeps what a killed run has done."""
    shape = " ".join(f"{name}{value}" for name, value in row["shape"].items())
    words = (row["op"], row.get("model"), row.get("variant"), row.get("who"), shape)
    ms = f": {row['ms']:.3f} ms" if row.get("ms") else ""
    print(", ".join(filter(None, words)) + ms, flush=True)


def write(record: Record, path: Path) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}; `python benchmarks/table.py {path}` shows it")
