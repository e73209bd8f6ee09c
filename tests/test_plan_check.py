"""The CPU refuses a plan whose buffer holds no plan, before it reads or writes by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8moe_cutlass import RoutingPlan, ops

T, S, E, H = 40, 2, 5, 256

IDS = torch.stack([torch.arange(T) % 3, torch.arange(T) % 2 + 3], dim=1)
PLAN = ops.route(E, topk_idx=IDS, align=16)
X = torch.randn(T, H)
PROBS = torch.rand(T, S)
Q = ops.quantize(X)
ROWS = ops.permute_pad(X, PLAN)[0]
DH = torch.randn(PLAN.rows, H // 2)
Q_ROWS = ops.permute_pad(Q, PLAN)[0]
Q_COLUMNS = ops.transpose_fp8(Q_ROWS, PLAN)
W, _ = ops.quantize_weight(torch.randn(E, 128, H))
FACTOR, U = torch.ones(E, 16, H).bfloat16(), torch.ones(PLAN.rows, 16).bfloat16()

OPS: dict[str, Callable[[RoutingPlan], Any]] = {
    "permute_pad": lambda p: ops.permute_pad(X, p, PROBS),
    "permute_pad_fp8": lambda p: ops.permute_pad(Q, p),
    "permute_pad_backward": lambda p: ops.permute_pad_backward(ROWS, p),
    "unpermute_unpad": lambda p: ops.unpermute_unpad(ROWS, p),
    "unpermute_unpad_backward": lambda p: ops.unpermute_unpad_backward(X, p, ROWS, PROBS),
    "transpose_fp8": lambda p: ops.transpose_fp8(Q_ROWS, p),
    "permute_transpose_fp8": lambda p: ops.permute_transpose_fp8(Q, p),
    "act_quantize": lambda p: ops.act_quantize(ROWS, p),
    "act_quantize_backward": lambda p: ops.act_quantize_backward(DH, ROWS, p),
    "grouped_gemm": lambda p: ops.grouped_gemm(Q_ROWS, W, p),
    "grouped_gemm_wgrad": lambda p: ops.grouped_gemm_wgrad(Q_COLUMNS, Q_COLUMNS, p),
    "lora_project": lambda p: ops.lora_project(Q, FACTOR, p),
    "lora_wgrad": lambda p: ops.lora_wgrad(U, Q, p),
}
BY_ROW = {"permute_pad", "permute_pad_fp8", "unpermute_unpad_backward", "permute_transpose_fp8"}
BY_ROW |= {"lora_project", "lora_wgrad"}
BY_COLUMN = {"transpose_fp8", "permute_transpose_fp8", "grouped_gemm_wgrad"}
BY_TOKEN = {"permute_pad_backward", "unpermute_unpad"}
BAD = (-2, PLAN.rows + 1, 0x7FFFFFFF, -0x80000000)


def refused(name: str, change: Callable[[RoutingPlan], None]) -> None:
    plan = RoutingPlan(PLAN.buffer.clone(), *PLAN.sizes)
    change(plan)
    with pytest.raises(ValueError, match=r"plan must be filled by route or plan_from_counts"):
        OPS[name](plan)


@pytest.mark.parametrize("name", OPS)
def test_a_buffer_of_anything(name: str) -> None:
    OPS[name](PLAN)
    for word in (PLAN.rows, 0x7F7F7F7F, -0x5A5A5A5B):
        refused(name, lambda plan, word=word: plan.buffer.fill_(word))  # type: ignore[misc]


@pytest.mark.parametrize("name", OPS)
def test_one_wrong_word(name: str) -> None:
    """Each section that an op reads, first, middle and last entry."""
    sections = ["row_of"] if name in BY_TOKEN else ["tokens_per_expert", "row_offsets"]
    sections += ["token_of_row", "slot_of_row"] if name in BY_ROW - {"permute_pad_fp8"} else []
    sections += ["col_offsets"] if name in BY_COLUMN else []
    used = int(PLAN.tokens_per_expert[0])  # rows past these are padding
    for section in sections:
        size = getattr(PLAN, section).numel()
        last = size - 1 if section.endswith(("expert", "row_of")) else size - 2
        last = used - 1 if section.endswith("of_row") else last
        for at in {0, last // 2, last}:
            for bad in BAD:

                def change(plan: RoutingPlan, s: str = section, i: int = at, b: int = bad) -> None:
                    getattr(plan, s).view(-1)[i] = b

                refused(name, change)


def test_offsets_off_the_grid() -> None:
    """In range, but not where tiles begin."""
    refused("transpose_fp8", lambda plan: plan.col_offsets[2:3].add_(16))
    refused("grouped_gemm", lambda plan: plan.row_offsets[2:3].add_(8))
    refused("permute_pad", lambda plan: plan.token_of_row[int(plan.tokens_per_expert[0])].fill_(3))
