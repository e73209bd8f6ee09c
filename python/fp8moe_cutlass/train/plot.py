"""The loss curves of a run, from its JSON: python -m fp8moe_cutlass.train.plot FILE.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def smooth(values: list[float], width: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Steps and means of `width` consecutive values."""
    window = np.ones(width) / width
    return np.arange(width, len(values) + 1), np.convolve(values, window, mode="valid")


def plot(record: dict[str, Any], path: Path) -> None:
    """Loss of every variant (train, smoothed; held out, dots), their relative deviation, and what
    FP8 cost: the share of values that underflowed, and the shifts of the transposes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = record["runs"]
    watched = runs.get("fp8", {}).get("telemetry", [])
    figure, (top, bottom, *cost) = pyplot.subplots(
        *(4 if watched else 2, 1),
        figsize=(8, 10.5 if watched else 6.5),
        height_ratios=(3, 1, 1, 1) if watched else (3, 1),
        layout="constrained",
    )
    bottom.sharex(top)
    width = max(1, min(20, record["config"]["steps"] // 10))
    for color, (name, run) in zip(("tab:green", "tab:gray", "tab:red"), runs.items(), strict=False):
        if not run["loss"]:
            continue
        steps, loss = smooth(run["loss"], min(width, len(run["loss"])))
        top.plot(steps, loss, color=color, label=f"{name}, training (mean of {width})")
        if run["heldout"]:
            top.plot(
                *zip(*run["heldout"], strict=True), "o", color=color, label=f"{name}, held out"
            )
    entropy = record["unigram_entropy"]
    top.axhline(entropy, color="black", linestyle=":", label="unigram entropy of the text")
    top.set_ylabel("loss, nats a byte")
    top.set_title(f"Byte-level MoE transformer on {record['text']['name']}", fontsize=9)
    top.legend(fontsize=8)
    if {"fp8", "bf16"} <= runs.keys():
        steps, loss = smooth(difference(runs["fp8"]["loss"], runs["bf16"]["loss"]), width)
        bottom.plot(steps, loss, color="tab:green")
    bottom.axhline(0.0, color="black", linewidth=0.5)
    bottom.set_ylabel("fp8 against\nbf16, %")
    bottom.set_xlabel("step")
    if watched:
        cost[0].sharex(top)
        plot_underflow(cost[0], watched)
        plot_shifts(cost[1], watched)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_underflow(axes: Any, watched: list[Any]) -> None:
    """Mean over the layers, of each operand when it is quantized and of the transposes."""
    steps = [step for step, _ in watched]
    layers = [list(report.values()) for _, report in watched]
    for name in layers[0][0]["underflowed"]:
        shares = [100 * np.mean([r["underflowed"][name] for r in at]) for at in layers]
        axes.plot(steps, shares, "o-", markersize=3, label=name)
    for name in layers[0][0]["transposes"]:
        shares = [
            100 * np.mean([r["transposes"][name]["underflowed"] for r in at]) for at in layers
        ]
        axes.plot(steps, shares, "s--", markersize=3, label=name)
    axes.set_ylabel("underflowed, %")
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.legend(fontsize=6, ncols=2)


def plot_shifts(axes: Any, watched: list[Any]) -> None:
    """Scale shifts of the transposes at the last watched step, all layers together."""
    layers = list(watched[-1][1].values())
    names = list(layers[0]["transposes"])
    for place, name in enumerate(names):
        shifts = np.sum([r["transposes"][name]["shifts"] for r in layers], axis=0)
        at = np.arange(len(shifts)) + 0.8 * place / len(names)
        height = 100 * shifts / max(shifts.sum(), 1)
        axes.bar(at, height, width=0.8 / len(names), align="edge", label=name)
    axes.set_xlabel(f"shift k of 1x128 row tiles, new code = RN(old 2^-k), step {watched[-1][0]}")
    axes.set_ylabel("tiles, %")
    axes.set_xticks(np.arange(len(shifts)))
    axes.legend(fontsize=6)


def difference(a: list[float], b: list[float]) -> list[float]:
    """100 (a - b) / b, step by step."""
    return [100.0 * (x - y) / y for x, y in zip(a, b, strict=False)]


if __name__ == "__main__":
    source = Path(sys.argv[1])
    plot(json.loads(source.read_text()), source.with_suffix(".png"))
