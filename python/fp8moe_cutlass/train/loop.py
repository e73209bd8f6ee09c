"""One run: a decoder trained on a corpus with one recipe, in pieces that add up bit for bit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe, telemetry

from .data import Corpus
from .model import BYTES, Decoder, ModelConfig

# The recipes a run compares; the first is the one under test, the second what it is held against.
VARIANTS: dict[str, Fp8Recipe | None] = {"fp8": Fp8Recipe(), "bf16": None}


@dataclass(frozen=True)
class TrainConfig:
    """Everything the numbers of a run depend on, but the text and the device."""

    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 500
    batch: int = 16
    lr: float = 2e-3
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    balance: float = 0.01  # weight of the routers' balancing loss
    seed: int = 0
    eval_every: int = 100
    eval_windows: int = 256


SIZES = {
    "tiny": TrainConfig(
        ModelConfig(layers=1, heads=2, experts=4, context=32),
        steps=20,
        batch=4,
        eval_every=10,
        eval_windows=8,
    ),
    "small": TrainConfig(),
    "h200": TrainConfig(
        ModelConfig(
            layers=8, hidden=1024, heads=8, experts=16, top_k=4, intermediate=1536, context=1024
        ),
        steps=1000,
        batch=32,
        lr=6e-4,
        warmup=100,
    ),
}


@dataclass
class Curve:
    """What a run records: training loss of each step, held-out loss (nats a byte) at some, and in
    those steps what FP8 cost each layer (telemetry.Counters.report by layer)."""

    loss: list[float] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)
    telemetry: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    seconds: float = 0.0  # of training steps alone


class Paused(Exception):
    """The run stopped early and its checkpoint is written."""


class Trainer:
    """Trains `config` on `corpus` with the recipe of `variant`; `out` holds its checkpoint.

    The state after step n depends on the configuration, the text and the device alone, however
    often the run was stopped and resumed on the way.
    """

    def __init__(
        self, config: TrainConfig, corpus: Corpus, variant: str, device: torch.device, out: Path
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.variant = variant
        self.device = device
        self.path = out / variant / "checkpoint.pt"
        torch.manual_seed(config.seed)
        self.model = Decoder(config.model, VARIANTS[variant], device)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.step = 0
        self.curve = Curve()

    # ---- the steps ------------------------------------------------------------------------------

    def run(
        self,
        on_step: Callable[[Trainer], None] = lambda trainer: None,
        stop: Callable[[Trainer], bool] = lambda trainer: False,
        save_every: int = 100,
    ) -> Curve:
        """Train to the last step; a checkpoint is written every `save_every` steps and at the end.

        After each step `on_step` sees the trainer and `stop` may end the run: the checkpoint is
        written and Paused raised.
        """
        while self.step < self.config.steps:
            self.train_step()
            on_step(self)
            done = self.step == self.config.steps
            stopping = not done and stop(self)
            if done or stopping or self.step % save_every == 0:
                self.save()
            if stopping:
                raise Paused(f"{self.variant} stopped after step {self.step}")
        return self.curve

    def train_step(self) -> None:
        """One optimizer step; where a held-out loss is due, watched, and that loss."""
        began = time.perf_counter()
        c = self.config
        windows = self.corpus.batch(c.seed, self.step, c.batch, c.model.context)
        due = (self.step + 1) % c.eval_every == 0 or self.step + 1 == c.steps
        watched = due and VARIANTS[self.variant] is not None
        with telemetry.watch(self.model) if watched else nullcontext() as seen:
            loss = self.loss(windows)
            torch.autograd.backward(loss + c.balance * self.model.balance_loss())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(c, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.curve.loss.append(loss.item())
        self.step += 1
        self.curve.seconds += time.perf_counter() - began
        if seen is not None:
            self.curve.telemetry.append((self.step, seen.report()))
        if due:
            self.curve.heldout.append((self.step, self.heldout_loss()))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy of the next byte, nats; windows [B, context + 1]."""
        windows = windows.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.float().reshape(-1, BYTES), windows[:, 1:].reshape(-1))

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Mean cross entropy over the held-out windows, nats a byte."""
        c = self.config
        self.model.eval()
        total, count = 0.0, 0
        for windows in self.corpus.heldout_batches(c.eval_windows, c.batch, c.model.context):
            total += self.loss(windows).item() * len(windows)
            count += len(windows)
        self.model.train()
        return total / count

    def tokens_per_second(self) -> float:
        """Over the training steps so far, evaluation aside."""
        c = self.config
        return self.step * c.batch * c.model.context / max(self.curve.seconds, 1e-9)

    # ---- stopping and resuming ------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What must agree for a checkpoint to be continued."""
        return {
            **asdict(self.config),
            "variant": self.variant,
            "text": self.corpus.fingerprint,
            "device": self.device.type,
        }

    def save(self) -> None:
        """Write the checkpoint; a crash while writing leaves the one before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save(
            {
                "identity": self.identity(),
                "step": self.step,
                "curve": asdict(self.curve),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "rng": torch.get_rng_state(),
            },
            partial,
        )
        os.replace(partial, self.path)

    def resume(self) -> bool:
        """Continue from the checkpoint, if there is one; ValueError if it is another run's."""
        if not self.path.exists():
            return False
        state = torch.load(self.path, map_location=self.device, weights_only=True)
        mine = self.identity()
        for name, value in state["identity"].items():
            if mine.get(name) != value:
                raise ValueError(
                    f"[train] {self.path} was written with {name} = {value}; got {mine.get(name)}. "
                    "Give the same settings, or another --out"
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())
        self.step = state["step"]
        self.curve = Curve(**state["curve"])
        return True


def learning_rate(c: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine to zero: the last steps settle the weights."""
    if step < c.warmup:
        return c.lr * (step + 1) / c.warmup
    done = (step - c.warmup) / max(1, c.steps - c.warmup)
    return c.lr * 0.5 * (1.0 + math.cos(math.pi * done))


def configure(size: str, steps: int | None, seed: int) -> TrainConfig:
    """A named size with the user's steps and seed; the warm-up is at most a tenth of the steps."""
    if size not in SIZES:
        raise ValueError(f"[train] size must be one of {', '.join(SIZES)}; got {size}")
    base = SIZES[size]
    steps = base.steps if steps is None else steps
    if steps < 1:
        raise ValueError(f"[train] steps must be at least 1; got {steps}")
    return replace(base, steps=steps, seed=seed, warmup=min(base.warmup, max(1, steps // 10)))
