"""The grouped GEMMs, beside DeepGEMM, torch and cuBLAS on the same operands.

Balanced and ragged, every output dtype, both kinds of wgrad operands, one expert, 256 experts.
Burst: 21 rounds with a cold L2. Sustained: a second of calls back to back. Prints how ours
stands to each baseline: the geometric mean of the cases.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import geometric_mean

import torch

from cases import size_of
from common import OnResult, Record, environment, main, parser, row
from gemm_baselines import PEERS
from gemm_cases import MODELS, PASSES, Case, call_of, operands
from timing import CudaTimer, Limits, Run

ROUNDS = 21
QUICK = [
    Case("fprop", "quick", 300, 256, 256, 3, "ragged"),
    Case("dgrad", "quick", 256, 128, 384, 2),
    Case("wgrad", "quick", 256, 256, 128, 2, dtype="float32", accumulate=True),
    Case("wgrad", "quick", 300, 128, 256, 3, "ragged", columns="column"),
]


def model_cases(gemm: str) -> Iterator[Case]:
    for model, (m, h, i, e) in MODELS.items():
        if gemm == "wgrad":
            for first, (n, k) in ((True, (2 * i, h)), (False, (h, i))):
                yield Case(gemm, model, m, n, k, e, dtype="float32", sustained=first)
                yield Case(gemm, model, m, n, k, e, dtype="float32", accumulate=True)
                if first:
                    yield Case(gemm, model, m, n, k, e)
                    yield Case(gemm, model, m, n, k, e, dtype="float32", columns="column")
                    yield Case(gemm, model, m, n, k, e, "ragged", dtype="float32")
            continue
        layers = ((2 * i, h), (h, i)) if gemm == "fprop" else ((i, h), (h, 2 * i))
        for index, (n, k) in enumerate(layers):
            yield Case(gemm, model, m, n, k, e, sustained=True)
            yield Case(gemm, model, m, n, k, e, "ragged")
            if gemm == "fprop" and index == 0:
                yield Case(gemm, model, m, n, k, e, dtype="float32")


def all_cases() -> list[Case]:
    """The most telling first: a budget cuts the rest."""
    dense = [
        Case("fprop", "one expert", m, n, k, 1, sustained=True)
        for m, n, k in ((4096, 4096, 7168), (4096, 7168, 2048), (32768, 4096, 7168))
    ]
    many = [
        Case("fprop", "256 experts", 256 * 128, 4096, 7168, 256, routing)
        for routing in ("balanced", "ragged")
    ]
    return [*model_cases("fprop"), *model_cases("wgrad"), *dense, *many, *model_cases("dgrad")]


def measure(case: Case, limits: Limits, burst: bool = False) -> Record:
    """One row. burst: without the seconds of calls back to back. A baseline that fails on this case
    is named, with its error."""
    o = operands(case, limits.device)
    run, out = call_of(o)
    calls: dict[str, Run] = {"ours": run}
    failed: dict[str, str] = {}
    for name, factory in PEERS.items():
        try:
            peer = factory(o)
            if peer is not None:
                peer()
                calls[name] = peer
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    moved = size_of(o.x_q, o.other_q, out) + (size_of(out) if case.accumulate else 0)
    copied = case.e == 256  # bound by its weights
    samples = limits.timer.measure(*calls.values(), *([limits.copy(moved)] if copied else []))
    flops = 2 * case.m * case.n * case.k
    more: Record = {"peers_failed": failed} if failed else {}
    if case.sustained and not burst and limits.device.type == "cuda":
        long = {name: limits.timer.sustained(call) for name, call in calls.items()}
        more |= {"sustained_ms": long.pop("ours"), "peers_sustained": long}
    return row(
        case.gemm,
        case.shape,
        case.variant,
        samples[0],
        bytes=moved,
        flops=flops,
        limit_ms=samples[-1].ms if copied else flops / limits.tensor_tflops / 1e9,
        peers={name: s.ms for name, s in zip(calls, samples, strict=False) if name != "ours"},
        **more,
    )


def summary(record: Record) -> Iterator[str]:
    """Ours over each baseline, by gemm: the geometric mean, burst and sustained."""
    for gemm in PASSES:
        rows = [r for r in record["results"] if r["op"] == gemm]
        for kind, ms, peers in (
            ("burst", "ms", "peers"),
            ("sustained", "sustained_ms", "peers_sustained"),
        ):
            for name in dict.fromkeys(name for r in rows for name in r.get(peers, {})):
                both = [r for r in rows if name in r.get(peers, {})]
                mean = geometric_mean(r[peers][name] / r[ms] for r in both)
                yield f"{gemm}, {kind}: {mean:.3f} of {name} over {len(both)} cases"


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    """The record of as many cases as begin within the budget; "left_out" names the others. quick,
    and the CPU: tiny sizes."""
    torch.manual_seed(given.seed)
    limits = Limits(device)
    if isinstance(limits.timer, CudaTimer):
        limits.timer.repeats = ROUNDS
    limits.wake()
    end = time.monotonic() + given.budget
    results: list[Record] = []
    left_out = []
    for case in QUICK if given.quick or device.type == "cpu" else all_cases():
        if case.gemm not in (given.only or PASSES):
            continue
        if time.monotonic() > end:
            left_out.append(f"{case.gemm} {case.variant}")
            continue
        results.append(measure(case, limits, given.burst))
        on_result(results[-1])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    record = {"environment": environment(limits), "results": results, "left_out": left_out}
    for line in [*summary(record), *(f"left out: {case}" for case in left_out)]:
        print(line)
    return record


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--budget", type=float, default=480.0, help="seconds")
    arguments.add_argument("--only", action="append", choices=PASSES)
    arguments.add_argument("--seed", type=int, default=0, help="of operands and ragged sizes")
    arguments.add_argument("--burst", action="store_true", help="no seconds of calls back to back")
    main(arguments, run)
