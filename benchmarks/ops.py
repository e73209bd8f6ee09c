"""Every operator beside its limit, and beside the same work in torch.

The limit of an operator that memory bounds is a copy of the same bytes; of a GEMM, dense
arithmetic. Both are measured in the same run. On the CPU also what a call costs the host.
"""

from __future__ import annotations

import argparse

import torch

from cases import CASES, Work
from common import OnResult, Record, environment, ignore, main, parser, row
from host_overhead import host_overhead
from shapes import SHAPES, Shape
from timing import Limits
from torch_calls import TORCH


def run_ops(
    device: torch.device,
    only: list[str] | None = None,
    quick: bool = False,
    on_result: OnResult = ignore,
) -> Record:
    """The record of the operators `only` (default: all). quick: one tiny shape per operator."""
    torch.manual_seed(0)
    limits = Limits(device)
    limits.wake()
    results: list[Record] = []
    for op in only or CASES:
        kind, case = CASES[op]
        for shape in SHAPES["quick" if quick else device.type][kind]:
            for work in case(shape, device):
                results.append(measure(op, shape, work, limits))
                on_result(results[-1])
    return {"environment": environment(limits), "results": results}


def measure(op: str, shape: Shape, work: Work, limits: Limits) -> Record:
    """One row; the operator, torch and, where it is a call, its limit take turns."""
    found = {name: factory(work.inputs) for name, factory in TORCH.get(op, {}).items()}
    calls = {name: call for name, call in found.items() if call is not None}
    limit = None
    if work.mnk is None:
        limit = limits.copy(work.bytes)
    elif limits.device.type == "cpu":
        limit = limits.matmul(*work.mnk)
    ours, *others = limits.timer.measure(work.run, *calls.values(), *([limit] if limit else []))
    limit_ms = others[-1].ms if limit else work.flops / limits.tensor_tflops / 1e9
    sustained = limits.timer.sustained(work.run) if work.flops else None
    return row(
        op,
        shape,
        work.variant,
        ours,
        bytes=work.bytes,
        flops=work.flops,
        limit_ms=limit_ms,
        peers={name: other.ms for name, other in zip(calls, others, strict=False)},
        **({} if sustained is None else {"sustained_ms": sustained}),
    )


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    record = run_ops(device, given.op, given.quick, on_result)
    if device.type == "cpu" and not given.op:
        record["results"] += host_overhead()
    return record


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--op", action="append", choices=CASES, help="may be repeated")
    main(arguments, run)
