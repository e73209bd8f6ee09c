"""The plot of `bench layer`: a step's milliseconds, in bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8moe_cutlass import plot_style as style

from .layer import QUANTIZING, REUSING, TORCH
from .record import Record

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
    """Bars of each model: ours with weights quantized and reused, torch bf16, SonicMoE."""
    steps: dict[str, dict[str, Any]] = {}  # model -> variant -> row
    for row in record["results"]:
        if row["variant"] in (QUANTIZING, REUSING) and row["ms"]:
            steps.setdefault(row["model"], {})[row["variant"]] = row
    bars = [
        (label, color, [ms_of(rows, key) for rows in steps.values()])
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


def ms_of(rows: dict[str, Any], key: str) -> float:
    """Milliseconds of one of ours, or of a baseline; 0 where it did not run."""
    if key in rows:
        return float(rows[key]["ms"])
    return min((row["peers"][key] for row in rows.values() if key in row["peers"]), default=0.0)
