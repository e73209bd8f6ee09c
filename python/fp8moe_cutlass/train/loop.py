"""One run: a decoder trained on a corpus with one recipe, in pieces that add up bit for bit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe, telemetry

from .data import Corpus
from .model import BYTES, Decoder, ModelConfig
from .pairs import seen_by_layers
from .ranks import Alone, experts_of

# The recipes a run compares.
VARIANTS: dict[str, Fp8Recipe | None] = {"fp8": Fp8Recipe(), "bf16": None}
SAVE_SECONDS = 300.0  # between checkpoints of an undisturbed run


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
    eval_every: int = 100  # steps; five times as often in the last tenth, whose mean is the result
    eval_windows: int = 256

    def evaluates(self, step: int) -> bool:
        """Whether the held-out loss is due after `step` steps."""
        often = max(1, self.eval_every // 5) if step > self.last_tenth else self.eval_every
        return step % often == 0 or step == self.steps

    @property
    def last_tenth(self) -> int:
        """The steps after this one are the last tenth."""
        return self.steps - max(1, self.steps // 10)


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
        batch=12,
        lr=6e-4,
        warmup=100,
        eval_windows=144,
    ),
}


@dataclass
class Curve:
    """What a run records: training loss of each step, held-out loss (nats a byte) at some, and
    every `eval_every` steps what FP8 cost each layer (telemetry.Counters.report by layer, and
    "snr" of its GEMMs)."""

    loss: list[float] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)
    telemetry: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    seconds: float = 0.0  # of training steps alone


class Paused(Exception):
    """The run stopped early and its checkpoint is written."""


class Trainer:
    """Trains `config` on `corpus` with the recipe of `variant`; `out` holds its checkpoint.

    The state after step n depends on the configuration, the text, the device and the number of
    ranks alone, however often the run was stopped and resumed on the way.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        variant: str,
        device: torch.device,
        out: Path,
        ranks: Alone = Alone(),  # noqa: B008 (stateless)
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.variant = variant
        self.device = device
        self.ranks = ranks
        self.path = out / f"{variant}-{config.seed}" / "checkpoint.pt"
        torch.manual_seed(config.seed)
        self.model = Decoder(config.model, VARIANTS[variant], device, ranks.group)
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
        # Where the losses arrive when the device has them: no step waits for its own.
        self._losses = torch.full((config.steps,), math.nan, pin_memory=device.type == "cuda")
        self._sent = 0  # losses on their way there, or arrived
        self._since: float | None = None  # when the steps not yet in curve.seconds began

    # ---- the steps ------------------------------------------------------------------------------

    def run(
        self,
        on_step: Callable[[Trainer], None] = lambda trainer: None,
        stop: Callable[[Trainer], bool] = lambda trainer: False,
    ) -> Curve:
        """Train to the last step; a checkpoint is written now and then, none at the end.

        After each step `on_step` sees the trainer and `stop` may end the run: the checkpoint is
        written and Paused raised.
        """
        saved = time.monotonic()
        while self.step < self.config.steps:
            self.train_step()
            on_step(self)
            done = self.step == self.config.steps
            late = time.monotonic() - saved > SAVE_SECONDS
            stopping, late = self.ranks.any(not done and stop(self), not done and late)
            if stopping or late:
                self.save()
                saved = time.monotonic()
            if stopping:
                raise Paused(f"{self.name} stopped after step {self.step}")
        self._collect()
        return self.curve

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.config.seed}"

    def train_step(self) -> None:
        """One optimizer step, which waits for nothing on the device; every `eval_every` steps
        watched (by one rank alone), and the held-out loss where it is due."""
        if self._since is None:
            self._since = time.perf_counter()
        c = self.config
        windows = self.corpus.batch(c.seed, self.step, c.batch, c.model.context, self.device)
        done = self.step + 1
        watched = done % c.eval_every == 0 or done == c.steps
        watched = watched and VARIANTS[self.variant] is not None and self.ranks.size == 1
        with ExitStack() as stack:
            if watched:
                seen = stack.enter_context(telemetry.watch(self.model))
                pairs = stack.enter_context(seen_by_layers(self.model))
            mine = self.ranks.part(windows)
            self.model.balance(c.balance * len(mine) / c.batch)
            loss = self.loss(mine, of=c.batch)
            torch.autograd.backward(loss)
        loss = self.ranks.total(loss.detach())
        self._losses[self.step : done].copy_(loss[None], non_blocking=True)
        self._sent = done
        if watched:
            self._collect()
            report = seen.report()
            for name, (layer, inputs) in pairs.items():
                report[name]["snr"] = telemetry.snr(layer, *inputs)
            self.curve.telemetry.append((done, report))
            self._since = time.perf_counter()
        self.ranks.clip(self.model, c.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(c, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step = done
        if c.evaluates(done):
            self._collect()
            self.curve.heldout.append((done, self.heldout_loss()))

    def _collect(self) -> None:
        """Wait for the device, and take the losses and the time so far into the curve."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.curve.loss = self._losses[: self._sent].tolist()
        if self._since is not None:
            self.curve.seconds += time.perf_counter() - self._since
            self._since = None

    @property
    def latest_loss(self) -> float:
        """The last training loss that has arrived, a step or so behind on a GPU; at first NaN."""
        arrived = self._losses[: self.step]
        arrived = arrived[~arrived.isnan()]
        return float(arrived[-1]) if len(arrived) else math.nan

    def loss(self, windows: Tensor, of: int) -> Tensor:
        """Cross entropy of the next byte, nats, of windows [B, context + 1]: their share of the
        mean over `of` windows."""
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(windows[:, :-1])
        every = logits.float().reshape(-1, BYTES)
        total = F.cross_entropy(every, windows[:, 1:].reshape(-1), reduction="sum")
        return total / (of * self.config.model.context)

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Mean cross entropy over the held-out windows, nats a byte."""
        c = self.config
        self.model.eval()
        batches = self.corpus.heldout_batches(c.eval_windows, c.batch, c.model.context, self.device)
        losses = [self.loss(self.ranks.part(windows), of=c.eval_windows) for windows in batches]
        self.model.train()
        return float(self.ranks.total(torch.stack(losses).double().sum()))

    def sample(self, prompt: bytes = b"def ", count: int = 240) -> str:
        """What the model writes after `prompt`."""
        text = prompt + self.model.generate(prompt, count, self.config.seed)
        return text.decode("utf-8", "replace")

    def parameters(self) -> int:
        """Of the whole model, the experts of all ranks included."""
        shared = sum(p.numel() for p in experts_of(self.model))
        return sum(p.numel() for p in self.model.parameters()) + (self.ranks.size - 1) * shared

    def tokens_per_second(self) -> float:
        """Over the training steps so far, evaluation aside."""
        c = self.config
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self.step * c.batch * c.model.context / max(self.curve.seconds + running, 1e-9)

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
        """Write the checkpoint; a crash while writing leaves the one before. Collective; any number
        of ranks can go on from it."""
        self._collect()
        state = self.ranks.whole(self.model, self.optimizer)
        if self.ranks.rank:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save(
            {
                "identity": self.identity(),
                "step": self.step,
                "curve": asdict(self.curve),
                **state,
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
        self.ranks.load(self.model, self.optimizer, state)
        torch.set_rng_state(state["rng"].cpu())
        self.step = state["step"]
        self.curve = Curve(**state["curve"])
        self._sent = self.step
        self._losses[: self.step] = torch.tensor(self.curve.loss)
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
