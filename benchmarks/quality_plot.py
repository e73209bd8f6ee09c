"""The plot of quality.py's record: each arm's gap to bf16 by step, and the loss by time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plot_style as style
from common import Record
from quality import gaps

COLORS = {
    "bf16": style.BF16,
    "fp8": style.OURS,
    "noise": style.LIMIT,
    "e5m2": style.SERIES[1],
    "float32-scales": style.SERIES[0],
    "bf16-wgrad": style.SERIES[4],
    "bf16-edges": style.SERIES[5],
    "double": style.BASELINE,
    "output": style.SERIES[6],
    "vllm": style.SERIES[7],
    "sglang": style.OTHER,
}


def plot(record: Record, path: Path) -> None:
    figure, (top, bottom) = style.subplots(2, height=7.4)
    widest = record["bar"]["interval"]
    for row in record["results"]:
        arm = row["variant"]
        steps, found = gaps(record, arm)
        if arm == "bf16" or not steps or row["gap"]["seeds"] < 3:  # a band of two is all noise
            continue
        label = f"{row['about']}, {row['gap']['seeds']} seeds"
        top.plot(steps, [g["mean"] for g in found], color=COLORS[arm], label=label)
        band: Any = [g["low"] for g in found], [g["high"] for g in found]
        top.fill_between(steps, *band, color=COLORS[arm], alpha=0.18, linewidth=0)
    top.axhline(0, color=style.LIMIT, linewidth=0.8)
    top.axhspan(-widest, widest, color=style.BF16, alpha=0.12, linewidth=0)
    top.set_ylim(-4 * widest, 4 * widest)
    top.set_xlabel("step")
    top.set_ylabel("loss above bf16, nats")
    top.set_title("Training loss beside bf16's of the same seeds; bands: 95%", loc="left")
    if top.lines[1:]:  # beside zero
        top.legend(fontsize=8, ncols=2)
    for row in (r for r in record["results"] if r["variant"] in ("bf16", "fp8")):
        arm, label = row["variant"], row["about"]
        runs = [run for run in record["runs"] if run["arm"] == arm and run["complete"]]
        for n, run in enumerate(r for r in runs if r["environment"]["gpu"] == row["gpu"]):
            _, losses, seconds = zip(*run["heldout"], strict=True)
            shown: Any = {"color": COLORS[arm], "label": label if n == 0 else None}
            bottom.plot(seconds, losses, "-", markersize=3, **shown)
    bottom.set_xlabel("seconds of training")
    bottom.set_ylabel("held-out loss, nats per token")
    bottom.set_title("Held-out loss by time", loc="left")
    bottom.legend()
    tokens = record["results"][0]["tokens"] / 1e6
    sizes = f"{record['parameters'] / 1e9:.2g} billion parameters, {tokens:.0f} million tokens"
    figure.suptitle(f"{sizes}, {style.place_of(record)}", fontsize=12, x=0.01, ha="left")
    style.save(figure, path)
