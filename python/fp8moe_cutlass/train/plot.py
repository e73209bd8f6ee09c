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
    """Loss of every variant (train, smoothed; held out, dots) and their relative deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    runs = record["runs"]
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
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def difference(a: list[float], b: list[float]) -> list[float]:
    """100 (a - b) / b, step by step."""
    return [100.0 * (x - y) / y for x, y in zip(a, b, strict=False)]


if __name__ == "__main__":
    source = Path(sys.argv[1])
    plot(json.loads(source.read_text()), source.with_suffix(".png"))
