"""Print a record: python benchmarks/table.py RECORD.json"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8moe_cutlass.bench import tables

Record = dict[str, Any]


def tables_of(record: Record) -> Iterator[list[tuple[str, ...]]]:
    """The tables of a record; the first line of each is its header."""
    if "traceEvents" in record:
        raise SystemExit("a trace is no table; plot.py draws it")
    rows = record.get("results") or runs_of(record)
    if all({"ms", "variant"} <= row.keys() for row in rows):
        yield [tables.COLUMNS, *tables.lines({"results": rows})]
    elif not all("memory" in row for row in rows):
        found = [dict(flat(row)) for row in rows]
        columns = tuple(dict.fromkeys(name for row in found for name in row))
        yield [columns, *(tuple(row.get(name, "") for name in columns) for row in found)]
    if held := [row for row in rows if isinstance(row.get("memory"), dict)]:
        yield [MEMORY, *(line for row in held for line in memory_lines(row))]


MEMORY = ("model", "variant", "who", "KiB per token, arithmetic", "allocator", "peak, GiB")


def memory_lines(row: Record) -> Iterator[tuple[str, ...]]:
    """What everyone keeps from forward to backward, and the peak of both."""
    per_token = 1024 * row["shape"]["T"]
    for who, m in row["memory"].items():
        kept = (f"{m[n] / per_token:.1f}" if n in m else "" for n in ("saved_arithmetic", "saved"))
        peak = f"{m['peak'] / 2**30:.2f}" if "peak" in m else ""
        yield row["model"], row["variant"], who, *kept, peak


def runs_of(record: Record) -> list[Record]:
    """The runs of `train`, alone or beside those of several processes."""
    if "runs" in record:
        return [summary(run["variant"], run) for run in record["runs"]]
    parts = {
        name: part for name, part in record.items() if name.endswith((" process", "processes"))
    }
    return [summary(f"{v}, {n}", run) for n, part in parts.items() for v, run in part.items()]


def summary(name: str, run: Record) -> Record:
    held = run["heldout"][-1][1] if run.get("heldout") else None
    last = {"first loss": run["loss"][0], "last loss": run["loss"][-1], "held out": held}
    return {"run": name, "seed": run.get("seed"), "steps": len(run["loss"]), **last}


def flat(row: Record) -> Iterator[tuple[str, str]]:
    """Names and texts of a row's numbers and words, those of nested dicts among them."""
    for name, value in row.items():
        if name == "shape":
            yield name, tables.shape_text(value)
        elif isinstance(value, dict):
            yield from ((f"{name}: {inner}", text) for inner, text in flat(value))
        elif isinstance(value, float):
            yield name, f"{value:.4g}"
        elif value is not None and not isinstance(value, list):
            yield name, str(value)


def main() -> None:
    record = json.loads(Path(sys.argv[1]).read_text())
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    if "copy_tb_s" in record.get("environment", {}):
        console.print(tables.environment_text(record))
    for head, *rows in tables_of(record):
        shown = Table(*head)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)


if __name__ == "__main__":
    main()
