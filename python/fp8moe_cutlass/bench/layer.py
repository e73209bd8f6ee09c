"""The whole expert block: forward and backward, beside bf16 torch and whoever is installed.

Every row is measured in one process, contenders in turn: 12 runs back to back each, after warm-up,
the median of two such rounds; `sustained_ms` is the mean of about a second. Gradients are set to
None before each run and the FP8 weights are there already, unless the variant says otherwise.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fp8moe_cutlass.nn import MoEExperts

from . import memory
from .kernels import profile, roles
from .layer_peers import TorchExperts, peers
from .layer_runs import Burst, Contender, Inputs, Runs, Shape
from .timing import Limits

Record = dict[str, Any]


def block(tokens: int, experts: int, slots: int, hidden: int, intermediate: int) -> Shape:
    return {"T": tokens, "E": experts, "S": slots, "H": hidden, "I": intermediate}


SHAPES: dict[str, dict[str, Shape]] = {
    "cuda": {
        "DeepSeek-V3, 32 experts": block(4096, 32, 8, 7168, 2048),
        "DeepSeek-V3, 8 experts": block(4096, 8, 8, 7168, 2048),
        "Qwen3-235B, 16 experts": block(4096, 16, 8, 4096, 1536),
        "DeepSeek-V2-Lite, 64 experts": block(4096, 64, 6, 2048, 1408),
        "Qwen3-30B, 128 experts": block(4096, 128, 8, 2048, 768),
    },
    "cpu": {"small": block(512, 4, 2, 512, 256)},
}
QUICK = {"tiny": block(64, 4, 2, 256, 128)}
FEW_TOKENS = (1, 16, 64, 512)
HEADLINE = "forward+backward"
WITH_WEIGHTS = f"{HEADLINE}, quantizing weights"
REMADE = f"{HEADLINE}, transposed weights remade"
# What saves memory: variant, recompute, save_preactivation, what is kept of z.
VARIANTS_OF_MEMORY = (
    (f"{HEADLINE}, FP8 pre-activation", "none", "fp8", "fp8"),
    (f"{HEADLINE}, recompute", "expert", "bf16", "none"),
)


def limit(shape: Shape, limits: Limits, parts: int, experts_used: int) -> Record:
    """flops (parts 1: forward, 3: forward and backward), the least bytes, and the time either
    takes at the limits measured in this run."""
    t, s, h, i = (shape[name] for name in "TSHI")
    flops = parts * 6 * t * s * h * i
    # Weights: read in FP8 forward and for dgrad; gradients are written in bf16.
    weights = 3 * experts_used * h * i * (1 if parts == 1 else 4)
    moved = weights + parts * 2 * 2 * t * h
    ms = max(flops / limits.tensor_tflops / 1e9, moved / limits.copy_tb_s / 1e9)
    return {"bytes": moved, "flops": flops, "limit_ms": ms}


class Layer:
    """All rows of one shape; a contender that fails is a row's "errors", never left out."""

    def __init__(self, name: str, shape: Shape, device: torch.device, limits: Limits) -> None:
        self.name, self.shape, self.device, self.limits = name, shape, device, limits
        self.burst = Burst(device)
        e, h, i = shape["E"], shape["H"], shape["I"]
        self.sizes = e, h, i
        self.layer = MoEExperts(e, h, i, device=device)
        self.inputs = Inputs.random(shape, device)
        self.errors: dict[str, str] = {}
        self.modules: dict[str, nn.Module] = {"fp8moe": self.layer}
        for peer, factory in peers(device).items():
            self.attempt(peer, lambda p=peer, f=factory: self.add(p, f))  # type: ignore[misc]

    def add(self, name: str, factory: Callable[[MoEExperts, int], nn.Module]) -> None:
        module = factory(self.layer, self.shape["S"])
        Contender(module, self.inputs).step()
        self.modules[name] = module

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """What `action` returns, or None with its error noted: one peer must not end the run."""
        try:
            return action()
        except Exception as error:
            self.errors[name] = f"{type(error).__name__}: {error}"[:300]
            return None

    def contenders(self, *names: str, inputs: Inputs | None = None) -> dict[str, Contender]:
        """Those of `names` (all, if none are given) that can run."""
        chosen = names or tuple(self.modules)
        return {
            n: Contender(self.modules[n], inputs or self.inputs)
            for n in chosen
            if n in self.modules
        }

    def row(
        self, variant: str, runs: Runs, parts: int, sustained: bool = False, **more: Any
    ) -> Record:
        tokens = more.pop("tokens", self.shape["T"])
        used = more.pop("experts_used", self.shape["E"])
        shape = {**self.shape, "T": tokens}
        row: Record = {"op": "layer", "shape": shape, "model": self.name, "variant": variant}
        row |= limit(shape, self.limits, parts, used)
        samples = self.attempt(variant, lambda: self.burst(runs))
        if samples is None:
            error = self.errors.pop(variant)
            return row | {"ms": None, "host_us": None, "peers": {}, "repeat": {}, "error": error}
        ours = samples.pop("fp8moe")
        row |= {"ms": ours.ms, "host_us": ours.host_us, "repeat": ours.repeat}
        row["peers"] = {name: sample.ms for name, sample in samples.items()}
        if sustained and (lasting := self.burst.sustained(runs)):
            row["sustained_ms"] = lasting.pop("fp8moe")
            row["sustained_peers"] = lasting
        if self.errors:
            row["errors"] = dict(self.errors)
        return row | more

    def rows(self) -> Iterator[Record]:
        """Everything, the headline first."""
        yield self.forward_and_backward()
        yield self.row("forward", {n: c.forward for n, c in self.contenders().items()}, 1)
        if self.device.type == "cuda":
            yield from self.graphs()
        yield self.row(
            WITH_WEIGHTS,
            {n: c.step_with_weights for n, c in self.contenders("fp8moe", "torch bf16").items()},
            3,
        )
        yield from self.other_routings()
        yield from self.other_memory()
        yield from self.few_tokens()
        yield self.main_grad()

    def forward_and_backward(self) -> Record:
        all_of_them = self.contenders()
        runs: Runs = {n: c.step for n, c in all_of_them.items()}
        ours = all_of_them["fp8moe"]
        ours.step()
        row = self.row("forward+backward", runs, 3, sustained=True)
        row["kernels"] = self.attempt("kernels", lambda: roles(profile(ours.step, self.device)))
        row["memory"] = {n: self.memory(c) for n, c in all_of_them.items()}
        row["weight_bytes"] = memory.weight_bytes(*self.sizes)
        return row

    def memory(self, contender: Contender, keep: str = "bf16") -> Record:
        """Bytes, by arithmetic (for this library and torch) and by the CUDA allocator."""
        t, s, e, h, i = (self.shape[name] for name in "TSEHI")
        found: Record = {}
        if isinstance(contender.module, MoEExperts):
            found["saved_arithmetic"] = memory.saved_bytes(t, s, e, h, i, keep=keep)
        elif type(contender.module) is TorchExperts:
            found["saved_arithmetic"] = memory.bf16_saved_bytes(t, s, h, i)
        if self.device.type == "cuda":
            contender.step()
            measured = lambda: memory.measure(  # noqa: E731
                contender.forward, contender.backward, contender.clear
            )
            found |= self.attempt("memory", measured) or {}
        return found

    def graphs(self) -> Iterator[Record]:
        pair = self.contenders("fp8moe", "torch bf16")
        for variant, parts in (("forward", 1), ("forward+backward", 3)):
            replays: Runs = {}
            for name, c in pair.items():
                run: Callable[[], object] = c.forward if parts == 1 else c.step
                replay = self.attempt(f"{name}, graph", lambda c=c, run=run: c.graph(run))  # type: ignore[misc]
                if replay is not None:
                    replays[name] = replay
            if "fp8moe" in replays:
                yield self.row(f"{variant}, graph replay", replays, parts, sustained=parts == 3)
            del replays
            for c in pair.values():
                c.clear()

    def other_routings(self) -> Iterator[Record]:
        for kind in ("zipf", "one-hot"):
            inputs = Inputs.random(self.shape, self.device, kind)
            pair = self.contenders("fp8moe", "torch bf16", inputs=inputs)
            used = int(torch.unique(inputs.topk_idx).numel())
            runs: Runs = {n: c.step for n, c in pair.items()}
            yield self.row(f"forward+backward, {kind} routing", runs, 3, experts_used=used)

    def other_memory(self) -> Iterator[Record]:
        """What saves memory, and what it costs."""
        for variant, recompute, z, keep in VARIANTS_OF_MEMORY:
            ours = self.with_options(recompute=recompute, save_preactivation=z)
            runs: Runs = {n: c.step for n, c in ours.items()}
            row = self.row(variant, runs, 3)
            row["memory"] = {"fp8moe": self.memory(ours["fp8moe"], keep)}
            if keep == "fp8":  # with recompute the GEMMs are others, in another order
                step = ours["fp8moe"].step
                row["kernels"] = self.attempt("kernels", lambda: roles(profile(step, self.device)))  # noqa: B023
            yield row
        ours = self.with_options(transposed_weights="recompute")
        yield self.row(REMADE, {n: c.step for n, c in ours.items()}, 3)

    def with_options(self, **options: Any) -> dict[str, Contender]:
        """The layer made with other options, over the same parameters."""
        layer = MoEExperts(*self.sizes, device="meta", **options)
        layer.gate_up_proj, layer.down_proj = self.layer.gate_up_proj, self.layer.down_proj
        return {"fp8moe": Contender(layer, self.inputs)}

    def few_tokens(self) -> Iterator[Record]:
        # The largest first: torch.compile then has its general kernel when the small ones come.
        for tokens in sorted((t for t in FEW_TOKENS if t <= self.shape["T"]), reverse=True):
            shape = {**self.shape, "T": tokens}
            pair = self.contenders("fp8moe", "torch bf16", inputs=Inputs.random(shape, self.device))
            used = int(torch.unique(pair["fp8moe"].inputs.topk_idx).numel())
            sizes: Record = {"tokens": tokens, "experts_used": used}
            runs: Runs = {n: c.infer for n, c in pair.items()}
            yield self.row("forward, no_grad", runs, 1, **sizes)
            if self.device.type == "cuda":
                replays: Runs = {}
                for name, c in pair.items():
                    replay = self.attempt(f"{name}, graph", lambda c=c: c.graph(c.infer))  # type: ignore[misc]
                    if replay is not None:
                        replays[name] = replay
                if "fp8moe" in replays:
                    yield self.row("forward, no_grad, graph replay", replays, 1, **sizes)

    def main_grad(self) -> Record:
        """Last: the parameters keep their main_grad."""
        pair = self.contenders("fp8moe", "torch bf16")
        for weight in self.layer.parameters():
            weight.main_grad = torch.zeros(weight.shape, device=self.device)  # type: ignore[attr-defined]
        runs: Runs = {n: c.step_into_main_grad for n, c in pair.items()}
        return self.row("forward+backward, fp32 main_grad", runs, 3)


def run_layer(
    device: torch.device,
    quick: bool = False,
    on_result: Callable[[Record], None] = lambda row: None,
) -> Record:
    """The record, as `bench` has it, of every shape. quick: one tiny shape."""
    from . import environment

    torch.manual_seed(0)
    limits = Limits(device)
    results: list[Record] = []
    for name, shape in (QUICK if quick else SHAPES[device.type]).items():
        torch._dynamo.reset()
        try:
            for row in Layer(name, shape, device, limits).rows():
                results.append(row)
                on_result(row)
        except RuntimeError as error:  # out of memory, a failed kernel: the other shapes still run
            row = {"op": "layer", "shape": shape, "model": name, "variant": "", "error": str(error)}
            results.append(row | {"ms": None, "host_us": None, "peers": {}, "repeat": {}})
            on_result(results[-1])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"environment": environment(limits), "results": results}
