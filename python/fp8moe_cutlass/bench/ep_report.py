"""A record of bench --ep as a table and a plot: python -m fp8moe_cutlass.bench.ep_report FILE.json
prints the table and draws FILE.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .layer_report import markdown, ms_text

Record = dict[str, Any]
COLUMNS = (
    "model",
    "W",
    "op",
    "variant",
    "ms",
    "limit ms",
    "MB to others",
    "rows, copies",
    "GB/s",
    "bf16 ms",
    "x",
    "efficiency",
    "tokens/s",
)
LAYER = "layer, forward+backward"
ALONE = "bf16 all-to-all alone"
SAME = "bf16 torch, same exchange"


def tokens_per_s(row: Record, ms: float) -> float:
    """Of all ranks, if the row had taken `ms`."""
    return float(1e3 * row["shape"]["W"] * row["shape"]["T"] / ms)


def cells(row: Record) -> tuple[str, ...]:
    """One line of the table, in the order of COLUMNS."""
    bf16 = row["peers"].get(ALONE) or row["peers"].get(SAME)
    also = f", {row['dropped']} dropped" if row.get("dropped") else ""
    also += f", captured {ms_text(row['captured_ms'])}" if row.get("captured_ms") else ""
    return (
        row["model"],
        str(row["shape"]["W"]),
        row["op"],
        row["variant"] + also,
        ms_text(row["ms"]),
        ms_text(row["limit_ms"]),
        f"{row['bytes'] / 1e6:.1f}" if row["bytes"] else "",
        f"{row['rows_sent']:.0f}, {row['copies']:.0f}",
        f"{row['bytes'] / row['ms'] / 1e6:.0f}" if row["bytes"] and not row["flops"] else "",
        *(("", "") if bf16 is None else (ms_text(bf16), f"{bf16 / row['ms']:.2f}")),
        f"{100 * row['efficiency']:.0f}%" if "efficiency" in row else "",
        f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "",
    )


def lines(row: Record) -> list[tuple[str, ...]]:
    return [cells(row)]


def tables(record: Record) -> str:
    return markdown([COLUMNS, *(cells(row) for row in record["results"])]) + "\n"


def plot(record: Record, path: Path) -> None:
    """By ranks: dispatch against bf16's all-to-all of the same rows; tokens/s of the layer's
    forward and backward, beside bf16 torch and what no exchange would give."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in record["results"] if r["variant"] == "random, exact"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for index, model in enumerate(dict.fromkeys(r["model"] for r in rows)):
        color = f"C{index}"
        dispatch = [r for r in rows if r["model"] == model and r["op"] == "dispatch"]
        line = [(r["shape"]["W"], r["peers"][ALONE] / r["ms"]) for r in dispatch]
        left.plot(*zip(*line, strict=True), "o-", color=color, label=model)
        bare = [(r["shape"]["W"], r["peers"][ALONE] / r["limit_ms"]) for r in dispatch]
        left.plot(*zip(*bare, strict=True), ":", color=color)
        layer = [r for r in rows if r["model"] == model and r["op"] == LAYER]
        for style, values in {
            "o-": [r["tokens_per_s"] for r in layer],
            "s--": [tokens_per_s(r, r["peers"][SAME]) for r in layer],
            ":": [tokens_per_s(r, r["alone_ms"]) for r in layer],
        }.items():
            right.plot([r["shape"]["W"] for r in layer], values, style, color=color, markersize=4)
    left.axhline(1.0, color="black", linewidth=0.5)
    left.set_ylabel("times faster than the bf16 all-to-all")
    left.set_title("dispatch, quantizing and packing included\n(dotted: the FP8 bytes alone)")
    left.legend(fontsize=8)
    right.plot([], [], "ko-", label="FP8", markersize=4)
    right.plot([], [], "ks--", label="bf16 torch, same exchange", markersize=4)
    right.plot([], [], "k:", label="FP8, were the exchange free")
    right.set_yscale("log", base=2)
    right.set_ylabel("tokens/s, all ranks")
    right.set_title("layer, forward + backward")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        worlds = sorted({r["shape"]["W"] for r in rows})
        axes.set_xticks(worlds, [str(w) for w in worlds])
        axes.set_xlabel("ranks")
    environment = record["environment"]
    place = environment["gpu"] or environment["cpu"]
    figure.suptitle(f"{place}, {environment['backend']}, torch {environment['torch']}", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    loaded = json.loads(source.read_text())
    print(tables(loaded))
    plot(loaded, source.with_suffix(".png"))
