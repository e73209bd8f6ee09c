"""Draws a record as a picture: what is drawn follows from the record."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

import layer_plot
import plot_style as style
import quality_plot
import recipe_plot
from common import Record
from ep import ALL_TO_ALL, SAME_EXCHANGE, STEP
from ep_trace import EXCHANGE, boxes_of, overlapped
from layer_baselines import TORCH
from sweep import tokens_per_expert
from train_plot import plot as plot_train

# ---- operators ----------------------------------------------------------------------------------


def plot_ops(record: Record, path: Path) -> None:
    """Share of the limit: a dot per shape, a bar to their median."""
    kinds: dict[str, list[float]] = {}
    for row in record["results"]:
        if row["limit_ms"]:
            kinds.setdefault(f"{row['op']} ({row['variant']})", []).append(
                100 * row["limit_ms"] / row["ms"]
            )
    most = 115.0
    figure, axes = style.subplots(height=1.5 + 0.26 * len(kinds))
    for y, shares in enumerate(kinds.values()):
        middle = statistics.median(shares)
        axes.barh(y, min(middle, most), height=0.7, color=style.OURS_LIGHT)
        if len(shares) > 1:
            shown = [min(share, most) for share in shares]
            axes.plot(shown, [y] * len(shown), "o", color=style.OURS, markersize=4)
        axes.text(most + 9, y, f"{middle:.0f}%", va="center", ha="right", fontsize=10)
    names = [name.replace("scales of x in gemm layout", "gemm scales") for name in kinds]
    axes.set_yticks(range(len(kinds)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(kinds) - 0.4, -0.6)
    axes.axvline(100, color=style.LIMIT, linewidth=0.8)
    axes.set_xlim(0, most + 9)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("% of the limit; the bar and the number: the median shape")
    figure.suptitle(
        f"Operators on {style.place_of(record)}\n"
        "beside a copy of the same bytes (GEMMs: dense arithmetic); a dot per shape",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    style.save(figure, path)


# ---- expert parallelism -------------------------------------------------------------------------


MODEL_COLORS = (style.SERIES[0], style.SERIES[5], style.SERIES[4])


def plot_ep(record: Record, path: Path) -> None:
    """Above: dispatch beside the bf16 all-to-all. Below: tokens/s of a step, a panel per model."""
    rows = [r for r in record["results"] if r["variant"] == "random, exact"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = style.mosaic([["above"] * len(models), models], height=7.4)
    above, below = axes["above"], [axes[model] for model in models]
    worlds = sorted({r["shape"]["W"] for r in rows if r["shape"]["W"] > 1})
    bf16 = {
        (r["model"], r["shape"]["W"]): r["peers"][SAME_EXCHANGE]
        for r in record["results"]
        if r["op"] == STEP and r["variant"] in ("random, exact", "random, exact, beside bf16")
        if SAME_EXCHANGE in r["peers"]
    }
    for place, (model, color) in enumerate(zip(models, MODEL_COLORS, strict=False)):
        values = [
            r["peers"][ALL_TO_ALL] / r["ms"]
            for r in rows
            if (r["model"], r["op"]) == (model, "dispatch") and r["shape"]["W"] > 1
        ]
        at = [x + 0.27 * (place - (len(models) - 1) / 2) for x in range(len(worlds))]
        bars = above.bar(at, values, width=0.25, color=color, label=model)
        above.bar_label(bars, [f"{v:.2f}" for v in values], padding=-17, color="white")
    above.axhline(1.0, color=style.LIMIT, linewidth=0.8)
    above.set_xticks(range(len(worlds)), [f"{w} GPUs" for w in worlds])
    above.set_ylim(0, above.get_ylim()[1] * 1.1)
    above.set_ylabel("times faster")
    above.set_title("FP8 dispatch, packing included, beside the bf16 all-to-all alone", loc="left")
    above.legend(ncols=3, loc="upper left")
    for axes, model in zip(below, models, strict=True):
        steps = [r for r in rows if (r["model"], r["op"]) == (model, STEP)]
        for name, color, line, times in (
            ("FP8, exchange free", style.OURS_LIGHT, "--", [r["alone_ms"] for r in steps]),
            ("FP8", style.OURS, "-", [r["ms"] for r in steps]),
            (SAME_EXCHANGE, style.BF16, "-", [bf16[model, r["shape"]["W"]] for r in steps]),
        ):
            tokens = [r["shape"]["W"] * r["shape"]["T"] / 1e3 for r in steps]
            rate = [n / ms for n, ms in zip(tokens, times, strict=True)]
            at = [r["shape"]["W"] for r in steps]
            axes.plot(at, rate, line, marker="o", color=color, label=name)
        axes.set_title(model, loc="left", fontsize=11)
        axes.set_xticks([r["shape"]["W"] for r in steps])
        axes.set_ylim(0)
        axes.set_xlabel("GPUs")
    below[0].set_ylabel("million tokens/s in a step")
    figure.suptitle(
        f"Expert parallelism, {style.place_of(record)}, {record['environment']['backend']}",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    figure.legend(handles=below[0].get_lines(), loc="outside lower center", ncols=3)
    style.save(figure, path)


# ---- sweep --------------------------------------------------------------------------------------


def ratio(slow: float | None, fast: float | None) -> float:
    return slow / fast if slow and fast else float("nan")


def with_weights(row: Record) -> float:
    """bf16's time over FP8's where FP8 quantizes the weights in each step; by graphs, if any."""
    ms, peers = row.get("graph_ms") or row["ms"], row["graph_peers"] or row["peers"]
    return ratio(peers.get(TORCH), ms + row["weights_ms"])


VIEWS: dict[str, Callable[[Record], float]] = {
    "weights quantized in each step": with_weights,
    "weights reused, CUDA graph": lambda r: ratio(r["graph_peers"].get(TORCH), r.get("graph_ms")),
    "weights reused, eager": lambda r: ratio(r["peers"].get(TORCH), r["ms"]),
}


def plot_sweep(record: Record, path: Path) -> None:
    """bf16's time over FP8's: a row of maps per number of experts."""
    rows = [row for row in record["results"] if row["ms"] is not None]
    experts = sorted({row["shape"]["E"] for row in rows})
    tokens = sorted({tokens_per_expert(row["shape"]) for row in rows})
    widths = sorted({row["shape"]["I"] for row in rows})
    figure, axes = style.subplots(
        len(experts), len(VIEWS), height=1.2 + 1.9 * len(experts), squeeze=False,
        sharex=True, sharey=True,
    )  # fmt: skip
    for place, name in zip(axes[0], VIEWS, strict=True):
        place.set_title(name, fontsize=11)
    for line, count in zip(axes, experts, strict=True):
        for place, of in zip(line, VIEWS.values(), strict=True):
            values = np.full((len(widths), len(tokens)), np.nan)
            for row in (row for row in rows if row["shape"]["E"] == count):
                at = widths.index(row["shape"]["I"]), tokens.index(tokens_per_expert(row["shape"]))
                values[at] = of(row)
            place.imshow(
                np.log2(values), cmap="BrBG", vmin=-1.6, vmax=1.6, aspect="auto", origin="lower"
            )
            for (y, x), value in np.ndenumerate(values):
                if not np.isnan(value):
                    color = "white" if value > 1.8 else "black"
                    place.text(x, y, f"{value:.2f}", ha="center", va="center", color=color, size=9)
            place.set_xticks(range(len(tokens)), [f"{n:.0f}" for n in tokens])
            place.set_yticks(range(len(widths)), [str(w) for w in widths])
            place.tick_params(length=0)
        line[0].set_ylabel(f"{count} experts\nexpert width")
    for place in axes[-1]:
        place.set_xlabel("tokens per expert")
    figure.suptitle(
        f"How many times faster a step is in FP8 than in bf16, {style.place_of(record)}",
        fontsize=12,
    )
    style.save(figure, path)


# ---- trace --------------------------------------------------------------------------------------

LANES = {
    "fp8moe": ("this library", style.OURS),
    "torch": ("torch", style.BF16),
    EXCHANGE: ("exchange", style.OTHER),
}


def plot_trace(record: Record, path: Path) -> None:
    """A lane per stream that does something, the exchange at the bottom."""
    boxes = boxes_of(record["traceEvents"])
    busy = {lane: sum(b.span[1] - b.span[0] for b in boxes if b.lane == lane)
            for lane in {b.lane for b in boxes} - {EXCHANGE}}  # fmt: skip
    lanes = sorted((lane for lane in busy if busy[lane] > 0.01), key=lambda lane: -busy[lane])
    lanes.append(EXCHANGE)
    figure, axes = style.subplots(height=1.6 + 0.55 * len(lanes))
    for y, lane in enumerate(lanes):
        for kind, (_, color) in LANES.items():
            bars = [(b.span[0], b.span[1] - b.span[0]) for b in boxes
                    if (b.lane, b.kind) == (lane, kind)]  # fmt: skip
            axes.broken_barh(bars, (y - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.2)
    for label, color in LANES.values():
        axes.barh([0], [0], color=color, label=label)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0)
    axes.set_xlabel("milliseconds")
    share = f"{100 * overlapped(boxes):.0f}% of the exchange has other work beside it"
    axes.set_title(record.get("title", "One step, rank 0") + f": {share}", loc="left", fontsize=11)
    figure.legend(loc="outside lower left", ncols=3)
    style.save(figure, path)


def draw(record: Record, path: Path, kernels: bool = False) -> None:
    if "traceEvents" in record:
        return plot_trace(record, path)
    if "bar" in record:
        return quality_plot.plot(record, path)
    if "runs" in record:
        return plot_train(record, path)
    op = record["results"][0]["op"]
    if op == "layer":
        return (layer_plot.plot_kernels if kernels else layer_plot.plot)(record, path)
    if op == "sweep":
        return plot_sweep(record, path)
    if op == "step" and "kernels" in record["results"][0]:
        return recipe_plot.plot(record, path)
    return (plot_ep if "ranks" in record["environment"] else plot_ops)(record, path)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("record", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--kernels", action="store_true", help="where a layer's step goes")
    given = arguments.parse_args()
    draw(json.loads(given.record.read_text()), given.out, given.kernels)
