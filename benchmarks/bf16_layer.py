"""MoEExperts(recipe=None) beside torch's bf16 at its best: forward and backward, in bursts.

python benchmarks/bf16_layer.py --json FILE
"""

from __future__ import annotations

import argparse
import gc
import warnings

import torch

from common import OnResult, Record, environment, main, parser, row
from contender import Contender, Inputs
from fp8moe_cutlass.nn import MoEExperts
from layer import OURS, REUSING, SHAPES
from layer_baselines import TORCH
from timing import Limits, Runs, burst
from torch_experts import TorchExperts


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    # A side that runs eagerly would be another one.
    warnings.filterwarnings("error", message=r"\[MoEExperts\] torch cannot compile")
    torch.manual_seed(0)
    limits = Limits(device)
    limits.wake()
    record: Record = {"environment": environment(limits), "results": []}
    for model, shape in SHAPES["quick" if given.quick else "cuda"].items():
        layer = MoEExperts(shape["E"], shape["H"], shape["I"], recipe=None, device=device)
        for tokens in (shape["T"], 4 * shape["T"]):
            shape = {**shape, "T": tokens}
            inputs = Inputs.random(shape, device)
            modules = {OURS: layer, TORCH: TorchExperts(layer)}
            runs: Runs = {name: Contender(module, inputs).step for name, module in modules.items()}
            samples = burst(runs, device, rounds=4)
            peers = {TORCH: samples[TORCH].ms}
            found = row("layer", shape, REUSING, samples[OURS], peers=peers, limit_ms=None)
            record["results"].append(found | {"model": model})
            on_result(record["results"][-1])
        del layer, modules, runs
        gc.collect()
    return record


if __name__ == "__main__":
    main(parser(__doc__), run)
