"""The record of `bench ops`, with the same work in torch beside it.

On the CPU also what a call costs the host.
"""

from __future__ import annotations

import argparse

import torch

from common import main, parser
from fp8moe_cutlass.bench.ops import run_ops
from fp8moe_cutlass.bench.record import OnResult, Record
from host_overhead import host_overhead
from torch_calls import TORCH


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    record = run_ops(device, given.op, given.quick, on_result, TORCH)
    if device.type == "cpu" and not given.op:
        record["results"] += host_overhead()
    return record


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--op", action="append", help="only this operator; may be repeated")
    main(arguments, run)
