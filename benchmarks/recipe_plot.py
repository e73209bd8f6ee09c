"""The plot of transformers_recipe.py's record: where the time of a whole step goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plot_style as style
from common import Record

NAMES = {"grouped_mm": "bf16 experts", "fp8moe": "FP8 experts"}
PARTS = {
    "experts": style.OURS,
    "weights to FP8": style.OURS_LIGHT,
    "attention": style.SERIES[0],
    "other GEMMs": style.SERIES[5],
    "elementwise, moves": style.OTHER,
    "loss": style.BASELINE,
    "optimizer": style.SERIES[4],
}


def shown(record: Record) -> list[dict[str, Any]]:
    """Of the first model, Hugging Face's default and the fastest of each experts."""
    first = record["results"][0]["model"]
    rows = [r for r in record["results"] if r["model"] == first and r.get("kernels")]
    found = []
    for experts in NAMES:
        of = [r for r in rows if r["variant"].startswith(f"{experts}: ")]
        found += [of[0], min(of, key=lambda r: float(r["ms"]))]
    return [found[0], found[2], found[1], found[3]]


def plot(record: Record, path: Path) -> None:
    rows = shown(record)
    figure, axes = style.subplots(height=1.9 + 0.55 * len(rows))
    for y, row in enumerate(rows):
        start = 0.0
        for part, color in PARTS.items():
            ms = row["kernels"].get(part, 0.0)
            label = part if y == 0 else None
            axes.barh(y, ms, left=start, height=0.7, color=color, label=label)
            if ms > 4:
                axes.text(start + ms / 2, y, f"{ms:.0f}", ha="center", va="center", color="white")
            start += ms
        axes.text(start + 1, y, f"step {row['ms']:.0f} ms", va="center", fontsize=10)
    axes.set_yticks(range(len(rows)), [label_of(row["variant"]) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("milliseconds of kernels in a training step; shorter is better")
    axes.set_title(f"{rows[0]['model']}, {style.place_of(record)}", loc="left")
    figure.legend(loc="outside lower left", ncols=3)
    style.save(figure, path)


def label_of(variant: str) -> str:
    experts, _, pieces = variant.partition(": ")
    return f"{NAMES[experts]},\n{'compiled' if pieces != 'default' else 'default'}"
