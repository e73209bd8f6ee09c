"""A record as a table for the terminal."""

from __future__ import annotations

from .layer import REUSING
from .record import Record

COLUMNS = ("what", "variant", "shape", "ms", "rate", "of the limit", "others: ms (times ours)")


def lines(record: Record) -> list[tuple[str, ...]]:
    """The table's rows, in the order of COLUMNS."""
    return [cells(row) for row in record["results"]]


def cells(row: Record) -> tuple[str, ...]:
    layer, variant, shape = row["op"] == "layer", row["variant"], shape_text(row["shape"])
    what = ", ".join(filter(None, (row.get("model"), "" if layer else row["op"])))
    if layer and variant == REUSING:
        variant += ", reusing weights"
    if row["ms"] is None:
        return what, variant, shape, "failed", "", "", row["error"]
    return what, variant, shape, ms_text(row["ms"]), rate(row), share(row), beside(row)


def title(row: Record) -> str:
    """One line for a row that has just been timed."""
    return ", ".join(cells(row)[:3])


def shape_text(shape: dict[str, int]) -> str:
    return " ".join(f"{name}{value}" for name, value in shape.items())


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
    if "alone_ms" in row:
        found.append(f"one rank alone {ms_text(row['alone_ms'])}")
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
        parts.append(f"{e['ranks']} ranks, {e['backend']}")
    if e.get("launch_us"):  # older records have none
        parts.append(f"empty kernel {e['launch_us']:.1f} us")
    copy, gemm = 1e3 * e["copy_tb_s"], 1e3 * e["tensor_tflops"]
    return "; ".join([*parts, f"copy {copy:,.0f} GB/s", f"dense GEMM {gemm:,.0f} GFLOP/s"])
