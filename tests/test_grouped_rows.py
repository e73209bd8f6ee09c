"""autograd.experts over rows that came grouped by expert, against the block that groups them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe, ops
from fp8moe_cutlass.autograd import Grouped, Options, bf16, experts
from moe_problem import Problem, problem

OPTIONS: dict[str, Options] = {
    "default": Options(),
    "column": Options(Fp8Recipe(columns="column", grad_dtype="e5m2")),
    "fp32": Options(Fp8Recipe(scale="fp32", columns="column")),
    "recompute": Options(preactivation="recompute"),
    "fp8_z": Options(preactivation="save_fp8"),
    "transposes": Options(transposed_weights="recompute"),
    "bf16": Options(None),
    "bf16_recompute": Options(None, preactivation="recompute"),
}


def run(p: Problem, x: Tensor, probs: Tensor | None, dout: Tensor, *how: Any) -> list[Any]:
    """out, dx, dprobs and both weight gradients."""
    topk_idx, options, move = how
    leaves = [
        None if t is None else t.clone().requires_grad_() for t in (x, probs, p.gate_up, p.down)
    ]
    out = experts(leaves[0], topk_idx, *leaves[1:], options, move=move)
    out.backward(dout)
    return [out.detach(), *(None if t is None else t.grad for t in leaves)]


def grouped(p: Problem, options: Options) -> tuple[Any, Tensor]:
    """The move of the problem's rows, and the assignment of each row."""
    groups = bf16.group(p.topk_idx, len(p.down))
    rows = int((p.topk_idx >= 0).sum())
    counts = torch.bincount(p.topk_idx[p.topk_idx >= 0], minlength=len(p.down))
    if options.recipe is None:
        return Grouped(bf16.Groups(groups.offsets)), groups.order[:rows]
    plan = ops.plan_from_counts(counts.int(), capacity=rows)
    return Grouped(plan), groups.order[:rows]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("routing", ["any", "one expert takes all", "dropped"])
def test_equals_the_block_that_groups_them(name: str, routing: str) -> None:
    """With one slot a token's sums are its row; bit for bit."""
    options = OPTIONS[name]
    p = problem(150, 1, 5, 208, 144)
    if routing == "one expert takes all":
        p.topk_idx.fill_(3)
    if routing == "dropped":
        p.topk_idx[::7] = -1
    move, order = grouped(p, options)
    want = run(p, p.x, p.probs, p.dout, p.topk_idx, options, None)
    got = run(p, p.x[order], p.probs.flatten()[order], p.dout[order], None, options, move)
    for mine, its in zip(got[:2], want[:2], strict=True):
        assert torch.equal(mine, its[order])
    assert torch.equal(got[2], want[2].flatten()[order])
    for mine, its in zip(got[3:], want[3:], strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("name", ["default", "bf16"])
def test_without_probs(name: str) -> None:
    options = OPTIONS[name]
    p = problem(96, 1, 4)
    p.probs.fill_(1.0)
    move, order = grouped(p, options)
    want = run(p, p.x[order], p.probs.flatten()[order], p.dout[order], None, options, move)
    got = run(p, p.x[order], None, p.dout[order], None, options, move)
    assert got[2] is None
    assert all(torch.equal(a, b) for n, (a, b) in enumerate(zip(got, want, strict=True)) if n != 2)


def test_no_rows() -> None:
    p = problem(0, 1, 3)
    move, _ = grouped(p, Options())
    got = run(p, p.x, p.probs.flatten(), p.dout, None, Options(), move)
    assert got[0].shape == p.x.shape
    assert not got[3].any()
