"""Grouped GEMMs of other libraries, found at run time and given the operands ours has.

A factory gets the Operands and returns the call to time, which gives its output, or None where the
library is missing or has no such product.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Tensor
from gemm_cases import Factory, Operands
from timing import Run

TILE = 128
Product = Callable[[], Tensor]
PEERS: dict[str, Factory] = {}


def gemm_peer(name: str) -> Callable[[Factory], Factory]:
    def register(factory: Factory) -> Factory:
        PEERS[name] = factory
        return factory

    return register


def imported(name: str) -> Any:
    """The module, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def whole_tiles(counts: list[int]) -> list[int]:
    return [-(-count // TILE) * TILE for count in counts]


def padded_rows(t: Fp8Tensor, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and scales (rows contiguous) of groups that start at multiples of 128, and the group of
    every row, -1 on padding. t: [M, K] with `gemm` scales."""
    of_row = torch.full((sum(whole_tiles(counts)),), -1, dtype=torch.int32)
    start = 0
    for group, (count, padded) in enumerate(zip(counts, whole_tiles(counts), strict=True)):
        of_row[start : start + count] = group
        start += padded
    of_row = of_row.to(t.data.device)
    kept = (of_row >= 0).nonzero()[:, 0]
    data = torch.zeros(len(of_row), t.shape[1], dtype=torch.uint8, device=t.data.device)
    data[kept] = t.data.view(torch.uint8)[: len(kept)]
    scale = torch.zeros(t.scale_inv.shape[0], len(of_row), device=t.data.device)
    scale[:, kept] = t.scale_inv[:, : len(kept)]
    return data.view(t.data.dtype), scale.t(), of_row


def flat_segments(t: Fp8Tensor, padded: list[int]) -> tuple[Tensor, Tensor]:
    """[C, Kcap] as one [C, k] after another, and its 1x128 scales [C, K-blocks], C contiguous."""
    columns = t.shape[0]
    data = t.data.view(torch.uint8)
    parts = [part.reshape(-1) for part in data[:, : sum(padded)].split(padded, dim=1)]
    scale = t.scale_inv
    if t.scale_layout == "block":
        scale = scale.repeat_interleave(TILE, dim=0)[:columns].t()
    scale = scale[: sum(padded) // TILE, :columns].contiguous()
    return torch.cat(parts).view(t.data.dtype), scale.t()


@gemm_peer("torch._grouped_mm bf16")
def grouped_mm(o: Operands) -> Run | None:
    """torch's own grouped GEMM, in bf16."""
    if o.x.device.type != "cuda":
        return None
    ends, dtype = o.plan.row_offsets[1:], torch.bfloat16
    if o.case.gemm == "wgrad":
        return lambda: torch._grouped_mm(o.other.t(), o.x, offs=ends, out_dtype=dtype)
    return lambda: torch._grouped_mm(o.x, o.other.transpose(1, 2), offs=ends, out_dtype=dtype)


@gemm_peer("DeepGEMM")
def deep_gemm(o: Operands) -> Product | None:
    """Groups padded to its 128 rows or tokens. Its wgrad always adds, in float32: beside a bf16
    output of ours it writes twice the bytes, and zeroing its output is not timed."""
    library = imported("deep_gemm") if o.x.device.type == "cuda" else None
    if library is None or (o.case.gemm != "wgrad" and o.case.dtype != "bfloat16"):
        return None
    counts = o.plan.tokens_per_expert.tolist()
    if o.case.gemm == "wgrad":
        padded = whole_tiles(counts)
        a, b = flat_segments(o.other_q, padded), flat_segments(o.x_q, padded)
        dw = torch.zeros(o.case.e, o.case.n, o.case.k, device=o.x.device)
        sizes = torch.tensor(padded, dtype=torch.int32, device=o.x.device)

        def accumulate() -> Tensor:
            library.k_grouped_fp8_gemm_nt_contiguous(a, b, dw, padded, sizes, dw)
            return dw

        return accumulate
    data, scale, of_row = padded_rows(o.x_q, counts)
    weights = (o.other_q.data, o.other_q.scale_inv)
    d = torch.empty(len(of_row), o.case.n, dtype=torch.bfloat16, device=o.x.device)

    def multiply() -> Tensor:
        library.m_grouped_fp8_gemm_nt_contiguous((data, scale), weights, d, of_row)
        return d

    return multiply


@gemm_peer("torch._scaled_mm 1x128")
def scaled_mm(o: Operands) -> Product | None:
    """cuBLASLt, 1x128 by 128x128: one expert alone."""
    if o.x.device.type != "cuda" or o.case.e != 1 or o.case.gemm == "wgrad":
        return None
    scale_a = o.x_q.scale_inv[:, : o.case.m].contiguous().t()
    scale_b = o.other_q.scale_inv[0].contiguous().t()
    a, b, dtype = o.x_q.data, o.other_q.data[0].t(), getattr(torch, o.case.dtype)
    return lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype)


@gemm_peer("cuBLAS bf16")
def dense(o: Operands) -> Product | None:
    """The same arithmetic as one dense product, where memory holds no tokens of other experts: the
    tensor core's pace in bf16."""
    if o.x.device.type != "cuda" or o.case.gemm == "wgrad" or not o.case.sustained:
        return None
    weight = o.other[0].t()
    return lambda: o.x @ weight
