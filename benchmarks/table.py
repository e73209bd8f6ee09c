"""Prints a record as tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common import Record, shape_text
from layer import REUSING

COLUMNS = ("what", "variant", "shape", "ms", "rate", "of the limit", "others: ms (times ours)")


def tables_of(record: Record) -> Iterator[list[tuple[str, ...]]]:
    """The tables of a record; the first line of each is its header."""
    if "traceEvents" in record:
        raise SystemExit("a trace is no table; plot.py draws it")
    rows = record.get("results") or runs_of(record)
    timed = [row for row in rows if {"ms", "variant"} <= row.keys()]
    if timed and all("ms" in row or "memory" in row for row in rows):
        yield [COLUMNS, *map(cells, timed)]
    elif not all("memory" in row for row in rows):
        found = [dict(flat(row)) for row in rows]
        columns = tuple(dict.fromkeys(name for row in found for name in row))
        yield [columns, *(tuple(row.get(name, "") for name in columns) for row in found)]
    if held := [row for row in rows if isinstance(row.get("memory"), dict)]:
        yield [MEMORY, *(line for row in held for line in memory_lines(row))]


def cells(row: Record) -> tuple[str, ...]:
    layer, variant, shape = row["op"] == "layer", row["variant"], shape_text(row["shape"])
    what = ", ".join(filter(None, (row.get("model"), "" if layer else row["op"])))
    if layer and variant == REUSING:
        variant += ", reusing weights"
    if row["ms"] is None:
        return what, variant, shape, "failed", "", "", row["error"]
    return what, variant, shape, ms_text(row["ms"]), rate(row), share(row), beside(row)


def ms_text(ms: float) -> str:
    return f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}" if ms >= 0.01 else f"{ms:.6f}"


def rate(row: Record) -> str:
    """TFLOP/s (GFLOP/s below ten) where there is arithmetic, else GB/s; tokens/s of a group."""
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s']:,.0f} tokens/s"
    if row["flops"]:
        tflops = row["flops"] / row["ms"] / 1e9
        return f"{tflops:.0f} TFLOP/s" if tflops >= 10 else f"{1e3 * tflops:.0f} GFLOP/s"
    return f"{row['bytes'] / row['ms'] / 1e6:.1f} GB/s" if row["bytes"] else ""


def share(row: Record) -> str:
    return f"{100 * row['limit_ms'] / row['ms']:.0f}%" if row["limit_ms"] else ""


def beside(row: Record) -> str:
    """Others' milliseconds and how many times ours they take; then what failed."""
    found = [f"{name} {ms_text(ms)} ({ms / row['ms']:.2f}x)" for name, ms in row["peers"].items()]
    if row.get("alone_ms"):
        found.append(f"one rank alone {ms_text(row['alone_ms'])}")
    if row.get("graph_ms"):
        times = {"captured": row["graph_ms"], **row["graph_peers"]}
        found.append(", ".join(f"{name} {ms_text(ms)}" for name, ms in times.items()))
    if row.get("dropped"):
        found.append(f"{row['dropped']} dropped")
    if "sustained_ms" in row:
        peers = row.get("peers_sustained") or row.get("sustained_peers") or {}
        others = [f"{name} {ms_text(ms)}" for name, ms in peers.items()]
        found.append(f"sustained {', '.join([ms_text(row['sustained_ms']), *others])}")
    failed = {**row.get("errors", {}), **row.get("peers_failed", {})}
    return "; ".join([*found, *(f"{name} failed: {why}" for name, why in failed.items())])


def environment_text(record: Record) -> str:
    """One line: the machine, and its limits in this run."""
    e = record["environment"]
    parts = [e["gpu"] or f"{e['cpu']}, {e['threads']} threads", f"torch {e['torch']}"]
    if e.get("ranks"):
        parts.append(f"{e['ranks']} ranks" + (f", {e['backend']}" if "backend" in e else ""))
    if e.get("launch_us"):  # older records have none
        parts.append(f"empty kernel {e['launch_us']:.1f} us")
    if e.get("copy_tb_s"):
        copy, gemm = 1e3 * e["copy_tb_s"], 1e3 * e["tensor_tflops"]
        parts += [f"copy {copy:,.0f} GB/s", f"dense GEMM {gemm:,.0f} GFLOP/s"]
    return "; ".join(parts)


MEMORY = ("model", "variant", "who", "KiB per token, arithmetic", "allocator", "held", "peak, GiB")


def memory_lines(row: Record) -> Iterator[tuple[str, ...]]:
    """What everyone keeps from forward to backward, what stays between steps, and the peak."""
    per_token = 1024 * row["shape"]["T"]
    for who, m in row["memory"].items():
        kept = (f"{m[n] / per_token:.1f}" if n in m else "" for n in ("saved_arithmetic", "saved"))
        gib = (f"{m[n] / 2**30:.2f}" if n in m else "" for n in ("held", "peak"))
        yield row["model"], row["variant"], who, *kept, *gib


def runs_of(record: Record) -> list[Record]:
    """The runs of a training record, alone or beside those of several processes."""
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
            yield name, shape_text(value)
        elif isinstance(value, dict):
            yield from ((f"{name}: {inner}", text) for inner, text in flat(value))
        elif isinstance(value, float):
            yield name, f"{value:.4g}"
        elif value is not None and not isinstance(value, list):
            yield name, str(value)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("record", type=Path)
    record = json.loads(arguments.parse_args().record.read_text())
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    if "copy_tb_s" in record.get("environment", {}):
        console.print(environment_text(record))
    for head, *rows in tables_of(record):
        shown = Table(*head)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)


if __name__ == "__main__":
    main()
