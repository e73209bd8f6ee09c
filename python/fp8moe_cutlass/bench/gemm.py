"""`bench gemm`: the grouped GEMMs at the sizes of models, beside torch in bf16.

Burst: seven rounds with a cold L2. Sustained: a second of calls back to back. Experts have equally
many rows ("balanced") or as many as a random routing gives them ("ragged").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops
from fp8moe_cutlass.typing import Columns

from .cases import into, normal, ragged, size_of, transposed
from .record import OnResult, Record, environment, ignore, row
from .timing import CudaTimer, Limits, Run

PASSES = ("fprop", "dgrad", "wgrad")
ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """M rows of E experts by weights [E, N, K]; what dgrad contracts is called K, too."""

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


def cases() -> Iterator[Case]:
    """Both layers of each model; wgrad adds to a float32 main_grad."""
    for gemm in PASSES:
        for model, (m, h, i, e) in MODELS.items():
            for n, k in ((i, h), (h, 2 * i)) if gemm == "dgrad" else ((2 * i, h), (h, i)):
                to = {"dtype": "float32", "accumulate": True} if gemm == "wgrad" else {}
                yield Case(gemm, model, m, n, k, e, "ragged", sustained=True, **to)  # type: ignore[arg-type]


QUICK = [
    Case("fprop", "quick", 300, 256, 256, 3, "ragged"),
    Case("dgrad", "quick", 256, 128, 384, 2),
    Case("wgrad", "quick", 256, 256, 128, 2, dtype="float32", accumulate=True),
    Case("wgrad", "quick", 300, 128, 256, 3, "ragged", columns="column"),
]


@dataclass(frozen=True)
class Operands:
    """One case's operands, in bf16 and quantized. fprop, dgrad: x [M, K], w [E, N, K]; wgrad: dy
    [M, N] and x [M, K], quantized along the rows."""

    case: Case
    plan: RoutingPlan
    x: Tensor
    other: Tensor  # w, or dy
    x_q: Fp8Tensor
    other_q: Fp8Tensor


Factory = Callable[[Operands], Run | None]  # None: not on this device, or not this product


def grouped_mm(o: Operands) -> Run | None:
    """torch's own grouped GEMM, in bf16."""
    if o.x.device.type != "cuda":
        return None
    ends, dtype = o.plan.row_offsets[1:], torch.bfloat16
    if o.case.gemm == "wgrad":
        return lambda: torch._grouped_mm(o.other.t(), o.x, offs=ends, out_dtype=dtype)
    return lambda: torch._grouped_mm(o.x, o.other.transpose(1, 2), offs=ends, out_dtype=dtype)


TORCH: dict[str, Factory] = {"torch._grouped_mm bf16": grouped_mm}


def operands(case: Case, device: torch.device) -> Operands:
    if case.routing == "balanced":
        each = torch.full((case.e,), case.m // case.e, dtype=torch.int32, device=device)
        plan = RoutingPlan.from_counts(each, capacity=case.m)
    else:
        plan = ragged(case.m, case.e, device)
    x = normal(case.m, case.k, device=device)
    if case.gemm == "wgrad":
        dy = normal(case.m, case.n, device=device)
        dy_q, x_q = (transposed(t, plan, case.columns) for t in (dy, x))
        return Operands(case, plan, x, dy, x_q, dy_q)
    w = torch.stack([normal(case.n, case.k, device=device) for _ in range(case.e)])
    w_q = ops.quantize_weight(w)[0]
    return Operands(case, plan, x, w, ops.quantize(x, scale_layout="gemm"), w_q)


def call_of(o: Operands) -> tuple[Run, Tensor]:
    """Our call, and its output."""
    if o.case.gemm != "wgrad":
        return into(ops.grouped_gemm, o.x_q, o.other_q, o.plan, out_dtype=o.case.dtype)
    workspace = ops.zero_workspace(o.x)
    given = {"out_dtype": o.case.dtype, "workspace": workspace}
    run, dw = into(ops.grouped_gemm_wgrad, o.other_q, o.x_q, o.plan, **given)
    if not o.case.accumulate:
        return run, dw

    def accumulate() -> None:
        ops.grouped_gemm_wgrad(
            o.other_q, o.x_q, o.plan, out=dw, accumulate=True, workspace=workspace
        )

    return accumulate, dw


def measure(case: Case, limits: Limits, peers: dict[str, Factory]) -> Record:
    """One row. A baseline that fails on this case is named, with its error."""
    o = operands(case, limits.device)
    run, out = call_of(o)
    calls: dict[str, Run] = {"ours": run}
    failed: dict[str, str] = {}
    for name, factory in peers.items():
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
    if case.sustained and limits.device.type == "cuda":
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


def run_gemm(
    device: torch.device,
    quick: bool = False,
    budget: float = 480.0,
    on_result: OnResult = ignore,
    peers: dict[str, Factory] = TORCH,
    wanted: Iterable[Case] | None = None,
) -> Record:
    """The record of as many of the `wanted` cases (default: `cases`) as begin within `budget`
    seconds; "left_out" names the others. quick, and the CPU: tiny sizes."""
    torch.manual_seed(0)
    limits = Limits(device)
    if isinstance(limits.timer, CudaTimer):
        limits.timer.repeats = ROUNDS
    limits.wake()
    end = time.monotonic() + budget
    results: list[Record] = []
    left_out = []
    for case in QUICK if quick or device.type == "cpu" else wanted or cases():
        if time.monotonic() > end:
            left_out.append(f"{case.gemm} {case.variant}")
            continue
        results.append(measure(case, limits, peers))
        on_result(results[-1])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"environment": environment(limits), "results": results, "left_out": left_out}
