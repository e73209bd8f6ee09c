"""A bench record as a table and a plot: python -m fp8moe_cutlass.bench.report FILE.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
COLUMNS = ("op", "variant", "shape", "ms", "rate", "of the limit", "host us", "peers, ms")


def fill(text: str, writer: str, parts: dict[str, str]) -> str:
    """The page with each part between its markers: "<!-- NAME: written by bench.WRITER -->" and
    "<!-- end of NAME -->"."""
    for name, part in parts.items():
        begin, end = f"<!-- {name}: written by bench.{writer} -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            missing = end if found else begin
            raise ValueError(f"[{writer}] the page must have the marker {missing!r}; got none")
        text = f"{before}{begin}\n{part}\n{end}{after}"
    return text


def shape_text(shape: dict[str, int]) -> str:
    return " ".join(f"{name}{value}" for name, value in shape.items())


def rate_text(row: Record) -> str:
    """TFLOP/s (GFLOP/s under a tenth of one) where there is arithmetic, else GB/s."""
    if row["flops"]:
        tflops = row["flops"] / row["ms"] / 1e9
        return f"{tflops:.0f} TFLOP/s" if tflops >= 10 else f"{1e3 * tflops:.0f} GFLOP/s"
    return f"{row['bytes'] / row['ms'] / 1e6:.1f} GB/s" if row["bytes"] else ""


def share_text(row: Record) -> str:
    return f"{100 * row['limit_ms'] / row['ms']:.0f}%" if row["limit_ms"] else ""


def cells(row: Record) -> tuple[str, ...]:
    """One line of the table, in the order of COLUMNS."""
    return (
        row["op"],
        row["variant"],
        shape_text(row["shape"]),
        f"{row['ms']:.3f}" if row["ms"] >= 0.01 else f"{row['ms']:.6f}",
        rate_text(row),
        share_text(row),
        "" if row["host_us"] is None else f"{row['host_us']:.2f}",
        ", ".join(f"{name} {ms:.3f}" for name, ms in row["peers"].items()),
    )


def lines(row: Record) -> list[tuple[str, ...]]:
    """What a row is in the table."""
    return [cells(row)]


def markdown(record: Record) -> str:
    """The table as the docs hold it."""
    table = [COLUMNS, tuple("---" for _ in COLUMNS), *(cells(row) for row in record["results"])]
    return "\n".join("| " + " | ".join(line) + " |" for line in table) + "\n"


def environment_text(record: Record) -> str:
    """One line: what it ran on, and the measured limits."""
    e = record["environment"]
    place = e["gpu"] or f"{e['cpu']}, {e['threads']} threads"
    parts = [place, f"torch {e['torch']}"]
    if e.get("launch_us"):  # older records have neither
        parts.append(f"empty kernel {e['launch_us']:.1f} us")
    if e.get("launch_host_us"):
        parts.append(f"torch's launch of one {e['launch_host_us']:.1f} us of the host")
    parts.append(f"copy {1e3 * e['copy_tb_s']:.0f} GB/s")
    parts.append(f"dense GEMM {e['tensor_tflops']:.3g} TFLOP/s")
    return "; ".join(parts)


def plot(record: Record, path: Path) -> None:
    """Share of the limit, a bar a result; peers as dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in record["results"] if row["limit_ms"]]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.24 * len(rows)), layout="constrained")
    labels = [f"{r['op']} ({r['variant']}) {shape_text(r['shape'])}" for r in rows]
    share: Callable[[Record, float], float] = lambda row, ms: 100 * row["limit_ms"] / ms  # noqa: E731
    axes.barh(range(len(rows)), [share(r, r["ms"]) for r in rows], color="tab:green")
    for index, row in enumerate(rows):
        for ms in row["peers"].values():
            axes.plot(share(row, ms), index, "o", color="tab:gray", markersize=4)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(100, color="black", linewidth=0.5)
    axes.set_xlabel(
        "% of the limit: a copy of the same bytes, or dense arithmetic (dots: peers)", fontsize=8
    )
    axes.margins(y=0.01)
    axes.set_title(environment_text(record), fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    loaded = json.loads(source.read_text())
    print(environment_text(loaded) + "\n\n" + markdown(loaded))
    plot(loaded, source.with_suffix(".png"))
