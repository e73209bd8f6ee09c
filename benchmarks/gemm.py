"""The full record of the grouped GEMMs, beside DeepGEMM, torch and cuBLAS on the same operands.

More cases than `bench gemm`: balanced and ragged, every output dtype, both kinds of wgrad operands,
one expert, 256 experts. Prints how ours stands to each baseline: the geometric mean of the cases.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch

from common import main, parser
from fp8moe_cutlass.bench.gemm import MODELS, PASSES, Case, run_gemm
from fp8moe_cutlass.bench.record import OnResult, Record
from gemm_baselines import PEERS


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


def summary(record: Record) -> Iterator[str]:
    """Ours over each baseline, by gemm: the geometric mean, burst and sustained."""
    for gemm in PASSES:
        rows = [row for row in record["results"] if row["op"] == gemm]
        for kind, ms, peers in (
            ("burst", "ms", "peers"),
            ("sustained", "sustained_ms", "peers_sustained"),
        ):
            for name in dict.fromkeys(name for row in rows for name in row.get(peers, {})):
                both = [row for row in rows if name in row.get(peers, {})]
                logs = [math.log(row[peers][name] / row[ms]) for row in both]
                mean = math.exp(sum(logs) / len(logs))
                yield f"{gemm}, {kind}: {mean:.3f} of {name} over {len(logs)} cases"


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    chosen = [case for case in all_cases() if case.gemm in (given.only or PASSES)]
    record = run_gemm(device, given.quick, given.budget, on_result, PEERS, chosen)
    for line in [*summary(record), *(f"left out: {case}" for case in record["left_out"])]:
        print(line)
    return record


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--budget", type=float, default=480.0, help="seconds")
    arguments.add_argument("--only", action="append", choices=PASSES)
    main(arguments, run)
