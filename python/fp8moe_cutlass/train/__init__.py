"""The main job: a small byte-level MoE transformer on real text, in FP8 and in bf16.

Runs of one seed start from the same weights and see the same batches; what is compared is their
loss on held-out text. Needs torch; the plot needs matplotlib.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from .data import Corpus, load
from .loop import VARIANTS, Curve, Paused, TrainConfig, Trainer, configure
from .plot import plot
from .ranks import Alone, Ranks

__all__ = [
    "VARIANTS",
    "Alone",
    "Corpus",
    "Curve",
    "Paused",
    "Ranks",
    "TrainConfig",
    "Trainer",
    "configure",
    "load",
    "plot",
    "save",
    "settle",
    "summarize",
    "train",
]

Result = dict[str, Any]


def settle(device: torch.device) -> None:
    """Make torch repeatable in this process: deterministic kernels only."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Outputs are written in full; filling them first would only cost time.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def train(
    config: TrainConfig,
    corpus: Corpus,
    device: torch.device,
    out: Path,
    variants: tuple[str, ...] = tuple(VARIANTS),
    seeds: int = 1,
    resume: bool = False,
    on_step: Callable[[Trainer], None] = lambda trainer: None,
    stop: Callable[[Trainer], bool] = lambda trainer: False,
    left: Callable[[], float] = lambda: math.inf,
    ranks: Alone = Alone(),  # noqa: B008 (stateless)
) -> Result:
    """Run every variant from every seed (config.seed and those after it), one after the other.

    `out` holds loss.json, all runs so far, and a checkpoint of an interrupted one. Under `resume` a
    run that is finished there is not run again, and an interrupted one goes on.
    Raises Paused, with all that was done on disk, once `stop` (called after each step) is true, or
    where a run would start that by what its variant took before needs more than `left()` seconds.
    ranks: the processes that share each run; all call this, the first alone writes.
    """
    if seeds < 1:
        raise ValueError(f"[train] seeds must be at least 1; got {seeds}")
    unknown = [variant for variant in variants if variant not in VARIANTS]
    if unknown:
        raise ValueError(f"[train] variants must be of {', '.join(VARIANTS)}; got {unknown[0]}")
    if ranks.rank == 0:
        out.mkdir(parents=True, exist_ok=True)  # or fail before the training, not after it
        if not os.access(out, os.W_OK):
            raise ValueError(f"[train] out must be a folder that can be written to; got {out}")
    result = resumed(out, config, corpus, device) if resume else None
    result = result or new_result(config, corpus, device)
    for seed in range(config.seed, config.seed + seeds):
        for variant in variants:
            if any((r["seed"], r["variant"]) == (seed, variant) for r in result["runs"]):
                continue
            trainer = Trainer(replace(config, seed=seed), corpus, variant, device, out, ranks)
            begun = resume and trainer.resume()
            took = [r["seconds"] for r in result["runs"] if r["variant"] == variant]
            late = not begun and bool(took) and 1.15 * max(took) > left()
            if any(ranks.any(late)):
                raise Paused(f"too little time is left for {trainer.name}")
            trainer.run(on_step, stop)
            run = {"variant": variant, "seed": seed, **asdict(trainer.curve)}
            run["tokens_per_second"] = trainer.tokens_per_second()
            if seed == config.seed and variant == "fp8":
                run["sample"] = trainer.sample()
            result["parameters"] = trainer.parameters()
            result["runs"].append(run)
            result["summary"] = summarize(result)
            if ranks.rank == 0:
                save(result, out)
                trainer.path.unlink(missing_ok=True)
            del trainer
    return result


# ---- the result as plain data -------------------------------------------------------------------


def new_result(config: TrainConfig, corpus: Corpus, device: torch.device) -> Result:
    """Settings and text; no runs yet."""
    cuda = device.type == "cuda"
    return {
        "config": asdict(config),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "torch": torch.__version__,
        "text": {
            "name": corpus.name,
            "bytes": len(corpus.train),
            "heldout_bytes": len(corpus.heldout),
            "fingerprint": corpus.fingerprint,
        },
        "unigram_entropy": corpus.unigram_entropy,
        "runs": [],
    }


def resumed(out: Path, config: TrainConfig, corpus: Corpus, device: torch.device) -> Result | None:
    """What loss.json of `out` holds; ValueError if it is of other settings or another text."""
    path = out / "loss.json"
    if not path.exists():
        return None
    result: Result = json.loads(path.read_text())
    mine = new_result(config, corpus, device)
    for name in ("config", "device", "text"):
        theirs = {"": result[name]} if name == "device" else result[name]
        for key, value in ({"": mine[name]} if name == "device" else mine[name]).items():
            if theirs.get(key) != value:
                raise ValueError(
                    f"[train] {path} was written with {key or name} = {theirs.get(key)}; got "
                    f"{value}. Give the same settings, or another --out"
                )
    return result


def summarize(result: Result) -> Result:
    """By variant: the mean loss over the last tenth of the steps (held out, of each seed, and their
    spread) and how far it is from bf16's: held out by the means of the seeds both have, in training
    step by step, smoothed over the last tenth."""
    last = result["config"]["steps"] - max(1, result["config"]["steps"] // 10)
    runs = {(r["variant"], r["seed"]): r for r in result["runs"]}
    heldout = {
        key: fmean(loss for step, loss in run["heldout"] if step > last)
        for key, run in runs.items()
    }
    summary: Result = {}
    for variant in dict.fromkeys(v for v, _ in runs):
        by_seed = {seed: loss for (v, seed), loss in heldout.items() if v == variant}
        mean = fmean(by_seed.values())
        entry: Result = {
            "heldout": mean,
            "heldout_by_seed": by_seed,
            "spread": (max(by_seed.values()) - min(by_seed.values())) / mean,
        }
        both = [seed for seed in by_seed if ("bf16", seed) in runs]
        if variant != "bf16" and both:
            base = fmean(heldout["bf16", seed] for seed in both)
            entry["heldout_deviation"] = fmean(by_seed[seed] for seed in both) / base - 1.0
            pairs = ((runs[variant, seed]["loss"], runs["bf16", seed]["loss"]) for seed in both)
            entry["training_deviation"] = fmean(
                fmean(a[last:]) / fmean(b[last:]) - 1.0 for a, b in pairs
            )
        summary[variant] = entry
    return summary


def save(result: Result, out: Path) -> Path:
    """loss.json in `out`, which is there; a crash while writing leaves the one before."""
    path = out / "loss.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, path)
    return path
