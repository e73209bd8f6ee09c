"""The grouped GEMMs at the sizes of models: cases, their operands, and our call.

Experts have equally many rows ("balanced") or as many as a random routing gives them ("ragged").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cases import into, normal, ragged, transposed
from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops
from fp8moe_cutlass.typing import Columns
from timing import Run

PASSES = ("fprop", "dgrad", "wgrad")


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


def operands(case: Case, device: torch.device) -> Operands:
    if case.routing == "balanced":
        each = torch.full((case.e,), case.m // case.e, dtype=torch.int32, device=device)
        plan = ops.plan_from_counts(each, capacity=case.m)
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
