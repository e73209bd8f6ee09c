"""Routing rules of published models, read from their configs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fp8moe_cutlass.nn.rule import RoutingRule

Sizes = tuple[int, int, int, RoutingRule]  # hidden_size, num_experts, top_k


def routing_of(config: Any) -> Sizes:
    """(hidden_size, num_experts, top_k, rule) of a transformers config or of Megatron's.

    A transformers config is known by its model_type (docs/reference/routers.md lists them). A
    config without one but with moe_router_topk is Megatron's. Raises ValueError for another, and
    for a value that makes a model's rule one that this library does not have.
    """
    config = getattr(config, "text_config", None) or config
    model = getattr(config, "model_type", None)
    if model is None and hasattr(config, "moe_router_topk"):
        rule = _megatron(config)
        return config.hidden_size, config.num_moe_experts, config.moe_router_topk, rule
    if model in _REFUSED:
        raise ValueError(
            f"[Router] config must be of another model than {model}: {_REFUSED[model]}"
        )
    if model not in _RULES:
        raise ValueError(
            f"[Router] config must be of one of {', '.join(sorted(_RULES))}, or Megatron's; "
            f"got {model or type(config).__name__!r}"
        )
    rule = _RULES[model](config)
    experts = _first(config, "n_routed_experts", "num_local_experts", "num_experts")
    top_k = _first(config, "num_experts_per_tok", "top_k_experts")
    return config.hidden_size, experts, top_k, rule


def _first(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise ValueError(f"[Router] config must have an int {' or '.join(names)}; got none")


def _require(config: Any, name: str, *allowed: Any) -> None:
    """An option that has another rule with another value."""
    value = getattr(config, name, allowed[0])
    if value not in allowed:
        words = " or ".join(map(repr, allowed))
        raise ValueError(f"[Router] {name} must be {words}; got {value!r}")


# ---- softmax ------------------------------------------------------------------------------------


def _softmax(config: Any) -> RoutingRule:
    """Qwen3's: softmax, the top k, normalized unless the config says otherwise."""
    return RoutingRule(normalize=getattr(config, "norm_topk_prob", True))


def _mixtral(config: Any) -> RoutingRule:
    """Softmax, the top k, normalized whatever the config says."""
    _require(config, "router_jitter_noise", 0.0)
    _require(config, "norm_topk_prob", True)
    return RoutingRule()


def _softmax_of_the_chosen(config: Any) -> RoutingRule:
    return RoutingRule(softmax_after_topk=True, select_by="logits")


def _gpt_oss(config: Any) -> RoutingRule:
    return RoutingRule(softmax_after_topk=True, select_by="logits", gate_bias=True)


def _gemma4(config: Any) -> RoutingRule:
    _require(config, "enable_moe_block", True)
    return RoutingRule(input_norm_eps=config.rms_norm_eps, expert_scale=True)


def _deepseek_v2(config: Any) -> RoutingRule:
    _require(config, "norm_topk_prob", False)  # transformers ignores it, DeepSeek's code does not
    _require(config, "topk_method", "greedy", "group_limited_greedy")
    grouped = config.topk_method == "group_limited_greedy"
    return RoutingRule(
        num_groups=config.n_group if grouped else 1,
        topk_groups=config.topk_group if grouped else 1,
        best_per_group=1 if grouped else None,
        closed_value=0.0,
        normalize=False,
        routed_scaling_factor=config.routed_scaling_factor,
    )


def _mistral4(config: Any) -> RoutingRule:
    return RoutingRule(
        num_groups=config.n_group,
        topk_groups=config.topk_group,
        best_per_group=2,
        closed_value=0.0,
        normalize=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
    )


def _ernie4_5(config: Any) -> RoutingRule:
    _require(config, "norm_topk_prob", True)
    return RoutingRule(selection_bias=True)


def _longcat_flash(config: Any) -> RoutingRule:
    _require(config, "zero_expert_num", 0, None)
    _require(config, "router_bias", False)
    return RoutingRule(
        selection_bias=True, normalize=False, routed_scaling_factor=config.routed_scaling_factor
    )


# ---- sigmoid and sqrt of softplus ---------------------------------------------------------------


def _sigmoid_groups(
    config: Any, num_groups: int, topk_groups: int, normalize: bool, closed_value: float = -math.inf
) -> RoutingRule:
    """Sigmoid, selection bias, groups by their two best."""
    return RoutingRule(
        score="sigmoid",
        selection_bias=True,
        num_groups=num_groups,
        topk_groups=topk_groups,
        best_per_group=2,
        closed_value=closed_value,
        normalize=normalize,
        routed_scaling_factor=config.routed_scaling_factor,
    )


def _deepseek_v3(config: Any) -> RoutingRule:
    _require(config, "scoring_func", "sigmoid")
    _require(config, "topk_method", "noaux_tc")
    return _sigmoid_groups(config, config.n_group, config.topk_group, config.norm_topk_prob)


def _kimi_linear(config: Any) -> RoutingRule:
    _require(config, "moe_router_activation_func", "sigmoid")
    groups, best = config.num_expert_group, config.topk_group
    return _sigmoid_groups(config, groups, best, config.moe_renormalize)


def _axk2(config: Any) -> RoutingRule:
    groups, best = config.n_group or 1, config.topk_group or 1
    return _sigmoid_groups(config, groups, best, config.norm_topk_prob, closed_value=0.0)


def _sigmoid_times(factor: str | None = None) -> Callable[[Any], RoutingRule]:
    """Sigmoid, selection bias, normalized, times the config's `factor`."""

    def rule(config: Any) -> RoutingRule:
        _require(config, "scoring_func", "sigmoid")
        _require(config, "router_jitter_noise", 0.0)
        _require(config, "moe_router_logit_softcapping", 0.0)
        _require(config, "norm_topk_prob", True)
        _require(config, "route_norm", True)
        times = 1.0 if factor is None else getattr(config, factor)
        return RoutingRule(score="sigmoid", selection_bias=True, routed_scaling_factor=times)

    return rule


def _lfm2(config: Any) -> RoutingRule:
    return RoutingRule(
        score="sigmoid",
        selection_bias=config.use_expert_bias,
        normalize=config.norm_topk_prob,
        epsilon=1e-6,
        routed_scaling_factor=config.routed_scaling_factor,
    )


def _llama4(config: Any) -> RoutingRule:
    return RoutingRule(score="sigmoid", select_by="logits", normalize=False)


def _cohere2(config: Any) -> RoutingRule:
    _require(config, "expert_selection_fn", "softmax", "sigmoid")
    if config.expert_selection_fn == "softmax":
        return _softmax_of_the_chosen(config)
    return RoutingRule(score="sigmoid", select_by="logits", normalize=config.norm_topk_prob)


def _deepseek_v4(config: Any) -> RoutingRule:
    _require(config, "scoring_func", "sqrtsoftplus")
    _require(config, "norm_topk_prob", True)
    return RoutingRule(
        score="sqrt_softplus",
        selection_bias=True,
        routed_scaling_factor=config.routed_scaling_factor,
    )


# ---- Megatron -----------------------------------------------------------------------------------


def _megatron(config: Any) -> RoutingRule:
    kinds = config.moe_router_load_balancing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"):
            raise ValueError(
                "[Router] moe_router_load_balancing_type must be 'aux_loss', 'seq_aux_loss', "
                f"'global_aux_loss' or 'none'; got {kind!r}"
            )
    _require(config, "moe_input_jitter_eps", None)
    _require(config, "moe_expert_capacity_factor", None)
    _require(config, "moe_router_force_load_balancing", False)
    return megatron_rule(
        config.moe_router_topk,
        score_function=config.moe_router_score_function,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        expert_bias=config.moe_router_enable_expert_bias,
        gate_bias=config.add_bias_linear,
    )


def megatron_rule(
    top_k: int,
    *,
    score_function: str,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    expert_bias: bool,
    gate_bias: bool = False,
) -> RoutingRule:
    """The rule of Megatron's topk_routing_with_score_function, by its arguments."""
    scores = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}
    if score_function not in scores:
        raise ValueError(
            f"[Router] moe_router_score_function must be one of {', '.join(scores)}; "
            f"got {score_function!r}"
        )
    softmax = score_function == "softmax"
    if softmax and expert_bias:
        raise ValueError(
            "[Router] moe_router_score_function must be 'sigmoid' or 'sqrtsoftplus' with "
            "moe_router_enable_expert_bias; got 'softmax'"
        )
    after = softmax and not use_pre_softmax
    return RoutingRule(
        score=scores[score_function],  # type: ignore[arg-type]
        select_by="logits" if after else "scores",
        selection_bias=expert_bias,
        num_groups=num_groups or 1 if group_topk else 1,
        topk_groups=group_topk or 1,
        best_per_group=top_k // group_topk if group_topk else None,
        gate_bias=gate_bias,
        softmax_after_topk=after,
        normalize=not softmax and top_k > 1,
        routed_scaling_factor=scaling_factor or 1.0,
    )


# ---- by model_type ------------------------------------------------------------------------------

_FAMILIES: dict[Callable[[Any], RoutingRule], str] = {
    _softmax: (
        "flex_olmo mellum olmoe qwen2_moe qwen3_moe qwen3_next qwen3_omni_moe_talker_text "
        "qwen3_omni_moe_text qwen4_exp_text"
    ),
    _mixtral: "hunyuan_v1_moe minimax mixtral qwen3_5_moe_text qwen3_vl_moe_text",
    _softmax_of_the_chosen: "granitemoe granitemoe_swa granitemoehybrid granitemoeshared jetmoe",
    _gpt_oss: "gpt_oss openai_privacy_filter",
    _gemma4: "diffusion_gemma_text gemma4_text",
    _deepseek_v2: "deepseek_ocr2_text deepseek_v2",
    _mistral4: "mistral4",
    _ernie4_5: "ernie4_5_moe ernie4_5_vl_moe_text",
    _longcat_flash: "longcat_flash",
    _deepseek_v3: (
        "axk1 deepseek_v3 deepseek_v32 dots1 exaone_moe glm4_moe glm4_moe_lite glm4v_moe_text "
        "glm5_next_text glm_moe_dsa hy_v4 kimi_k2 mimo_v2_flash nemotron_h solar_open"
    ),
    _kimi_linear: "kimi_linear",
    _axk2: "axk2",
    _sigmoid_times(): "minimax_m2",
    _sigmoid_times("routed_scaling_factor"): "minimax_m3_vl_text",
    _sigmoid_times("moe_router_scaling_factor"): "step3p5",
    _sigmoid_times("moe_routed_scaling_factor"): "laguna",
    _sigmoid_times("router_scaling_factor"): "hy_v3",
    _sigmoid_times("route_scale"): "afmoe",
    _lfm2: "lfm2_moe",
    _llama4: "llama4_text",
    _cohere2: "cohere2_moe",
    _deepseek_v4: "deepseek_v4",
}
_RULES = {model: rule for rule, models in _FAMILIES.items() for model in models.split()}
_REFUSED = {
    "dbrx": "its weights are over their p-norm",
    "inkling_text": "its shared experts are part of the normalization",
    "nllb-moe": "it drops tokens beyond a capacity",
    "phimoe": "it routes by a sparse mixer",
    "switch_transformers": "it drops tokens beyond a capacity",
    "zaya": "its gate is a network over the layers",
}
