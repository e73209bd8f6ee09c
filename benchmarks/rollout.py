"""The layer by the forward of inference engines, and by each of its options, beside the default.

    python benchmarks/rollout.py --json rollout.json

Forward, and forward with backward, captured in CUDA graphs, with FP8 weights made before. All take
turns in one process on the same tensors. "default, again" is a second graph of the default: how far
two graphs of the same work differ.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from common import OnResult, Record, environment, main, parser, row
from contender import Inputs, Shape, block
from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import MoEExperts
from timing import Limits, Run, burst, captured

MODELS = {
    "Qwen3-30B, 128 experts": block(4096, 128, 8, 2048, 768),
    "DeepSeek-V3, 32 experts": block(4096, 32, 8, 7168, 2048),
}
QUICK = {"tiny": block(64, 4, 2, 256, 128)}
RECIPES = {
    "default": Fp8Recipe(),
    "default, again": Fp8Recipe(),
    'weighting="output"': Fp8Recipe(weighting="output"),
    'rollout("vllm")': Fp8Recipe.rollout("vllm"),
    'columns="column"': Fp8Recipe(columns="column"),
    'scale="fp32", columns="column"': Fp8Recipe(scale="fp32", columns="column"),
    'rollout("sglang")': Fp8Recipe.rollout("sglang"),
}
PASSES = ("forward", "forward+backward")


def steps_of(shape: Shape, device: torch.device) -> dict[str, dict[str, Run]]:
    """For each pass a step of each recipe. The layers have the same weights."""
    inputs = Inputs.random(shape, device)
    sizes = shape["E"], shape["H"], shape["I"]
    first = MoEExperts(*sizes, device=device)
    steps: dict[str, dict[str, Run]] = {which: {} for which in PASSES}
    for name, recipe in RECIPES.items():
        layer = MoEExperts(*sizes, recipe=recipe, device="meta")
        layer.gate_up_proj, layer.down_proj = first.gate_up_proj, first.down_proj
        both = two(layer, inputs)
        for which, step in zip(PASSES, both, strict=True):
            steps[which][name] = step
    return steps


def two(layer: MoEExperts, inputs: Inputs) -> tuple[Run, Run]:
    """The layer's forward, and forward and backward."""
    weights = layer.quantize_weights()
    given: Any = (inputs.x, inputs.topk_idx, inputs.probs)
    wanted = [inputs.x, inputs.probs, *layer.parameters()]

    def forward() -> None:
        with torch.no_grad():
            layer(*given, weights=weights)

    def both() -> None:
        torch.autograd.grad(layer(*given, weights=weights), wanted, inputs.dout)

    return forward, both


def graphs(steps: dict[str, Run]) -> dict[str, Run]:
    """Each step captured. What it held while it ran eagerly is given back: seven do not fit."""
    made = {}
    for name, step in steps.items():
        made[name] = captured(step)
        torch.cuda.empty_cache()
    return made


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    limits = Limits(device)
    limits.wake()
    record: Record = {"environment": environment(limits), "results": []}
    for model, shape in (QUICK if given.quick else MODELS).items():
        for which, steps in steps_of(shape, device).items():
            if device.type == "cuda":
                steps = graphs(steps)
            samples = burst(steps, device, count=4, rounds=14)
            for name, sample in samples.items():
                peers = {} if name == "default" else {"default": samples["default"].ms}
                result = row(name, shape, which, sample, peers=peers, limit_ms=None, model=model)
                record["results"].append(result)
                on_result(result)
            del steps
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return record


if __name__ == "__main__":
    main(parser(__doc__), run)
