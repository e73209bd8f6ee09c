"""The grouped GEMMs at the sizes of models, beside DeepGEMM and torch on the same operands.

Seven rounds in which ours and every peer take turns (burst, L2 cold), and for one layer of each
model a second of calls back to back (sustained). Rows balanced over the experts, or as a random
routing gives them; a peer that pads groups pads its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops
from fp8moe_cutlass.typing import Columns

from .cases import into, normal, ragged, size_of
from .gemm_peers import GEMM_PEERS
from .timing import CudaTimer, Limits, Run

Record = dict[str, Any]
PASSES = ("fprop", "dgrad", "wgrad")
ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """M rows of E experts by weights [E, N, K] of `gemm`: what dgrad contracts is K here, too."""

    gemm: str
    model: str
    m: int
    n: int
    k: int
    e: int
    routing: str = "balanced"
    dtype: str = "bfloat16"
    columns: Columns = "block"
    accumulate: bool = False
    sustained: bool = False

    @property
    def variant(self) -> str:
        wgrad = f", columns={self.columns}, beta {int(self.accumulate)}"
        return f"{self.model}, {self.routing}, {self.dtype}" + wgrad * (self.gemm == "wgrad")

    @property
    def shape(self) -> dict[str, int]:
        return {"M": self.m, "N": self.n, "K": self.k, "E": self.e}


# Rows, hidden, intermediate, experts.
MODELS = {
    "DeepSeek-V3 EP32": (32768, 7168, 2048, 8),
    "DeepSeek-V3 EP8": (32768, 7168, 2048, 32),
    "Qwen3-235B EP8": (32768, 4096, 1536, 16),
    "DeepSeek-V2-Lite": (24576, 2048, 1408, 64),
    "Qwen3-30B": (32768, 2048, 768, 128),
}


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
    """What decides first, so that a budget cuts the rest."""
    dense = [
        Case("fprop", "one expert", m, n, k, 1, sustained=True)
        for m, n, k in ((4096, 4096, 7168), (4096, 7168, 2048), (32768, 4096, 7168))
    ]
    many = [
        Case("fprop", "256 experts", 256 * 128, 4096, 7168, 256, routing)
        for routing in ("balanced", "ragged")
    ]
    return [*model_cases("fprop"), *model_cases("wgrad"), *dense, *many, *model_cases("dgrad")]


QUICK = [
    Case("fprop", "quick", 300, 256, 256, 3, "ragged"),
    Case("dgrad", "quick", 256, 128, 384, 2),
    Case("wgrad", "quick", 256, 256, 128, 2, dtype="float32", accumulate=True),
    Case("wgrad", "quick", 300, 128, 256, 3, "ragged", columns="column"),
]


@dataclass(frozen=True)
class Operands:
    """Of one case, from the same random values: bf16 and quantized. fprop, dgrad: x [M, K], w
    [E, N, K]; wgrad: dy [M, N] and x [M, K], quantized along the rows."""

    case: Case
    plan: RoutingPlan
    x: Tensor
    other: Tensor  # w, or dy
    x_q: Fp8Tensor
    other_q: Fp8Tensor


def operands(case: Case, device: torch.device) -> Operands:
    if case.routing == "balanced":
        each = torch.full((case.e,), case.m // case.e, dtype=torch.int32, device=device)
        plan = RoutingPlan.from_counts(each, capacity=case.m)
    else:
        plan = ragged(case.m, case.e, device)
    x = normal(case.m, case.k, device=device)
    if case.gemm == "wgrad":
        dy = normal(case.m, case.n, device=device)
        dy_q, x_q = (
            ops.transpose_fp8(ops.quantize(t), plan, columns=case.columns) for t in (dy, x)
        )
        return Operands(case, plan, x, dy, x_q, dy_q)
    w = torch.stack([normal(case.n, case.k, device=device) for _ in range(case.e)])
    w_q = ops.quantize_weight(w)[0]
    return Operands(case, plan, x, w, ops.quantize(x, scale_layout="gemm"), w_q)


def call_of(o: Operands) -> tuple[Run, Tensor]:
    """Our call, and its output."""
    if o.case.gemm != "wgrad":
        return into(ops.grouped_gemm, o.x_q, o.other_q, o.plan, out_dtype=o.case.dtype)
    run, dw = into(ops.grouped_gemm_wgrad, o.other_q, o.x_q, o.plan, out_dtype=o.case.dtype)
    if not o.case.accumulate:
        return run, dw

    def accumulate() -> None:
        ops.grouped_gemm_wgrad(o.other_q, o.x_q, o.plan, out=dw, accumulate=True)

    return accumulate, dw


def measure(case: Case, limits: Limits) -> Record:
    """One result row. A peer that is there but fails on this case is named, with its words."""
    o = operands(case, limits.device)
    run, out = call_of(o)
    calls: dict[str, Run] = {"ours": run}
    failed: dict[str, str] = {}
    for name, factory in GEMM_PEERS.items():
        try:
            peer = factory(o)
            if peer is not None:
                peer()
                calls[name] = peer
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    moved = size_of(o.x_q, o.other_q, out) + (size_of(out) if case.accumulate else 0)
    copied = case.e == 256  # bound by its weights
    every = [*calls.values(), *([limits.copy(moved)] if copied else [])]
    samples = limits.timer.measure(*every)
    flops = 2 * case.m * case.n * case.k
    row: Record = {
        "op": case.gemm,
        "shape": case.shape,
        "variant": case.variant,
        "ms": samples[0].ms,
        "host_us": samples[0].host_us,
        "bytes": moved,
        "flops": flops,
        "limit_ms": samples[-1].ms if copied else flops / limits.tensor_tflops / 1e9,
        "peers": {name: s.ms for name, s in zip(calls, samples, strict=False) if name != "ours"},
        "repeat": samples[0].repeat,
    }
    if failed:
        row["peers_failed"] = failed
    if case.sustained:
        long = {
            name: limits.timer.sustained(call)
            for name, call in calls.items()
            if name in ("ours", "DeepGEMM", "torch._scaled_mm 1x128")
        }
        if long["ours"] is not None:
            row["sustained_ms"] = long.pop("ours")
            row["peers_sustained"] = long
    return row


def run_gemm(
    device: torch.device,
    passes: Iterable[str] | None = None,
    quick: bool = False,
    budget: float = 480.0,
    on_result: Callable[[Record], None] = lambda row: None,
) -> Record:
    """Time the GEMMs of `passes` (default: all) until `budget` seconds are over; what it left out
    is in "left_out". quick: tiny sizes, which is all the CPU is asked for."""
    from . import environment

    names = tuple(passes or PASSES)
    unknown = [name for name in names if name not in PASSES]
    if unknown:
        raise ValueError(f"[bench] --gemm times {', '.join(PASSES)}; got {', '.join(unknown)}")
    torch.manual_seed(0)
    limits = Limits(device)
    if isinstance(limits.timer, CudaTimer):
        limits.timer.repeats = ROUNDS
    limits.wake()
    small = quick or device.type == "cpu"
    cases = [c for c in (QUICK if small else all_cases()) if c.gemm in names]
    end = time.monotonic() + budget
    results: list[Record] = []
    left_out = []
    for case in cases:
        if time.monotonic() > end:
            left_out.append(f"{case.gemm} {case.variant}")
            continue
        results.append(measure(case, limits))
        on_result(results[-1])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"environment": environment(limits), "results": results, "left_out": left_out}
