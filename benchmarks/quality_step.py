"""Times a training step of quality.py's models: FP8 beside bf16, eager and compiled.

    python benchmarks/quality_step.py --json quality-step.json

A step is forward, backward, clipping and AdamW on random tokens. The arms take turns. limit_ms is
what the arithmetic predicts: bf16's step less what the experts' multiplications save where both run
at the rates of a dense GEMM, measured here.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from common import OnResult, Record, environment, main, parser, row
from quality_model import MODELS, Config
from quality_text import VOCABULARY
from quality_train import Trainer
from timing import Limits, Run, burst

ARMS = ("bf16", "fp8")


class RandomText:
    """What a Trainer wants of a text, of random tokens."""

    def __init__(self, c: Config, device: torch.device) -> None:
        self.mix = {"vocabulary": VOCABULARY}
        self.windows = torch.randint(VOCABULARY, (c.batch, c.context + 1), device=device)

    def held_out(self) -> list[Tensor]:
        return [self.windows]


def experts_flops(c: Config) -> int:
    """Of the routed experts in a step: three projections, each multiplied three times."""
    return 2 * 3 * 3 * c.batch * c.context * c.top_k * c.hidden * c.intermediate * c.layers


def bf16_tflops(limits: Limits) -> float:
    """Dense 8192^3 in bf16; on a CPU the rate of float32."""
    if limits.device.type == "cpu":
        return limits.tensor_tflops
    n = 8192
    a, b = (torch.randn(n, n, device=limits.device, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * n**3 / limits.timer.measure(lambda: torch.mm(a, b.t()))[0].ms / 1e9


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    limits = Limits(device)
    limits.wake()
    about = environment(limits) | {"bf16_tflops": bf16_tflops(limits)}
    results = []
    for model in ("tiny",) if given.quick else ("fine", "coarse"):
        c = MODELS[model]
        text = RandomText(c, device)
        trainers = {arm: Trainer(arm, 0, c, text, 1, device, compiled=False) for arm in ARMS}
        runs = {arm: step_of(t, text.windows) for arm, t in trainers.items()}
        flops = experts_flops(c)
        saved_ms = flops / 1e9 * (1 / about["bf16_tflops"] - 1 / about["tensor_tflops"])
        for variant in ("eager", "compiled") if device.type == "cuda" else ("eager",):
            if variant == "compiled":
                for t in trainers.values():
                    t.compile()
            times = burst(runs, device)
            bf16 = times["bf16"].ms
            shape = {"T": c.batch * c.context, "E": c.experts, "k": c.top_k, "H": c.hidden}
            shape |= {"I": c.intermediate, "L": c.layers}
            more = {"peers": {"bf16": bf16}, "limit_ms": bf16 - saved_ms, "flops": flops}
            results.append(row("step", shape, variant, times["fp8"], model=model, **more))
            on_result(results[-1])
        del trainers, runs
    return {"environment": about, "results": results}


def step_of(t: Trainer, windows: Tensor) -> Run:
    return lambda: t.step(0, windows)


if __name__ == "__main__":
    main(parser(__doc__), run)
