"""The expert block of models with other activations, and with biases, beside torch's bf16.

Forward and backward, weights quantized in each step, then reused. The baselines share the layer's
parameters: "torch bf16" is the layer with recipe=None, whose activation and biases torch.compile
fuses, and "torch bf16, autograd" is torch_experts.py.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from common import OnResult, Record, environment, main, parser, row, write
from contender import Contender, Inputs, block
from fp8moe_cutlass import Activation
from fp8moe_cutlass.nn import MoEExperts
from timing import Limits, burst
from torch_experts import TorchExperts

GPT_OSS = Activation(alpha=1.702, offset=1.0, limit=7.0, interleaved=True)
MODELS: dict[str, tuple[int, int, int, int, Activation, bool]] = {  # E, S, H, I, biases
    "GPT-OSS-20B": (32, 4, 2880, 2880, GPT_OSS, True),
    "Nemotron Nano": (128, 6, 2688, 1856, Activation("relu2"), False),
    "Gemma 4 26B": (128, 8, 2816, 704, Activation("gelu_tanh"), False),
    "DeepSeek-V4, 32 of 256 experts": (32, 6, 4096, 2048, Activation(limit=10.0), False),
    "GPT-OSS-20B, no biases": (32, 4, 2880, 2880, GPT_OSS, False),
}
REUSED, BF16, AUTOGRAD = ", weights reused", "torch bf16", "torch bf16, autograd"


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    record: Record = {"environment": environment(Limits(device)), "results": []}
    for name, (experts, slots, hidden, inner, activation, bias) in MODELS.items():
        sizes = (64, 4, 2, 128, 80) if given.quick else (4096, experts, slots, hidden, inner)
        shape = block(*sizes)
        e, h, i = shape["E"], shape["H"], shape["I"]
        how: Any = {"activation": activation, "bias": bias, "device": device}
        torch.manual_seed(0)
        layer, plain = MoEExperts(e, h, i, **how), MoEExperts(e, h, i, recipe=None, **how)
        for key, parameter in layer.named_parameters():
            setattr(plain, key, parameter)
        inputs = Inputs.random(shape, device)
        ways: Any = {name: layer, name + REUSED: layer, BF16: plain}
        ways[AUTOGRAD] = TorchExperts(layer)
        steps: Any = {
            way: Contender(m, inputs, reuse=way.endswith(REUSED)).step for way, m in ways.items()
        }
        found = burst(steps, device)
        peers = {way: found[way].ms for way in (BF16, AUTOGRAD)}
        for way in (name, name + REUSED):
            result = row("block", shape, way, found[way], peers=peers, limit_ms=None)
            record["results"].append(result)
            on_result(result)
        write(record, given.json)
        del layer, plain, ways, steps, inputs
    return record


if __name__ == "__main__":
    main(parser(__doc__), run)
