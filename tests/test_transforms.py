"""torch.func's transforms and forward-mode AD are refused by name, never left out silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp8moe_cutlass import Fp8Recipe, autograd, ops
from fp8moe_cutlass.nn import MoE, Router
from moe_problem import Problem, problem


def with_a_tangent(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "make_dual": with_a_tangent,
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).float().sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}
EACH = pytest.mark.parametrize("transform", TRANSFORMS)
NO_TRANSFORM = r"has a gradient by backward\(\) and torch.autograd.grad alone; got a"


def forwards(p: Problem, layer: Any) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
    moe = MoE(Router(256, 4, 2), layer)
    return {
        "ids": ("experts", lambda x: layer(x, p.topk_idx, p.probs)),
        "rows": ("experts", lambda x: layer.forward_rows(x, [4, 4, 4, 4])),
        "moe": ("Router", moe),
        "function": (
            "experts",
            lambda x: autograd.experts(
                x, p.topk_idx, p.probs, layer.gate_up_proj, layer.down_proj, layer._options
            ),
        ),
    }


@EACH
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
@pytest.mark.parametrize("form", ["ids", "rows", "moe", "function"])
def test_the_layer(form: str, recipe: Any, frozen: bool, transform: str) -> None:
    p = problem(16)
    name, forward = forwards(p, p.experts(recipe=recipe).requires_grad_(not frozen))[form]
    with pytest.raises(RuntimeError, match=rf"^\[{name}\] {NO_TRANSFORM}"):
        TRANSFORMS[transform](forward, p.x)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_a_weight_with_a_tangent(recipe: Any, frozen: bool) -> None:
    """And a level in which nothing has one changes nothing."""
    p = problem(16)
    layer = p.experts(recipe=recipe).requires_grad_(not frozen)
    want = layer(p.x, p.topk_idx, p.probs)
    with forward_ad.dual_level():
        assert torch.equal(layer(p.x, p.topk_idx, p.probs), want)
        dual = forward_ad.make_dual(p.down, torch.ones_like(p.down))
        with pytest.raises(RuntimeError, match=rf"^\[experts\] {NO_TRANSFORM}"):
            torch.func.functional_call(
                layer, {"down_proj": dual}, (p.x, p.topk_idx, p.probs), strict=False
            )


@EACH
@pytest.mark.parametrize("op", ["permute_pad", "unpermute_unpad", "router_topk"])
def test_functions(op: str, transform: str) -> None:
    p = problem(16)
    plan = ops.route(4, topk_idx=p.topk_idx)
    called: dict[str, Callable[[Tensor], Tensor]] = {
        "permute_pad": lambda x: autograd.permute_pad(x, plan)[0],
        "unpermute_unpad": lambda x: autograd.unpermute_unpad(x, plan),
        "router_topk": lambda x: autograd.router_topk(x, 2).topk_weights,
    }
    with pytest.raises(RuntimeError, match=rf"^\[{op}\] {NO_TRANSFORM}"):
        TRANSFORMS[transform](called[op], torch.randn(32, 16))
