"""MoEExperts over a routing mask [T, E] with dense probs, against the same routing by ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe
from moe_problem import Problem, problem

E = 5


def masked(p: Problem) -> tuple[Tensor, Tensor]:
    """The problem's routing, whose ids ascend, as a mask and dense probs; those outside are NaN."""
    kept = p.topk_idx >= 0
    mask = torch.zeros(len(p.x), E + 1, dtype=torch.bool)
    mask.scatter_(1, p.topk_idx.masked_fill(~kept, E), True)
    probs = torch.full((len(p.x), E + 1), torch.nan)
    probs.scatter_(1, p.topk_idx.masked_fill(~kept, E), p.probs)
    return mask[:, :E].contiguous(), probs[:, :E].contiguous()


def routed() -> Problem:
    """One to three experts per token, one expert without any."""
    p = problem(150, 3, E, 208, 144)
    p.topk_idx = p.topk_idx.sort(dim=1).values
    p.topk_idx[::3, 1] = -1
    p.topk_idx[p.topk_idx == 2] = -1
    return p


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
@pytest.mark.parametrize("spare", [0, 40])
def test_is_the_same_routing_by_ids(recipe: Any, spare: int) -> None:
    p = routed()
    want = p.run(p.experts(recipe=recipe))
    mask, probs = masked(p)
    most = int(mask.sum()) + spare
    layer = p.experts(recipe=recipe)
    x, probs = p.x.clone().requires_grad_(), probs.requires_grad_()
    out = layer(x, mask, probs, max_assignments=most)
    out.backward(p.dout)
    assert torch.equal(out, want.out)
    assert torch.equal(x.grad, want.dx)
    assert torch.equal(layer.gate_up_proj.grad, want.dgate_up)
    assert torch.equal(layer.down_proj.grad, want.ddown)
    dense = torch.zeros(mask.shape)
    kept = p.topk_idx >= 0
    dense[kept.nonzero()[:, 0], p.topk_idx[kept]] = want.dprobs[kept]
    assert torch.equal(probs.grad, dense)


def test_compiled_with_leading_sizes_and_an_id_of_no_expert() -> None:
    p = routed()
    mask, probs = masked(p)
    probs = probs.nan_to_num()
    layer = p.experts()
    want = layer(p.x, mask, probs, max_assignments=450)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(p.x, mask, probs, max_assignments=450), want)
    shaped = layer(
        p.x.view(3, 50, -1),
        mask.view(3, 50, E),
        probs.view(3, 50, E),
        max_assignments=450,
        no_expert=E,
    )
    assert torch.equal(shaped.view(150, -1), want)


def test_refuses() -> None:
    p = routed()
    mask, probs = masked(p)
    layer = p.experts()
    held = int(mask.sum())
    for call, message in (
        ({}, "a mask needs max_assignments, .*; got None"),
        ({"max_assignments": -1}, "a mask needs max_assignments, .*; got -1"),
        ({"max_assignments": held - 1}, f"a mask must hold at most {held - 1}; got {held}"),
    ):
        with pytest.raises(ValueError, match=rf"\[(MoEExperts|experts)\] {message}"):
            layer(p.x, mask, probs, **call)
    with pytest.raises(ValueError, match=r"a mask must be \[..., 5\]; got \(150, 4\)"):
        layer(p.x, mask[:, :4], probs[:, :4], max_assignments=450)
    with pytest.raises(
        ValueError, match=r"max_assignments needs a bool mask .*; got torch.int64 ids"
    ):
        layer(p.x, p.topk_idx, p.probs, max_assignments=450)
    with pytest.raises(ValueError, match=r"int32, int64 or a bool mask; got torch.float32"):
        layer(p.x, probs, probs, max_assignments=450)
