"""Router.from_config: every model's router against that of transformers, or by its own rule."""

from __future__ import annotations

import importlib
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass.nn import Router


def dense(idx: Tensor, weights: Tensor, experts: int) -> Tensor:
    return weights.new_zeros(len(idx), experts).scatter(1, idx, weights)


# ---- transformers -------------------------------------------------------------------------------

E16: dict[str, Any] = {"n_routed_experts": 16}
GROUPED: dict[str, Any] = {**E16, "n_group": 4, "topk_group": 2}
LOCAL: dict[str, Any] = {"num_local_experts": 16}
V2: dict[str, Any] = {"routed_scaling_factor": 1.5, "topk_method": "group_limited_greedy"}
FACTOR: dict[str, Any] = {"routed_scaling_factor": 2.5}
# name: module, config, router, the config's values.
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", "DeepseekV2Config", "DeepseekV2TopkRouter", E16),
    "deepseek_v2_groups": (
        *("deepseek_v2", "DeepseekV2Config", "DeepseekV2TopkRouter"),
        GROUPED | V2,
    ),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter", GROUPED | FACTOR),
    "kimi_k2": (
        *("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter"),
        {**E16, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
    ),
    "deepseek_v4": ("deepseek_v4", "DeepseekV4Config", "DeepseekV4TopKRouter", E16),
    "gemma4": (
        *("gemma4", "Gemma4TextConfig", "Gemma4TextRouter"),
        {"num_experts": 16, "top_k_experts": 4, "enable_moe_block": True},
    ),
    "glm4_moe": ("glm4_moe", "Glm4MoeConfig", "Glm4MoeTopkRouter", GROUPED | FACTOR),
    "gpt_oss": ("gpt_oss", "GptOssConfig", "GptOssTopKRouter", LOCAL),
    "llama4": ("llama4", "Llama4TextConfig", "Llama4Router", LOCAL | {"num_experts_per_tok": 1}),
    "llama4_of_4": ("llama4", "Llama4TextConfig", "Llama4Router", LOCAL),
    "minimax_m2": ("minimax_m2", "MiniMaxM2Config", "MiniMaxM2TopKRouter", LOCAL),
    "mixtral": ("mixtral", "MixtralConfig", "MixtralTopKRouter", LOCAL),
    "nemotron_h": ("nemotron_h", "NemotronHConfig", "NemotronHTopkRouter", GROUPED),
    "nemotron_h_raw": (
        *("nemotron_h", "NemotronHConfig", "NemotronHTopkRouter"),
        GROUPED | {"norm_topk_prob": False},
    ),
    "qwen3": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter", {"num_experts": 16}),
    "qwen3_normalized": (
        *("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter"),
        {"num_experts": 16, "norm_topk_prob": True},
    ),
}
# Our parameter: its names there.
NAMES = {
    "weight": ("weight", "proj.weight"),
    "bias": ("bias",),
    "input_scale": ("scale",),
    "expert_scale": ("per_expert_scale",),
    "selection_bias": ("e_score_correction_bias",),
}


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_transformers(name: str) -> None:
    """float32 routers: the same experts; weights and gradients as far as float32 rounds."""
    pytest.importorskip("transformers", minversion="5.17")
    module, config_name, router_name, values = MODELS[name]
    found = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config = getattr(importlib.import_module(f"transformers.models.{module}"), config_name)(
        **{"hidden_size": 32, "num_experts_per_tok": 4, **values}
    )
    if name == "kimi_k2":
        config = SimpleNamespace(**{**config.to_dict(), "model_type": "kimi_k2"})
    mine = Router.from_config(config)
    theirs = getattr(found, router_name)(config_of_theirs(config))
    tensors = dict(mine.named_parameters()) | dict(mine.named_buffers())
    others = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    pairs = {}
    for ours, names in NAMES.items():
        (other,) = [others.pop(n) for n in names if n in others] or [None]
        if name == "minimax_m2" and ours == "selection_bias":
            other = torch.zeros(16)  # an argument there
        assert (ours in tensors) == (other is not None), ours
        if other is not None:
            pairs[ours] = tensors[ours], other
    assert not others
    with torch.no_grad():
        for ours, (a, b) in pairs.items():
            b.copy_(a.normal_(std=0.3 if ours.endswith("bias") else 1 / math.sqrt(8)))
    x = torch.randn(200, 32)
    y = x.clone().requires_grad_()
    x.requires_grad_()
    routing = mine(x)
    got = dense(routing.topk_idx, routing.topk_weights, 16)
    if module == "llama4":
        want, _ = theirs(y)
        chosen = want.detach().topk(routing.topk_idx.shape[1]).indices
    else:
        extra = [pairs["selection_bias"][1]] if name == "minimax_m2" else []
        _, weights, chosen = theirs(y, *extra)
        want = dense(chosen, weights, 16)
    assert torch.equal(routing.topk_idx.sort().values, chosen.sort().values)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    by = torch.randn(200, 16)
    trained = [n for n, (a, _) in pairs.items() if a.requires_grad]
    ours = torch.autograd.grad((got * by).sum(), [x, *(pairs[n][0] for n in trained)])
    other = torch.autograd.grad((want * by).sum(), [y, *(pairs[n][1] for n in trained)])
    for n, a, b in zip(["x", *trained], ours, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=n)


def config_of_theirs(config: Any) -> Any:
    """Kimi-K2's fields by the name that DeepSeek-V3's router reads."""
    if getattr(config, "model_type", None) == "kimi_k2":
        return SimpleNamespace(**vars(config), num_local_experts=config.n_routed_experts)
    return config


# ---- Megatron -----------------------------------------------------------------------------------


def megatron_rule(
    logits: Tensor,
    bias: Tensor | None,
    score: str,
    pre_softmax: bool,
    top_k: int,
    groups: tuple[int, int] | None,
    factor: float | None,
) -> Tensor:
    """Megatron's dense probs [T, E] of float64 logits, a token at a time."""
    probs = torch.zeros_like(logits)
    for t, row in enumerate(logits):
        if score == "softmax":
            scores = torch.softmax(row, 0) if pre_softmax else row
        elif score == "sigmoid":
            scores = torch.sigmoid(row)
        else:
            scores = torch.sqrt(torch.nn.functional.softplus(row))
        compared = (scores if bias is None else scores + bias).tolist()
        if groups is not None:
            count, best = groups
            size = len(compared) // count
            parts = [compared[g * size : (g + 1) * size] for g in range(count)]
            value = [sum(sorted(part)[-(top_k // best) :]) for part in parts]
            kept = sorted(range(count), key=lambda g: value[g])[-best:]
            compared = [c if e // size in kept else float("-inf") for e, c in enumerate(compared)]
        chosen = sorted(range(len(compared)), key=lambda e: compared[e])[-top_k:]
        weights = scores[chosen]
        if score == "softmax":
            weights = weights if pre_softmax else torch.softmax(weights, 0)
        elif top_k > 1:
            weights = weights / weights.sum()
        probs[t, chosen] = weights * (factor or 1.0)
    return probs


def megatron_config(**options: Any) -> SimpleNamespace:
    given: dict[str, Any] = {
        "hidden_size": 32,
        "num_moe_experts": 16,
        "moe_router_topk": 4,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
        "moe_router_enable_expert_bias": False,
        "moe_router_load_balancing_type": "aux_loss",
        "add_bias_linear": False,
    }
    return SimpleNamespace(**given | options)


SETTINGS = [
    (score, pre, top_k, groups, factor, bias)
    for score, pre, top_k, groups, factor, bias in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus"),
        (False, True),
        (1, 2, 4, 8),
        (None, (4, 1), (4, 2), (2, 1), (8, 4)),
        (None, 2.5),
        (False, True),
    )
    if (score == "softmax" or not pre)
    and not (score == "softmax" and bias)
    and not (score == "softmax" and top_k == 1 and not pre)  # refused, as by Megatron
    and (groups is None or (top_k >= groups[1] and top_k <= 16 // groups[0] * groups[1]))
]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_megatron(score: str) -> None:
    x = torch.randn(20, 32)
    mine = [s for s in SETTINGS if s[0] == score]
    assert len(mine) > 20
    for _, pre, top_k, groups, factor, bias in mine:
        router = Router.from_config(
            megatron_config(
                moe_router_topk=top_k,
                moe_router_score_function=score,
                moe_router_pre_softmax=pre,
                moe_router_num_groups=groups and groups[0],
                moe_router_group_topk=groups and groups[1],
                moe_router_topk_scaling_factor=factor,
                moe_router_enable_expert_bias=bias,
            )
        )
        if router.selection_bias is not None:
            router.selection_bias.normal_(std=0.2)
        routing = router(x)
        logits = x.double() @ router.weight.double().T
        selection = None if router.selection_bias is None else router.selection_bias.double()
        want = megatron_rule(logits, selection, score, pre, top_k, groups, factor)
        got = dense(routing.topk_idx, routing.topk_weights, 16)
        assert torch.equal(got != 0, want != 0)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
        by = torch.randn(20, 16)
        a, b = (torch.autograd.grad((p * by).sum(), router.weight)[0] for p in (got, want))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_megatrons_bias_of_the_gate() -> None:
    assert Router.from_config(megatron_config(add_bias_linear=True)).bias is not None


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SimpleNamespace(model_type="bert"), "config must be of one of deepseek_v2, .*'bert'"),
        (SimpleNamespace(), "config must be of one of .* got 'SimpleNamespace'"),
        (
            megatron_config(moe_router_load_balancing_type=["aux_loss", "sinkhorn"]),
            "moe_router_load_balancing_type must be .* got 'sinkhorn'",
        ),
        (megatron_config(moe_router_score_function="tanh"), "score_function must be .*'tanh'"),
        (megatron_config(moe_router_enable_expert_bias=True), "with .*expert_bias; got 'softmax'"),
        (megatron_config(moe_input_jitter_eps=0.1), "moe_input_jitter_eps must be None; got 0.1"),
        (megatron_config(moe_router_topk=1), "top_k must be at least 2"),
        (
            SimpleNamespace(model_type="mixtral", router_jitter_noise=0.1),
            "router_jitter_noise must be 0.0; got 0.1",
        ),
        (
            SimpleNamespace(model_type="deepseek_v2", norm_topk_prob=True),
            "norm_topk_prob must be False; got True",
        ),
        (
            SimpleNamespace(model_type="gemma4_text", enable_moe_block=False),
            "enable_moe_block must be True; got False",
        ),
    ],
)
def test_what_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router.from_config(config)
