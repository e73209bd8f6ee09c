"""The plot of a training record: losses, deviations and what FP8 cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import plot_style as style


def smooth(values: list[float], width: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Steps and means of `width` consecutive values."""
    window = np.ones(width) / width
    return np.arange(width, len(values) + 1), np.convolve(values, window, mode="valid")


# By variant: name, color, line style and width.
LINES = {
    "bf16": ("bf16", style.BF16, "-", 4.0),
    "double": ("double quantization", style.BASELINE, "--", 1.8),
    "fp8": ("FP8", style.OURS, "-", 1.4),
}


def plot(record: dict[str, Any], path: Path) -> None:
    """Loss in bf16 and FP8 (the first seed), deviations from bf16 (all seeds), and what FP8 cost:
    the share of values that underflowed, the shifts of the transposes, each GEMM's SNR."""
    runs = record["runs"]
    watched: list[Any] = next((r.get("telemetry", []) for r in runs if r["variant"] == "fp8"), [])
    heights = (2.6, 1.5, 1.5, 1.5, 1.5) if watched else (2.6, 1.5)
    figure, (top, bottom, *cost) = style.subplots(
        len(heights), height=0.5 + 1.45 * sum(heights), height_ratios=heights
    )
    steps = record["config"]["steps"]
    width = max(1, min(20, steps // 10))
    first = {r["variant"]: r for r in runs if r["seed"] == runs[0]["seed"]}
    for variant in ("bf16", "fp8"):  # the wider line below: the curves are close
        name, color, line, thickness = LINES[variant]
        if variant in first:
            at, loss = smooth(first[variant]["loss"], width)
            top.plot(at, loss, line, color=color, linewidth=thickness, label=f"{name}, training")
            dots = zip(*first[variant]["heldout"], strict=True)
            top.plot(*dots, "o", markersize=1.2 + 2 * thickness, color=color)
    top.plot([], [], "o", color="black", markersize=4, label="held out")
    entropy = record["unigram_entropy"]
    top.axhline(entropy, color="black", linestyle=":", label="unigram entropy")
    top.set_ylim(top=1.25 * entropy)
    top.set_ylabel("loss, nats per byte")
    top.set_title(f"Training a small MoE transformer, {record['device']}", loc="left")
    beside(top)
    plot_deviations(bottom, runs, max(width, steps // 10))
    if watched:
        plot_underflow(cost[0], watched)
        plot_shifts(cost[1], watched)
        plot_snr(cost[2], watched)
    for axes in (top, bottom, *cost[:1], *cost[2:]):
        axes.set_xlim(0, steps)
        axes.set_xlabel("step")
    style.save(figure, path)


def plot_deviations(axes: Any, runs: list[dict[str, Any]], width: int) -> None:
    """100 (loss - bf16's) / bf16's, mean over the seeds, smoothed over a tenth of the steps."""
    base = {r["seed"]: np.array(r["loss"]) for r in runs if r["variant"] == "bf16"}
    for name in dict.fromkeys(r["variant"] for r in runs if r["variant"] != "bf16"):
        each = [
            100.0 * (np.array(r["loss"]) / base[r["seed"]] - 1.0)
            for r in runs
            if r["variant"] == name and r["seed"] in base
        ]
        if each:
            at, deviation = smooth(list(np.mean(each, axis=0)), width)
            label, color, line, _ = LINES[name]
            axes.plot(at, deviation, line, color=color, label=label)
    axes.axhline(0.0, color=style.BF16, linewidth=2)
    axes.set_ylabel("loss against\nbf16, %")
    axes.set_title(f"Training loss against bf16, mean of {width} steps and all seeds", loc="left")
    beside(axes)


def plot_underflow(axes: Any, watched: list[Any]) -> None:
    """Mean over the layers, of each operand when it is quantized and of the transposes."""
    steps = [step for step, _ in watched]
    layers = [list(report.values()) for _, report in watched]
    shares: dict[str, list[Any]] = {
        name: [[r["underflowed"][name] for r in at] for at in layers]
        for name in layers[0][0]["underflowed"]
    }
    for name in layers[0][0]["transposes"]:
        of_layers = [[r["transposes"][name]["underflowed"] for r in at] for at in layers]
        shares[name] = of_layers
    for (name, values), color in zip(shares.items(), style.SERIES, strict=False):
        line = "s--" if name in layers[0][0]["transposes"] else "o-"
        means = [100 * np.mean(v) for v in values]
        axes.plot(steps, means, line, markersize=4, color=color, label=name)
    axes.set_ylabel("underflow, %")
    axes.set_title("Values that quantization rounded to zero", loc="left")
    axes.set_yscale("symlog", linthresh=1e-3)
    beside(axes)


def plot_shifts(axes: Any, watched: list[Any]) -> None:
    """Scale shifts of the transposes at the last watched step, all layers together."""
    layers = list(watched[-1][1].values())
    names = list(layers[0]["transposes"])
    for place, name in enumerate(names):
        shifts = np.sum([r["transposes"][name]["shifts"] for r in layers], axis=0)
        at = np.arange(len(shifts)) + 0.8 * (place - (len(names) - 1) / 2) / len(names)
        height = 100 * shifts / max(shifts.sum(), 1)
        axes.bar(at, height, 0.8 / len(names), color=style.SERIES[4 + place], label=name)
    axes.set_xlabel("shift k of a 1x128 tile: new code = round(old code / 2^k)")
    axes.set_title(f"Scale shifts of the transposes at step {watched[-1][0]}", loc="left")
    axes.set_ylabel("tiles, %")
    axes.set_xticks(np.arange(len(shifts)))
    beside(axes)


def plot_snr(axes: Any, watched: list[Any]) -> None:
    """Signal to noise of each GEMM against bf16, mean over the layers."""
    steps = [step for step, _ in watched]
    names = next(iter(watched[0][1].values()))["snr"]
    for name, color in zip(names, style.SERIES, strict=False):
        values = [np.mean([r["snr"][name] for r in report.values()]) for _, report in watched]
        line = "s--" if name.startswith("wgrad") else "o-"
        axes.plot(steps, values, line, markersize=4, color=color, label=name)
    axes.set_ylabel("SNR, dB")
    axes.set_title("Signal to noise of each GEMM", loc="left")
    beside(axes)


def beside(axes: Any) -> None:
    """The legend to the right of the curves, not on them."""
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
