"""The biases of the expert block in FP8: a further K-block of its GEMMs, of 16 columns.

A row's column of ones, with the row's weight as its scale, times the bias: what is added is in the
sums of the GEMM before they are rounded, and no pass over its output follows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor, scale_shape

_DEPTH, _ONE = 16, 0x38  # columns; the code of 1 in E4M3
_RANK = 8  # of the operators for low-rank terms, the least


def pair(bias: Tensor, plan: RoutingPlan, weights: Tensor | None = None) -> dict[str, Fp8Tensor]:
    """The operands that add weights[row] * bias[e] to grouped_gemm. bias [E, N]; weights [R] f32,
    None: 1."""
    rows = plan.rows
    codes = torch.full((rows, _DEPTH), _ONE, dtype=torch.uint8, device=bias.device)
    shape = scale_shape((rows, _DEPTH), "gemm")
    if weights is None:
        scales = torch.ones(shape, dtype=torch.float32, device=bias.device)
    else:
        scales = F.pad(weights, (0, shape[1] - rows)).view(shape)
    ones = codes.view(torch.float8_e4m3fn)
    a2 = Fp8Tensor(ones, scales, "gemm", weights is None, "e4m3", check=False)
    return {"a2": a2, "w2": quantized(bias)}


def quantized(bias: Tensor) -> Fp8Tensor:
    """bias [E, N], rounded to bf16, as two columns of codes whose sum it is: its upper four bits
    and the rest. One scale per 128 of N; exact down to 2^-17 of their largest."""
    b = bias.detach().to(torch.bfloat16)
    high = (b.view(torch.int16) & -16).view(torch.bfloat16)
    columns = b.new_zeros(*b.shape, _DEPTH)
    columns[..., 0], columns[..., 1] = high, b - high
    made: Any = ops.quantize_weight(columns, transposed=False)
    return made  # type: ignore[no-any-return]


def dots(bias: Tensor, rows: Fp8Tensor, plan: RoutingPlan) -> Tensor:
    """[R] <rows[row], bias[e]>, rounded to bf16; rows as of lora_project."""
    factor = F.pad(bias.detach().to(torch.bfloat16)[:, None], (0, 0, 0, _RANK - 1))
    return ops.lora_project(rows, factor, plan).u[:, 0]  # type: ignore[no-any-return]


def sums(bias: Tensor, rows: Fp8Tensor, plan: RoutingPlan, weights: Tensor | None = None) -> Tensor:
    """The gradient of bias [E, N], in float32: the sum of weights[row] * rows[row] of each expert,
    in one order; rows as of lora_project, weights [R] f32, None: 1."""
    shape = plan.rows, _RANK
    if weights is None:
        u = torch.ones(shape, dtype=torch.bfloat16, device=bias.device)
    else:
        u = weights.to(torch.bfloat16)[:, None].repeat(1, _RANK)
    made: Any = ops.lora_wgrad(u, rows, plan, out_dtype="float32")
    return made[:, 0].contiguous()  # type: ignore[no-any-return]
