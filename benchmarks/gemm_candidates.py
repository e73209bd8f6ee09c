"""Times every candidate of the grouped GEMMs' policy, case by case, in turn.

The cases of `--seed 0` are those of gemm.py and random ones; of another seed random ones alone: a
record to fit the policy's constants by, and one to check them by. Random cases have the sizes of
MODELS, 32 to 8,192 rows per expert, from 2 K-blocks on. Operands are random codes.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import gemm_cases
from common import OnResult, Record, environment, main, parser
from fp8moe_cutlass import _C, Fp8Tensor, RoutingPlan, ops
from gemm_cases import Case
from timing import Limits, Run, event

# Hidden and intermediate sizes.
MODELS = {
    "DeepSeek-V3": (7168, 2048),
    "GLM-4.5-Air": (4096, 1408),
    "Qwen3-235B": (4096, 1536),
    "Qwen3-30B": (2048, 768),
    "Qwen3-Next": (2048, 512),
    "GPT-OSS": (2880, 2880),
    "MiniMax-M3": (6144, 3072),
    "Llama 4 Scout": (5120, 8192),
    "Gemma 4": (2816, 704),
}
WGRAD: list[dict[str, Any]] = [
    {"dtype": "float32", "accumulate": True},
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "columns": "column"},
    {"dtype": "float32", "accumulate": True, "columns": "column"},
]
MOST_BYTES = 6 << 30  # of an operand or of D
MOST_FLOPS = 3e12
SECONDS = 1.0  # per case


def recorded() -> Iterator[Case]:
    """The cases of five models that gemm.py times beside other libraries."""
    for model, (m, h, i, e) in gemm_cases.MODELS.items():
        for routing in ("balanced", "ragged"):
            for n, k in ((2 * i, h), (h, i)):
                yield Case("fprop", model, m, n, k, e, routing)
            for n, k in ((i, h), (h, 2 * i)):
                yield Case("dgrad", model, m, k, n, e, routing)
        for n, k in ((2 * i, h), (h, i)):
            for how in WGRAD[:4]:
                yield Case("wgrad", model, m, n, k, e, "ragged", **how)


def drawn(seed: int) -> Iterator[Case]:
    """Random cases: of each model every product, of every kind of wgrad one."""
    draw = random.Random(seed)

    def case(model: str, gemm: str, n: int, k: int, **how: Any) -> Case:
        while True:
            rows = int(2 ** draw.uniform(5, 13))
            e = draw.choice((1, 1, 4, 8, 16, 32, 64, 128))
            out = rows * e * n * 2 if gemm != "wgrad" else e * n * k * 4
            small = max(rows * e * max(n, k), e * n * k, out) <= MOST_BYTES
            if small and 2.0 * rows * e * n * k <= MOST_FLOPS:
                break
        routing = draw.choice(("balanced", "ragged", "ragged"))
        return Case(gemm, model, rows * e, n, k, e, routing, **how)

    for model, (h, i) in MODELS.items():
        for n, k in ((2 * i, h), (h, i), (2 * i, h), (h, i)):
            yield case(model, "fprop", n, k)
        for n, k in ((2 * i, h), (h, i)):
            yield case(model, "dgrad", n, k)
            yield case(model, "wgrad", n, k, **draw.choice(WGRAD))
            yield case(model, "wgrad", n, k, **draw.choice(WGRAD[:3]))
        yield case(model, "fprop", *draw.choice(((2 * i, h), (h, i))), dtype="float32")
    for k in (256, 384, 640, 8192):  # parts of an intermediate size, by tensor parallelism
        for n in (2048, 4096):
            yield case("K " + str(k), "fprop", n, k)


class Pool:
    """Random codes, scales and room for D, of which every case takes what it needs."""

    def __init__(self, device: torch.device, most: int) -> None:
        part = torch.randn(min(most, 1 << 28) // 128, 128, device=device)
        part *= 448 / part.abs().amax(1, keepdim=True)
        codes = part.to(torch.float8_e4m3fn).view(torch.uint8).flatten()
        times = math.ceil(most / codes.numel())
        self.codes = [codes.roll(97 * i).repeat(times) for i in range(2)]
        self.scales = torch.exp2(torch.randint(-8, -4, (1 << 26,), device=device).float())
        self.room = torch.zeros(most, dtype=torch.uint8, device=device)

    def fp8(self, which: int, shape: tuple[int, ...], scales: tuple[int, ...], layout: str) -> Any:
        codes = self.codes[which][: math.prod(shape)].view(torch.float8_e4m3fn).view(shape)
        return Fp8Tensor(codes, self.scales[: math.prod(scales)].view(scales), layout)

    def out(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return self.room[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def plan_of(case: Case, device: torch.device) -> RoutingPlan:
    """As many rows for each expert; ragged: of experts between half and one and a half as popular
    as the mean."""
    if case.routing == "balanced":
        counts = torch.full((case.e,), case.m // case.e)
    else:
        likely = torch.rand(case.e) + 0.5
        counts = torch.bincount(torch.multinomial(likely, case.m, True), minlength=case.e)
    return ops.plan_from_counts(counts.to(device, torch.int32), capacity=case.m)


def call_of(case: Case, pool: Pool, plan: RoutingPlan) -> tuple[Run, torch.Tensor]:
    """The call, and its output."""
    n, k = (case.k, case.n) if case.gemm == "dgrad" else (case.n, case.k)
    dtype = getattr(torch, case.dtype)

    def blocks(size: int) -> int:
        return -(-size // 128)

    if case.gemm != "wgrad":
        a = pool.fp8(0, (case.m, k), (blocks(k), -(-case.m // 4) * 4), "gemm")
        w = pool.fp8(1, (case.e, n, k), (case.e, blocks(n), blocks(k)), "block")
        d = pool.out(case.m, n, dtype=dtype)
        return lambda: ops.grouped_gemm(a, w, plan, out=d, out_dtype=case.dtype), d
    block, depth = case.columns == "block", blocks(plan.columns)
    sides = []  # dy and x, transposed
    for which, size in enumerate((n, k)):
        scales = (blocks(size), depth) if block else (depth, -(-size // 4) * 4)
        layout = "block" if block else "gemm"
        sides.append(pool.fp8(which, (size, plan.columns), scales, layout))
    d = pool.out(case.e, n, k, dtype=dtype)
    how: Any = {"out": d, "out_dtype": case.dtype, "accumulate": case.accumulate}
    how["workspace"] = ops.zero_workspace(d)
    return lambda: ops.grouped_gemm_wgrad(sides[0], sides[1], plan, **how), d


def ways_of(case: Case, sms: int) -> tuple[list[dict[str, Any]], int]:
    """All candidates, and which one is the choice."""
    query: list[Any] = [case.gemm, case.m, case.n, case.k, case.e, sms, case.dtype]
    if case.gemm == "wgrad":
        query += [case.accumulate, case.columns]
    ways = _C.grouped_gemm_candidates(*query)
    choice = _C.explain_grouped_gemm(*query)
    choice = {name: choice[name] for name in ways[0]}
    if choice not in ways:
        ways.append(choice)
    return ways, ways.index(choice)


def measure(case: Case, pool: Pool, limits: Limits, draw: random.Random) -> Record:
    """Milliseconds of every candidate: the median of rounds in random orders, each after a read of
    twice the L2's size."""
    device = limits.device
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    ways, choice = ways_of(case, sms)
    run, d = call_of(case, pool, plan_of(case, device))
    first: torch.Tensor | None = None
    same = True
    began = time.perf_counter()
    for way in ways:  # warm, and compared
        _C.force_grouped_gemm(way)
        d.zero_()
        run()
        if first is None:
            first = d.clone()
        same = same and torch.equal(first.view(torch.uint8), d.view(torch.uint8))
    torch.cuda.synchronize()
    del first
    spent = time.perf_counter() - began
    times: list[list[float]] = [[] for _ in ways]
    flush = limits.timer.cache  # type: ignore[union-attr]
    before = time.perf_counter()
    while len(times[0]) < 9 or (len(times[0]) < 25 and time.perf_counter() - before < SECONDS):
        order = draw.sample(range(len(ways)), len(ways))
        events = [(event(), event()) for _ in ways]
        # The host gets ahead: 60 us per call.
        torch.cuda._sleep(120_000 * len(ways))  # type: ignore[no-untyped-call]
        for index in order:
            flush.sum()
            _C.force_grouped_gemm(ways[index])
            events[index][0].record()
            run()
            events[index][1].record()
        torch.cuda.synchronize()
        for taken, (begin, end) in zip(times, events, strict=True):
            taken.append(begin.elapsed_time(end))
    _C.force_grouped_gemm(None)
    ms = [statistics.median(taken) for taken in times]
    return {
        "op": case.gemm,
        "model": case.model,
        "shape": case.shape,
        "variant": case.variant,
        "routing": case.routing,
        "dtype": case.dtype,
        "accumulate": case.accumulate,
        "columns": case.columns,
        "same_bits": same,
        "rounds": len(times[0]),
        "seconds": round(spent + time.perf_counter() - before, 2),
        "choice": choice,
        "candidates": [[*way.values()] for way in ways],
        "candidate_ms": [round(value, 5) for value in ms],
        "ms": ms[choice],
        "of_fastest": round(ms[choice] / min(ms), 4),
    }


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    torch.manual_seed(given.seed)
    limits = Limits(device)
    limits.wake()
    cases = [*(recorded() if given.seed == 0 else ()), *drawn(given.seed)]
    if given.quick:
        cases = cases[::20]
    pool = Pool(device, MOST_BYTES)
    end = time.monotonic() + given.budget
    results: list[Record] = []
    for number, case in enumerate(cases):
        if time.monotonic() > end:
            print(f"left out: {len(cases) - number} cases")
            break
        try:
            row = measure(case, pool, limits, random.Random(number))
        except Exception as error:
            print(f"failed: {case}: {type(error).__name__}: {error}", flush=True)
            _C.force_grouped_gemm(None)
            continue
        results.append(row)
        on_result(row)
        print(
            f"  {number + 1}/{len(cases)}: {len(row['candidates'])} candidates, {row['rounds']} "
            f"rounds, {row['seconds']} s, the choice {row['of_fastest']} of the fastest, "
            f"same bits {row['same_bits']}",
            flush=True,
        )
    return {"environment": environment(limits), "results": results}


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--budget", type=float, default=240.0, help="seconds")
    main(arguments, run)
