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


COLORS = {"fp8": "tab:green", "bf16": "tab:gray", "double": "tab:red"}
NAMES = {"double": "double quantization"}  # of older records


def plot(record: dict[str, Any], path: Path) -> None:
    """Loss of every variant (training, smoothed; held out, dots; a line a seed), deviation from
    bf16, and what FP8 cost: the share of values that underflowed, the shifts of the transposes, and
    the SNR of each GEMM."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = record["runs"]
    watched: list[Any] = next((r["telemetry"] for r in runs if r["variant"] == "fp8"), [])
    figure, (top, bottom, *cost) = pyplot.subplots(
        *(5 if watched else 2, 1),
        figsize=(8, 12.5 if watched else 6.5),
        height_ratios=(3, 1, 1, 1, 1) if watched else (3, 1),
        layout="constrained",
    )
    bottom.sharex(top)
    steps = record["config"]["steps"]
    width = max(1, min(20, steps // 10))
    for run in runs:
        name, first = run["variant"], run["seed"] == runs[0]["seed"]
        label = f"{NAMES.get(name, name)}, " if first else None
        at, loss = smooth(run["loss"], width)
        top.plot(
            at,
            loss,
            color=COLORS[name],
            linewidth=1.2 if first else 0.5,
            label=label and f"{label}training (mean of {width})",
        )
        dots = zip(*run["heldout"], strict=True)
        top.plot(*dots, "o", markersize=3, color=COLORS[name], label=label and f"{label}held out")
    top.axhline(record["unigram_entropy"], color="black", linestyle=":", label="unigram entropy")
    top.set_ylabel("loss, nats a byte")
    top.set_title(f"Byte-level MoE transformer on {record['text']['name']}", fontsize=9)
    top.legend(fontsize=8)
    plot_deviations(bottom, runs, max(width, steps // 10))
    if watched:
        cost[0].sharex(top)
        plot_underflow(cost[0], watched)
        plot_shifts(cost[1], watched)
        cost[2].sharex(top)
        plot_snr(cost[2], watched)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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
            axes.plot(at, deviation, color=COLORS[name], label=NAMES.get(name, name))
    axes.axhline(0.0, color="black", linewidth=0.5)
    axes.set_ylabel(f"against bf16, %\n(mean of {width})")
    axes.set_xlabel("step")
    axes.legend(fontsize=7)


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


def plot_snr(axes: Any, watched: list[Any]) -> None:
    """Signal to noise of each GEMM against bf16, mean over the layers."""
    steps = [step for step, _ in watched]
    for name in next(iter(watched[0][1].values()))["snr"]:
        values = [np.mean([r["snr"][name] for r in report.values()]) for _, report in watched]
        axes.plot(steps, values, "o-", markersize=3, label=name)
    axes.set_ylabel("SNR of GEMMs, dB")
    axes.legend(fontsize=6, ncols=3)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    plot(json.loads(source.read_text()), source.with_suffix(".png"))
