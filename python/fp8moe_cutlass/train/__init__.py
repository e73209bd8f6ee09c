"""The main job: a small byte-level MoE transformer on real text, in FP8 and in bf16.

Both runs start from the same seed and see the same batches; what is compared is their loss on
held-out text. Needs torch; the plot needs matplotlib.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .data import Corpus, load
from .loop import VARIANTS, Curve, Paused, TrainConfig, Trainer, configure
from .plot import plot

__all__ = [
    "VARIANTS",
    "Corpus",
    "Curve",
    "Paused",
    "TrainConfig",
    "Trainer",
    "configure",
    "load",
    "plot",
    "record",
    "settle",
    "train",
    "write",
]


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
    variants: tuple[str, ...] = ("fp8", "bf16"),
    resume: bool = False,
    on_step: Callable[[Trainer], None] = lambda trainer: None,
    stop: Callable[[Trainer], bool] = lambda trainer: False,
) -> dict[str, Trainer]:
    """Run the variants one after the other; a finished one is not run again under `resume`.

    Raises Paused, with all that was done on disk, once `stop` (called after each step) is true.
    """
    trainers: dict[str, Trainer] = {}
    for variant in variants:
        trainer = trainers[variant] = Trainer(config, corpus, variant, device, out)
        if resume:
            trainer.resume()
        trainer.run(on_step, stop)
    return trainers


def record(corpus: Corpus, trainers: dict[str, Trainer]) -> dict[str, Any]:
    """The result as plain data: settings, text, curves, held-out losses and their deviation."""
    trainer = next(iter(trainers.values()))
    runs = {
        name: {**asdict(t.curve), "tokens_per_second": t.tokens_per_second()}
        for name, t in trainers.items()
    }
    result = {
        "config": asdict(trainer.config),
        "device": trainer.device.type,
        "torch": torch.__version__,
        "text": {
            "name": corpus.name,
            "bytes": len(corpus.train),
            "heldout_bytes": len(corpus.heldout),
            "fingerprint": corpus.fingerprint,
        },
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "unigram_entropy": corpus.unigram_entropy(),
        "runs": runs,
    }
    if {"fp8", "bf16"} <= trainers.keys():
        fp8, bf16 = (trainers[name].curve.heldout[-1][1] for name in ("fp8", "bf16"))
        result["heldout_deviation"] = (fp8 - bf16) / bf16
    return result


def write(result: dict[str, Any], out: Path) -> tuple[Path, Path]:
    """loss.json and loss.png under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "loss.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    plot(result, path.with_suffix(".png"))
    return path, path.with_suffix(".png")
