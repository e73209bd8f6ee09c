"""Plots of the layer's record: a step's milliseconds, and where its time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plot_style as style
from common import Record
from layer import QUANTIZING, REUSING
from layer_baselines import TORCH

# Who is drawn: a key, a label, a color. A library that is not in the record is left out.
OURS = (
    (QUANTIZING, "FP8, weights quantized in each step", style.OURS),
    (REUSING, "FP8, weights reused", style.OURS_LIGHT),
)
PEERS = (
    (TORCH, "torch bf16 (best)", style.BF16),
    ("SonicMoE bf16", "SonicMoE bf16", style.OTHER),
)


def plot(record: Record, path: Path) -> None:
    """Bars of each model: ours with weights quantized and reused, torch bf16, SonicMoE. Means over
    a second where the record has them of all."""
    steps: dict[str, dict[str, Any]] = {}  # model -> variant -> row
    for row in record["results"]:
        if row["variant"] in (QUANTIZING, REUSING) and row["ms"]:
            steps.setdefault(row["model"], {})[row["variant"]] = row
    rows_of = [row for rows in steps.values() for row in rows.values()]
    clock = "sustained_" if all(row.get("sustained_ms") for row in rows_of) else ""
    bars = [
        (label, color, [ms_of(rows, key, clock) for rows in steps.values()])
        for key, label, color in OURS + PEERS
    ]
    bars = [bar for bar in bars if any(bar[2])]
    figure, axes = style.subplots(height=1.4 + 0.25 * len(steps) * (len(bars) + 1))
    thickness = 0.84 / len(bars)
    for place, (label, color, values) in enumerate(bars):
        at = [y + (place - (len(bars) - 1) / 2) * thickness for y in range(len(steps))]
        drawn = axes.barh(at, values, height=0.92 * thickness, color=color, label=label)
        axes.bar_label(drawn, [f"{v:.2f}" if v else "" for v in values], padding=3, fontsize=10)
    axes.set_yticks(range(len(steps)), [name.replace(", ", "\n") for name in steps])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("milliseconds of a training step (forward and backward); shorter is better")
    environment = record["environment"]
    tokens = next(iter(steps.values()))[REUSING]["shape"]["T"] if steps else 0
    place = environment["gpu"] or environment["cpu"]
    axes.set_title(f"One MoE layer, {tokens} tokens, {place}", loc="left")
    figure.legend(loc="outside lower left", ncols=2)
    style.save(figure, path)


def ms_of(rows: dict[str, Any], key: str, clock: str) -> float:
    """Milliseconds of one of ours, or of a baseline; 0 where it did not run."""
    if key in rows:
        return float(rows[key][f"{clock}ms"])
    peers = [row[f"{clock}peers"] for row in rows.values()]
    return min((of[key] for of in peers if key in of), default=0.0)


# Which kernels of a step belong together, in the order of the bars.
PARTS = {
    "forward GEMMs": ("fprop-1", "fprop-2"),
    "dgrad GEMMs": ("dgrad-1", "dgrad-2"),
    "wgrad GEMMs": ("wgrad-1", "wgrad-2"),
    "SwiGLU and its backward": ("swiglu", "swiglu backward"),
    "quantize, permute, unpermute": (
        *("route", "quantize x", "quantize dout", "permute x", "permute dout"),
        *("unpermute", "permute backward"),
    ),
    "transposes for wgrad": ("transpose x", "transpose dout"),
}
PART_COLORS = ("#00573f", "#00795c", "#5fae94", "#d98a1f", "#2f6db3", "#8458a8")


def plot_kernels(record: Record, path: Path) -> None:
    """Where the time of a step with reused weights goes, in percent."""
    rows = [r for r in record["results"] if r["variant"] == REUSING and r.get("kernels")]
    figure, axes = style.subplots(height=1.9 + 0.55 * len(rows))
    for y, row in enumerate(rows):
        start, limit = 0.0, 100 * row["limit_ms"] / row["ms"]
        for (part, roles), color in zip(PARTS.items(), PART_COLORS, strict=True):
            share = sum(row["kernels"].get(role, 0.0) for role in roles) / 10 / row["ms"]
            label = part if y == 0 else None
            axes.barh(y, share, left=start, height=0.7, color=color, label=label)
            if share > 4:
                middle = start + share / 2
                middle -= 3 * (abs(middle - limit) < 2.5)  # beside the limit's line
                axes.text(middle, y, f"{share:.0f}", ha="center", va="center", color="white")
            start += share
        rest = max(100 - start, 0.0)
        label = "between kernels, and lower clocks" if y == 0 else None
        axes.barh(y, rest, left=start, height=0.7, color="#d5d7da", label=label)
        axes.text(101, y, f"{row['ms']:.2f} ms", va="center", fontsize=10)
        axes.plot([limit] * 2, [y - 0.42, y + 0.42], color="white", linewidth=3)
        axes.plot([limit] * 2, [y - 0.42, y + 0.42], color=style.LIMIT, linewidth=1.5)
    axes.plot([], [], color=style.LIMIT, linewidth=1.5, label="limit of the arithmetic")
    axes.set_yticks(range(len(rows)), [row["model"].replace(", ", "\n") for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 112)
    axes.set_xlabel("% of a step (forward and backward, weights reused)")
    axes.set_title(f"Where a step's time goes, {style.place_of(record)}", loc="left")
    figure.legend(loc="outside lower left", ncols=3, fontsize=9)
    style.save(figure, path)
