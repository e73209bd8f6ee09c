"""A training step of the expert layer: of your model, or of five models beside other libraries.

    python benchmarks/layer.py path/to/config.json [--tokens 8192] [--experts 32]
    python benchmarks/layer.py --sizes 128 2048 768 8
    python benchmarks/layer.py --json layer.json [--steps] [--model NAME]

The first two print times and memory of one layer in FP8 and bf16. The last writes a record of five
models. With --steps it has what pages quote: whole steps, their memory and kernels. The full one
also has CUDA graphs, other routings, few tokens and main_grad.

A step is forward and backward. The first figure quantizes the weights in every forward, as training
does that does not accumulate gradients. The second reuses FP8 weights, as the later microbatches of
an accumulation do. All run in one process, in turn: 12 steps back to back, the median of two
rounds; `sustained_ms` is the mean of about a second. Where a contender fails, a row's "errors" name
it.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import layer_memory
import model_layer
from common import OnResult, Record, environment, ignore, main, parser, row
from contender import Contender, Inputs, Shape, block
from fp8moe_cutlass.nn import MoEExperts
from kernel_trace import profile, roles
from layer_baselines import TORCH, Factory, peers
from timing import CudaTimer, Limits, Run, Runs, burst, capture, warm_up
from torch_experts import TorchExperts

SHAPES: dict[str, dict[str, Shape]] = {
    "cuda": {
        "DeepSeek-V3, 32 experts": block(4096, 32, 8, 7168, 2048),
        "DeepSeek-V3, 8 experts": block(4096, 8, 8, 7168, 2048),
        "Qwen3-235B, 16 experts": block(4096, 16, 8, 4096, 1536),
        "DeepSeek-V2-Lite, 64 experts": block(4096, 64, 6, 2048, 1408),
        "Qwen3-30B, 128 experts": block(4096, 128, 8, 2048, 768),
    },
    "cpu": {"small": block(512, 4, 2, 512, 256)},
    "quick": {"tiny": block(64, 4, 2, 256, 128)},
}
OURS = "fp8moe"
# The variants of a record's rows; the second has the FP8 weights from before.
QUANTIZING = "forward+backward, quantizing weights"
REUSING = "forward+backward"
FEW_TOKENS = (1, 16, 64, 512)
STACK = f"{QUANTIZING}, four layers"  # what they hold between steps, and their peak
# What saves memory: the variant, preactivation, what is kept of z.
MEMORY = (
    (f"{REUSING}, FP8 pre-activation", "save_fp8", "fp8"),
    (f"{REUSING}, recompute", "recompute", "none"),
)


def limit(shape: Shape, limits: Limits, parts: int, experts_used: int) -> Record:
    """flops (parts 1: forward, 3: forward and backward), the least bytes, and the time that the
    larger of both takes at the limits of this run."""
    t, s, h, i = (shape[name] for name in "TSHI")
    flops = parts * 6 * t * s * h * i
    # Weights: read in FP8 by forward and by dgrad; gradients written in bf16.
    weights = 3 * experts_used * h * i * (1 if parts == 1 else 4)
    moved = weights + parts * 2 * 2 * t * h
    ms = max(flops / limits.tensor_tflops / 1e9, moved / limits.copy_tb_s / 1e9)
    return {"bytes": moved, "flops": flops, "limit_ms": ms}


class LayerBench:
    """All rows of one shape. No contender that fails ends the run."""

    def __init__(self, model: str, shape: Shape, device: torch.device, limits: Limits) -> None:
        self.model, self.shape, self.device, self.limits = model, shape, device, limits
        self.errors: dict[str, str] = {}
        self.layer = MoEExperts(shape["E"], shape["H"], shape["I"], device=device)
        self.inputs = Inputs.random(shape, device)
        self.modules: dict[str, nn.Module] = {OURS: self.layer}
        for name, factory in peers(device).items():
            self.add(name, factory)

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """What `action` returns; None where it fails, with its error noted."""
        try:
            return action()
        except Exception as error:
            self.errors[name] = f"{type(error).__name__}: {error}"[:300]
            return None

    def add(self, name: str, factory: Factory) -> None:
        def build() -> None:
            module = factory(self.layer)
            Contender(module, self.inputs).step()
            self.modules[name] = module

        self.attempt(name, build)

    def steps(self, variant: str, *names: str, reuse: bool) -> Record:
        """The row of whole steps of the contenders `names` (default: all)."""
        chosen = {n: m for n, m in self.modules.items() if n in (names or self.modules)}
        runs: Runs = {n: Contender(m, self.inputs, reuse).step for n, m in chosen.items()}
        return self.row(variant, runs, sustained=True)

    def row(self, variant: str, runs: Runs, parts: int = 3, **how: Any) -> Record:
        """One row, as of `timed`; one with an error where a run fails."""
        found: Record | None = self.attempt(
            variant, lambda: self.timed(variant, runs, parts, **how)
        )
        if found is None:
            place = {"op": "layer", "shape": self.shape, "model": self.model, "variant": variant}
            found = place | {"ms": None, "peers": {}, "error": self.errors.pop(variant)}
        return found | ({"errors": dict(self.errors)} if self.errors else {})

    def timed(
        self,
        variant: str,
        runs: Runs,
        parts: int,
        *,
        sustained: bool = False,
        tokens: int | None = None,
        experts_used: int | None = None,
    ) -> Record:
        """One row: the time of runs[OURS], and beside it the others'. parts: see `limit`."""
        shape = {**self.shape, "T": tokens or self.shape["T"]}
        samples = burst(runs, self.device)
        ours = samples.pop(OURS)
        lasting: Record = {}
        if sustained and self.device.type == "cuda":
            long = {name: CudaTimer().sustained(run) for name, run in runs.items()}
            lasting = {"sustained_ms": long.pop(OURS), "sustained_peers": long}
        return row(
            "layer",
            shape,
            variant,
            ours,
            peers={name: sample.ms for name, sample in samples.items()},
            model=self.model,
            **limit(shape, self.limits, parts, experts_used or shape["E"]),
            **lasting,
        )

    def rows(self, steps: bool = False) -> Iterator[Record]:
        yield self.steps(QUANTIZING, OURS, TORCH, reuse=False)
        yield self.reused_step()
        yield from self.other_memory()
        if self.device.type == "cuda":
            yield self.stack()
        if not steps:
            yield from self.other_rows()

    def other_rows(self) -> Iterator[Record]:
        everyone = {n: Contender(m, self.inputs) for n, m in self.modules.items()}
        yield self.row("forward", {n: c.forward for n, c in everyone.items()}, 1)
        if self.device.type == "cuda":
            yield from self.graphs()
        for kind in ("zipf", "one-hot"):
            pair = self.pair(Inputs.random(self.shape, self.device, kind))
            used = int(torch.unique(pair[OURS].inputs.topk_idx).numel())
            steps: Runs = {n: c.step for n, c in pair.items()}
            yield self.row(f"{REUSING}, {kind} routing", steps, experts_used=used)
        yield from self.few_tokens()
        yield self.main_grad()

    def pair(self, inputs: Inputs | None = None) -> dict[str, Contender]:
        """Ours and torch at its best."""
        chosen = {n: m for n, m in self.modules.items() if n in (OURS, TORCH)}
        return {n: Contender(m, inputs or self.inputs) for n, m in chosen.items()}

    def reused_step(self) -> Record:
        row = self.steps(REUSING, reuse=True)
        contenders = {n: Contender(m, self.inputs) for n, m in self.modules.items()}
        ours = contenders[OURS]
        row["kernels"] = self.attempt("kernels", lambda: roles(profile(ours.step, self.device)))
        row["memory"] = {n: self.memory(c) for n, c in contenders.items()}
        return row

    def memory(self, contender: Contender, keep: str = "bf16") -> Record:
        """Bytes, by arithmetic (this library and torch) and by the CUDA allocator."""
        t, s, e, h, i = (self.shape[name] for name in "TSEHI")
        found: Record = {}
        if isinstance(contender.module, MoEExperts):
            found["saved_arithmetic"] = layer_memory.saved_bytes(t, s, e, h, i, keep=keep)
        elif type(contender.module) is TorchExperts:
            found["saved_arithmetic"] = layer_memory.bf16_saved_bytes(t, s, h, i)
        if self.device.type == "cuda":
            contender.step()
            measured = lambda: layer_memory.measure(  # noqa: E731
                contender.forward, contender.backward, contender.clear
            )
            found |= self.attempt("memory", measured) or {}
        return found

    def graphs(self) -> Iterator[Record]:
        pair = self.pair()
        for variant, parts in (("forward", 1), (REUSING, 3)):
            runs: Runs = {n: c.forward if parts == 1 else c.step for n, c in pair.items()}
            yield from self.replays(f"{variant}, graph replay", pair, runs, parts)

    def replays(
        self, variant: str, pair: dict[str, Contender], runs: Runs, parts: int, **more: Any
    ) -> Iterator[Record]:
        """The row of `runs` as CUDA graphs, of those that can be captured."""
        found: Runs = {}
        for name, c in pair.items():
            replay = self.attempt(f"{name}, graph", partial(graph, c, runs[name]))
            if replay is not None:
                found[name] = replay
        if OURS in found:
            yield self.row(variant, found, parts, sustained=parts == 3, **more)
        for c in pair.values():
            c.clear()

    def other_memory(self) -> Iterator[Record]:
        e, h, i = (self.shape[name] for name in "EHI")
        for variant, preactivation, keep in MEMORY:
            layer = MoEExperts(e, h, i, preactivation=preactivation, device="meta")
            layer.gate_up_proj, layer.down_proj = self.layer.gate_up_proj, self.layer.down_proj
            ours = Contender(layer, self.inputs)
            row = self.row(variant, {OURS: ours.step})
            row["memory"] = {OURS: self.memory(ours, keep)}
            if keep == "fp8":  # with recompute the GEMMs are others, in another order
                row["kernels"] = self.attempt(
                    "kernels",
                    lambda: roles(profile(ours.step, self.device)),  # noqa: B023
                )
            yield row

    def stack(self) -> Record:
        """The memory of four layers by the ways to hold transposed codes, and in bf16."""
        place = {"op": "layer", "shape": self.shape, "model": self.model, "variant": STACK}
        held = self.attempt(STACK, lambda: layer_memory.stack(self.shape))
        return place | {"memory": held or {}}

    def few_tokens(self) -> Iterator[Record]:
        # The largest first: torch.compile then has its general kernel when the small ones come.
        for tokens in sorted((t for t in FEW_TOKENS if t <= self.shape["T"]), reverse=True):
            pair = self.pair(Inputs.random({**self.shape, "T": tokens}, self.device))
            used = int(torch.unique(pair[OURS].inputs.topk_idx).numel())
            sizes: Any = {"tokens": tokens, "experts_used": used}
            runs: Runs = {n: no_grad(c) for n, c in pair.items()}
            yield self.row("forward, no_grad", runs, 1, **sizes)
            if self.device.type == "cuda":
                yield from self.replays("forward, no_grad, graph replay", pair, runs, 1, **sizes)

    def main_grad(self) -> Record:
        """Last: the parameters keep their main_grad."""
        for weight in self.layer.parameters():
            weight.main_grad = torch.zeros(weight.shape, device=self.device)  # type: ignore[attr-defined]
        runs: Runs = {n: into_main_grad(c) for n, c in self.pair().items()}
        return self.row(f"{REUSING}, fp32 main_grad", runs)


def no_grad(c: Contender) -> Run:
    def run() -> None:
        with torch.no_grad():
            c.forward()

    return run


def into_main_grad(c: Contender) -> Run:
    """A step whose weight gradients are added to float32 main_grad: by the layer itself, or
    afterwards by torch."""

    def run() -> None:
        c.step()
        for weight in c.module.parameters():
            if weight.grad is not None:
                weight.main_grad.add_(weight.grad)  # type: ignore[attr-defined]

    return run


def graph(c: Contender, run: Run, **how: Any) -> Run:
    """A replay of `run`, captured without gradients from before. how: of timing.capture."""
    c.clear()
    warm_up(run)
    c.clear()
    return capture(run, **how)


def run_layer(
    device: torch.device,
    quick: bool = False,
    on_result: OnResult = ignore,
    *,
    steps: bool = False,
    models: list[str] | None = None,
) -> Record:
    """The record of `models` (default: all). quick: one tiny shape."""
    torch.manual_seed(0)
    limits = Limits(device)
    results: list[Record] = []
    for model, shape in SHAPES["quick" if quick else device.type].items():
        if models and model not in models:
            continue
        torch._dynamo.reset()
        for found in LayerBench(model, shape, device, limits).rows(steps):
            results.append(found)
            on_result(found)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"environment": environment(limits), "results": results}


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    return run_layer(device, given.quick, on_result, steps=given.steps, models=given.model)


if __name__ == "__main__":
    made = model_layer.with_arguments(parser(__doc__, json_required=False))
    made.add_argument("--steps", action="store_true", help="with --json: what pages quote")
    made.add_argument("--model", action="append", choices=SHAPES["cuda"], help="may be repeated")
    given = made.parse_args()
    if sum(way is not None for way in (given.config, given.sizes, given.json)) != 1:
        made.error("give one of a config.json, --sizes and --json")
    if given.json is not None:
        main(made, run)
    else:
        model_layer.show(given)
