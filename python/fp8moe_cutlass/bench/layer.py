"""`bench layer`: a training step of the expert layer, beside torch in bf16.

A step is forward and backward. The first figure quantizes the weights in every forward, as training
does that does not accumulate gradients. The second reuses FP8 weights, as the later microbatches of
an accumulation do. All run in one process, in turn: 12 steps back to back, the median of two
rounds; `sustained_ms` is the mean of about a second.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fp8moe_cutlass.nn import MoEExperts

from .contender import Contender, Inputs, Shape, block
from .record import OnResult, Record, environment, ignore, row
from .timing import CudaTimer, Limits, Runs, burst
from .torch_experts import TorchExperts

Factory = Callable[[MoEExperts, int], nn.Module]  # of the layer and the number of slots

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
OURS, TORCH = "fp8moe", "torch bf16"
# The variants of a record's rows; the second has the FP8 weights from before.
QUANTIZING = "forward+backward, quantizing weights"
REUSING = "forward+backward"


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
    """The rows of one shape."""

    peers: Mapping[str, Factory] = {TORCH: TorchExperts}

    def __init__(self, model: str, shape: Shape, device: torch.device, limits: Limits) -> None:
        self.model, self.shape, self.device, self.limits = model, shape, device, limits
        self.layer = MoEExperts(shape["E"], shape["H"], shape["I"], device=device)
        self.inputs = Inputs.random(shape, device)
        self.modules: dict[str, nn.Module] = {OURS: self.layer}
        for name, factory in self.peers.items():
            self.add(name, factory)

    def add(self, name: str, factory: Factory) -> None:
        self.modules[name] = factory(self.layer, self.shape["S"])

    def rows(self) -> Iterator[Record]:
        yield self.steps(QUANTIZING, reuse=False)
        yield self.steps(REUSING, reuse=True)

    def steps(self, variant: str, *names: str, reuse: bool, **more: Any) -> Record:
        """The row of whole steps of the contenders `names` (default: all)."""
        chosen = {n: m for n, m in self.modules.items() if n in (names or self.modules)}
        runs: Runs = {n: Contender(m, self.inputs, reuse).step for n, m in chosen.items()}
        return self.row(variant, runs, sustained=True, **more)

    def row(
        self,
        variant: str,
        runs: Runs,
        parts: int = 3,
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
            peers = {name: CudaTimer().sustained(run) for name, run in runs.items()}
            lasting = {"sustained_ms": peers.pop(OURS), "sustained_peers": peers}
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


def run_layer(
    device: torch.device,
    quick: bool = False,
    on_result: OnResult = ignore,
    bench: type[LayerBench] = LayerBench,
) -> Record:
    """The record of every shape. quick: one tiny shape."""
    torch.manual_seed(0)
    limits = Limits(device)
    results: list[Record] = []
    for model, shape in SHAPES["quick" if quick else device.type].items():
        torch._dynamo.reset()
        try:
            for found in bench(model, shape, device, limits).rows():
                results.append(found)
                on_result(found)
        except RuntimeError as error:  # out of memory, a failed kernel: the other shapes still run
            failed = {"op": "layer", "shape": shape, "model": model, "variant": "a step"}
            results.append(failed | {"ms": None, "error": str(error)})
            on_result(results[-1])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"environment": environment(limits), "results": results}
