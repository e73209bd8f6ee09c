"""Trains one arm of quality.py with one seed, and writes what it sees as it goes.

    python benchmarks/quality_train.py --arm fp8 --seed 0 --text FOLDER --out RUNS --tokens 40e6

On a GPU each layer and the loss are compiled; AdamW is torch's fused one. RUNS/ARM-SEED.json is
written again after each evaluation, and RUNS/ARM-SEED.npy at the end: the experts that each layer
chooses for CHOICES held-out sequences, to be compared with another arm's.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import quality_text
from common import machine
from fp8moe_cutlass import telemetry
from quality_model import ARMS, MODELS, Config, Decoder, groups, learning_rate, loss_of, made

CHOICES = 4  # sequences
WATCHED = 8  # sequences of a step that telemetry looks at


class Sequences(Protocol):
    """What a Trainer takes of a text."""

    mix: dict[str, Any]

    def held_out(self) -> list[Tensor]: ...


class Text:
    """The tokens of a folder on the device, as sequences."""

    def __init__(self, folder: Path, c: Config, device: torch.device) -> None:
        train, heldout, self.mix = quality_text.read(folder)
        # Ids are below 2^15.
        self.train = torch.from_numpy(train.astype(np.int16)).to(device)
        self.heldout = torch.from_numpy(heldout.astype(np.int16)).to(device)
        self.context, self.batch = c.context, c.batch
        self.sequences = (len(train) - 1) // c.context

    def windows(self, of: Tensor, numbers: Tensor) -> Tensor:
        """Sequences [B, context + 1] int64 by their numbers."""
        at = torch.arange(self.context + 1, device=of.device)
        return of[numbers[:, None] * self.context + at].long()

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Each epoch has every sequence once, in an order that the seed alone decides."""
        generator = torch.Generator().manual_seed(seed)
        left = torch.empty(0, dtype=torch.int64)
        while True:
            while len(left) < self.batch:
                left = torch.cat([left, torch.randperm(self.sequences, generator=generator)])
            numbers, left = left[: self.batch], left[self.batch :]
            yield self.windows(self.train, numbers.to(self.train.device))

    def held_out(self) -> list[Tensor]:
        """All held-out batches, of one size."""
        count = (len(self.heldout) - 1) // self.context // self.batch * self.batch
        numbers = torch.arange(count, device=self.heldout.device)
        return [self.windows(self.heldout, part) for part in numbers.view(-1, self.batch)]


class Trainer:
    """A model in training: steps, evaluations and what is looked at."""

    def __init__(
        self,
        arm: str,
        seed: int,
        c: Config,
        text: Sequences,
        steps: int,
        device: torch.device,
        compiled: bool = True,
    ) -> None:
        self.arm, self.c, self.steps, self.device = ARMS[arm], c, steps, device
        self.model: Decoder = made(c, self.arm, text.mix["vocabulary"], seed, device)
        self.parameters = list(self.model.parameters())
        self.start = checksum(self.parameters)
        if self.arm.nudge:
            self.model.nudge()
        self.optimizer = torch.optim.AdamW(
            groups(self.model, c), betas=(0.9, 0.95), eps=1e-8, fused=True
        )
        self.loss_of = loss_of
        if compiled and device.type == "cuda":
            self.compile()
        self.held_out = text.held_out()
        self.losses = torch.zeros(steps, device=device)
        self.norms = torch.zeros(steps, device=device)

    def compile(self) -> None:
        """Each layer, and the loss."""
        for block in self.model.blocks:
            block.compile()
        self.loss_of = torch.compile(loss_of)

    def loss(self, windows: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden, counts, choices = self.model(windows[:, :-1])
            loss = self.loss_of(hidden, self.model.head.weight, windows[:, 1:])
        return loss, counts, choices

    def warm_up(self, windows: Tensor) -> None:
        """Compiles; leaves the model as it was."""
        self.loss(windows)[0].backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()
        with torch.no_grad():
            self.loss(self.held_out[0])
        self.wait()

    def step(self, n: int, windows: Tensor) -> list[Tensor]:
        """Trains on one batch; the tokens of each layer's experts. Does not wait for the device."""
        loss, counts, _ = self.loss(windows)
        loss.backward()  # type: ignore[no-untyped-call]
        self.losses[n] = loss.detach()
        self.norms[n] = nn.utils.clip_grad_norm_(self.parameters, 1.0).detach()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.c, n, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for block, count in zip(self.model.layers(), counts, strict=True):
            block.moe.router.update_selection_bias(count, self.c.bias_rate)
        return counts

    @torch.no_grad()
    def evaluate(self) -> float:
        """The held-out loss, nats per token."""
        total = torch.zeros((), device=self.device)
        for windows in self.held_out:
            total += self.loss(windows)[0]
        return total.item() / len(self.held_out)

    @torch.no_grad()
    def choices(self) -> np.ndarray[Any, Any]:
        """[layers, tokens, top_k] uint8, ascending: each token's experts in CHOICES sequences."""
        with torch.compiler.set_stance("force_eager"):  # another size, once
            _, _, chosen = self.loss(self.held_out[0][:CHOICES])
        found: np.ndarray[Any, Any] = torch.stack(chosen).sort(dim=-1).values.cpu().numpy()
        return found.astype(np.uint8)

    def underflows(self, windows: Tensor) -> dict[str, float] | None:
        """What telemetry sees of a forward and backward, means over the layers in FP8; None where
        it counts nothing: in bf16, and in OtherWgrad. The gradients go."""
        if self.arm.recipe is None or self.arm.wgrad is not None:
            return None
        with (
            torch.compiler.set_stance("force_eager"),
            telemetry.watch(self.model, every=1) as seen,
        ):
            self.loss(windows[:WATCHED])[0].backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()
        reports = list(seen.report().values())
        found = {
            name: float(np.mean([r["underflowed"][name] for r in reports]))
            for name in reports[0]["underflowed"]
        }
        for name in reports[0]["transposes"]:
            each = [r["transposes"][name]["underflowed"] for r in reports]
            found[f"{name}, by the shift"] = float(np.mean(each))
        return found

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def checksum(tensors: list[Any]) -> int:
    """A sum over all bits, the same for the same weights."""
    return sum(int(t.detach().view(torch.int32).sum(dtype=torch.int64)) for t in tensors)


def entropy(counts: list[Tensor]) -> float:
    """Of the experts' loads, over that of equal loads; mean over the layers."""
    found = []
    for count in counts:
        p = count.double() / count.sum()
        found.append(float(-(p * p.clamp(min=1e-30).log()).sum() / math.log(len(p))))
    return float(np.mean(found))


def train(
    arm: str,
    seed: int,
    model: str,
    text: Text,
    tokens: float,
    limit: float,
    out: Path,
    device: torch.device,
) -> dict[str, Any]:
    """One run. limit: seconds from now after which it stops at the next evaluation."""
    begun = time.monotonic()
    c = MODELS[model]
    per_step = c.batch * c.context
    steps = max(c.evaluations, round(tokens / per_step))
    t = Trainer(arm, seed, c, text, steps, device)
    batches = text.batches(seed)
    first = next(batches)
    underflows = t.underflows(first)  # before anything compiles: to watch leaves a trace in layers
    t.warm_up(first)
    run: dict[str, Any] = {
        "arm": arm,
        "seed": seed,
        "model": model,
        "config": asdict(c),
        "parameters": sum(p.numel() for p in t.parameters),
        "steps": steps,
        "tokens": steps * per_step,
        "epochs": steps * c.batch / text.sequences,
        "text": text.mix["sha256"],
        "start": t.start,
        "first_batch": int(first.sum()),
        "environment": machine(device),  # no limit is measured: others compute beside
        "setup_s": time.monotonic() - begun,
        "complete": False,
        "heldout": [],  # (step, nats per token, seconds of training until then)
        "entropy": [],  # (step, of the loads over that of equal loads)
        "underflows": [(0, underflows)],  # (step, shares)
    }
    path = out / f"{arm}-{seed}.json"
    every, watched_at = max(1, steps // c.evaluations), (steps // 2, steps - 1)
    seconds, since, windows = 0.0, time.monotonic(), first
    for n in range(steps):
        if n in watched_at:
            t.wait()
            seconds += time.monotonic() - since
            run["underflows"].append((n, t.underflows(windows)))
            since = time.monotonic()
        counts = t.step(n, windows)
        windows = next(batches)
        if (n + 1) % every and n + 1 < steps:
            continue
        t.wait()
        seconds += time.monotonic() - since
        run["heldout"].append((n + 1, t.evaluate(), seconds))
        run["entropy"].append((n + 1, entropy(counts)))
        run["loss"] = rounded(t.losses[: n + 1])
        run["grad_norm"] = rounded(t.norms[: n + 1])
        run["tokens_per_s"] = (n + 1) * per_step / seconds
        run["complete"] = n + 1 == steps
        if device.type == "cuda":
            run["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        run["wall_s"] = time.monotonic() - begun
        path.write_text(json.dumps(run))
        last = f"{n + 1}/{steps} steps, held out {run['heldout'][-1][1]:.4f}"
        print(f"{arm}-{seed}: {last}, {run['tokens_per_s']:,.0f} tokens/s", flush=True)
        if run["wall_s"] > limit:
            break
        since = time.monotonic()
    np.save(out / f"{arm}-{seed}.npy", t.choices())
    return run


def rounded(values: Tensor) -> list[float]:
    return [round(v, 5) for v in values.tolist()]


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--arm", choices=ARMS, required=True)
    arguments.add_argument("--seed", type=int, required=True)
    arguments.add_argument("--model", choices=MODELS, default="fine")
    arguments.add_argument("--text", type=Path, required=True, help="of quality_text.py")
    arguments.add_argument("--tokens", type=float, required=True)
    arguments.add_argument("--limit", type=float, default=math.inf, help="seconds")
    arguments.add_argument("--out", type=Path, required=True, help="a folder")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    given = arguments.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(given.device)
    text = Text(given.text, MODELS[given.model], device)
    how = given.tokens, given.limit, given.out, device
    train(given.arm, given.seed, given.model, text, *how)


if __name__ == "__main__":
    main()
