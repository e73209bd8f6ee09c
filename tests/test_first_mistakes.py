"""What a new user does wrong first, and the message it gets: found, allowed, how to get it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8moe_cutlass import Fp8Recipe, Fp8Tensor, ops
from fp8moe_cutlass.nn import LossCoefficients, MoE, MoEExperts, Router, RoutingRule

T, H, I, E = 64, 256, 128, 4
IDX = torch.stack([torch.arange(T) % E, (torch.arange(T) + 1) % E], 1)


class Given:
    """A user's tensors, right ones."""

    def __init__(self) -> None:
        self.x = torch.randn(T, H, generator=torch.Generator().manual_seed(0)).bfloat16()
        self.w = torch.ones(E, 2 * I, H, dtype=torch.bfloat16)
        self.plan, self.few = ops.route(E, topk_idx=IDX), ops.route(E, topk_idx=IDX[: T // 2])
        self.q = ops.quantize(self.x)
        self.rows, _ = ops.permute_pad(self.q, self.plan)
        self.w8, self.w8_t = ops.quantize_weight(self.w)
        self.layer, self.probs = MoEExperts(E, H, I), torch.rand(T, 2)


MISTAKES: dict[str, tuple[Callable[[Given], Any], str]] = {
    "wrong layout": (
        lambda g: ops.grouped_gemm(g.rows.to_layout("row"), g.w8, g.plan),
        "[grouped_gemm] a must have scale layout gemm; got row: quantize and permute_pad write it "
        'with scale_layout="gemm"',
    ),
    "wrong device": (
        lambda g: g.layer(g.x.to("meta"), IDX, g.probs),
        "[MoEExperts] x must be on the parameters' device cpu; got meta",
    ),
    "scales on another device": (
        lambda g: Fp8Tensor(g.q.data, g.q.scale_inv.to("meta")),
        "[Fp8Tensor] scale_inv must be on data's device cpu; got meta",
    ),
    "a plan of other tokens": (
        lambda g: ops.permute_pad(g.q, g.few),
        "[permute_pad] x must be [32, 256]; got [64, 256]; plan has 32 tokens of 2 slots, "
        "4 experts, 64 rows",
    ),
    "a plan of other tokens, later": (
        lambda g: ops.grouped_gemm(g.rows, g.w8, g.few),
        "[grouped_gemm] a must be [64, 256]; got [128, 256]; plan has 32 tokens of 2 slots, "
        "4 experts, 64 rows",
    ),
    "ids of other tokens": (
        lambda g: g.layer(g.x, IDX[: T // 2], g.probs),
        "[MoEExperts] topk_idx must be [..., slots] with x's leading sizes (64,); got (32, 2)",
    ),
    "not quantized": (
        lambda g: ops.grouped_gemm(g.x, g.w8, g.plan),
        "[grouped_gemm] a must be an Fp8Tensor (ops.quantize, of weights ops.quantize_weight); "
        "got Tensor of dtype torch.bfloat16",
    ),
    "a weight not quantized": (
        lambda g: ops.grouped_gemm(g.rows, g.w, g.plan),
        "[grouped_gemm] w must be an Fp8Tensor (ops.quantize, of weights ops.quantize_weight); "
        "got Tensor of dtype torch.bfloat16",
    ),
    "a weight of integers": (
        lambda g: ops.quantize_weight(g.w.int()),
        "[quantize_weight] w must be one of float32, float16, bfloat16; got int32",
    ),
    "no such recipe": (
        lambda g: MoEExperts(E, H, I, recipe="fp8"),
        "[MoEExperts] recipe must be an Fp8Recipe or None (bf16); got 'fp8'",
    ),
    "an Fp8Tensor given to a layer": (
        lambda g: g.layer(g.q, IDX, g.probs),
        "[MoEExperts] x must be a torch.Tensor; got Fp8Tensor",
    ),
    "experts of a list": (
        lambda g: g.layer(g.x, IDX.tolist(), g.probs),
        "[MoEExperts] topk_idx must be a torch.Tensor; got list",
    ),
    "rows of NumPy": (
        lambda g: g.layer.forward_rows(g.x.float().numpy(), [T // E] * E),
        "[MoEExperts] rows must be a torch.Tensor; got ndarray",
    ),
    "tokens on another device than the router": (
        lambda g: MoE(Router(H, E, 2), g.layer)(g.x.to("meta")),
        "[Router] x must be on the parameters' device cpu; got meta",
    ),
    "router and experts in another order": (
        lambda g: MoE(g.layer, Router(H, E, 2)),
        "[MoE] router must be a Router; got MoEExperts",
    ),
    "a router of one's own that lacks sizes": (
        lambda g: MoE(torch.nn.Linear(H, E), g.layer),
        "[MoE] router must be a Router; got Linear",
    ),
    "no experts": (
        lambda g: MoE(Router(H, E, 2), None),
        "[MoE] experts must be MoEExperts; got NoneType",
    ),
    "a size that is no int": (
        lambda g: MoEExperts(E, H / 2, I),
        "[MoEExperts] hidden_size must be an int; got 128.0",
    ),
    "a number of experts that is no int": (
        lambda g: MoEExperts("4", H, I),
        "[MoEExperts] num_experts must be an int; got '4'",
    ),
    "no such top_k": (
        lambda g: Router(H, E, 2.0),
        "[Router] top_k must be an int; got 2.0",
    ),
    "a word for a rule": (
        lambda g: Router(H, E, 2, "sigmoid"),
        "[Router] rule must be a RoutingRule; got 'sigmoid'",
    ),
    "a number for coefficients": (
        lambda g: Router(H, E, 2, coefficients=0.01),
        "[Router] coefficients must be LossCoefficients; got 0.01",
    ),
    "a word for a coefficient": (
        lambda g: LossCoefficients(z="1e-3"),
        "[LossCoefficients] z must be finite and not negative; got '1e-3'",
    ),
    "a word for eps": (
        lambda g: Fp8Recipe(eps="1e-4"),
        "[Fp8Recipe] eps must be in [0, 3.4e38]; got '1e-4'",
    ),
    "a word for a switch": (
        lambda g: MoEExperts(E, H, I, delay_wgrad="no"),
        "[MoEExperts] delay_wgrad must be True or False; got 'no'",
    ),
    "no such option": (
        lambda g: MoEExperts(E, H, I, preactivation="none"),
        "[MoEExperts] preactivation must be 'save', 'save_fp8' or 'recompute'; got 'none'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_message(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(Given())


@pytest.mark.parametrize(
    "option",
    ["recipe", "preactivation", "transposed_weights", "delay_wgrad", "group", "rank_capacity"],
)
def test_an_option_is_of_the_constructor(option: str) -> None:
    """Assigned later it is refused by name, and the layer is what it was."""
    g = Given()
    layer = g.layer
    before = layer(g.x, IDX, g.probs)
    with pytest.raises(AttributeError, match=option):
        setattr(layer, option, None)
    with pytest.raises(dataclasses.FrozenInstanceError, match="scale"):
        layer.recipe.scale = "fp32"
    assert torch.equal(layer(g.x, IDX, g.probs), before)


def test_options_of_a_router_assigned_later() -> None:
    router = Router(H, E, 2)
    with pytest.raises(AttributeError, match="rule"):
        router.rule = RoutingRule(gate_bias=True)
    with pytest.raises(ValueError, match=r"coefficients must be LossCoefficients; got 0.01"):
        router.coefficients = 0.01
    router.coefficients = LossCoefficients(z=1.0)
    assert "z" in router(torch.randn(T, H)).losses


def test_a_float16_weight_is_no_mistake() -> None:
    """Weights and layers may be float16: the same codes as of its values in float32."""
    g = Given()
    half = torch.randn(E, 2 * I, H).half()
    for mine, wide in zip(
        ops.quantize_weight(half), ops.quantize_weight(half.float()), strict=True
    ):
        assert torch.equal(mine.data.view(torch.uint8), wide.data.view(torch.uint8))
        assert torch.equal(mine.scale_inv, wide.scale_inv)
    layer = MoEExperts(E, H, I, dtype=torch.float16)
    assert layer(g.x.half(), IDX, g.probs).dtype == torch.float16


def test_what_a_layer_prints() -> None:
    recipe = Fp8Recipe()
    experts = MoEExperts(E, H, I, delay_wgrad=True)
    assert repr(experts) == (
        f"MoEExperts(num_experts=4, hidden_size=256, intermediate_size=128, recipe={recipe}, "
        "preactivation='save', transposed_weights='save', dtype=torch.bfloat16, delay_wgrad=True)"
    )
    rule = RoutingRule(score="sigmoid", selection_bias=True)
    router = Router(H, E, 2, rule, coefficients=LossCoefficients(balancing=0.01))
    assert repr(router) == (
        "Router(num_experts=4, hidden_size=256, top_k=2, score='sigmoid', selection_bias=True, "
        "balancing=0.01)"
    )
    assert f"(router): {router!r}" in repr(MoE(router, experts))
