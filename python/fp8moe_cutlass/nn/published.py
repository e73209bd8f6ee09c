"""Routing rules of published models, read from their configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8moe_cutlass.nn.rule import RoutingRule

Sizes = tuple[int, int, int, RoutingRule]  # hidden_size, num_experts, top_k


def routing_of(config: Any) -> Sizes:
    """(hidden_size, num_experts, top_k, rule) of a transformers config or of Megatron's.

    By model_type: deepseek_v2, deepseek_v3, deepseek_v4 (layers that do not route by a hash),
    gemma4, glm4_moe, gpt_oss, kimi_k2, llama4, minimax_m2, mixtral, nemotron_h, qwen3_moe. A config
    without model_type but with moe_router_topk is Megatron's. Raises ValueError for another, and
    for a value that makes a model's rule one that this library does not have.
    """
    config = getattr(config, "text_config", None) or config
    model = getattr(config, "model_type", None)
    if model in _MODELS:
        return _MODELS[model](config)
    if model is None and hasattr(config, "moe_router_topk"):
        return _megatron(config)
    raise ValueError(
        f"[Router] config must be of one of {', '.join(sorted(_MODELS))}, or Megatron's; "
        f"got {model or type(config).__name__!r}"
    )


def _require(config: Any, name: str, *allowed: Any) -> None:
    """An option that has another rule with another value."""
    value = getattr(config, name, allowed[0])
    if value not in allowed:
        words = " or ".join(map(repr, allowed))
        raise ValueError(f"[Router] {name} must be {words}; got {value!r}")


def _deepseek_v2(config: Any) -> Sizes:
    _require(config, "norm_topk_prob", False)  # transformers ignores it, DeepSeek's code does not
    _require(config, "topk_method", "greedy", "group_limited_greedy")
    grouped = config.topk_method == "group_limited_greedy"
    rule = RoutingRule(
        num_groups=config.n_group if grouped else 1,
        topk_groups=config.topk_group if grouped else 1,
        best_per_group=1 if grouped else None,
        closed_value=0.0,
        normalize=False,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    return config.hidden_size, config.n_routed_experts, config.num_experts_per_tok, rule


def _deepseek_v3(config: Any) -> Sizes:
    """Also GLM-4.5, Kimi-K2 and Nemotron."""
    _require(config, "scoring_func", "sigmoid")
    _require(config, "topk_method", "noaux_tc")
    rule = RoutingRule(
        score="sigmoid",
        selection_bias=True,
        num_groups=config.n_group,
        topk_groups=config.topk_group,
        best_per_group=2,
        normalize=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    return config.hidden_size, config.n_routed_experts, config.num_experts_per_tok, rule


def _deepseek_v4(config: Any) -> Sizes:
    _require(config, "scoring_func", "sqrtsoftplus")
    _require(config, "norm_topk_prob", True)
    rule = RoutingRule(
        score="sqrt_softplus",
        selection_bias=True,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    return config.hidden_size, config.n_routed_experts, config.num_experts_per_tok, rule


def _gemma4(config: Any) -> Sizes:
    _require(config, "enable_moe_block", True)
    rule = RoutingRule(input_norm_eps=config.rms_norm_eps, expert_scale=True)
    return config.hidden_size, config.num_experts, config.top_k_experts, rule


def _gpt_oss(config: Any) -> Sizes:
    rule = RoutingRule(softmax_after_topk=True, select_by="logits", gate_bias=True)
    return config.hidden_size, config.num_local_experts, config.num_experts_per_tok, rule


def _llama4(config: Any) -> Sizes:
    rule = RoutingRule(score="sigmoid", select_by="logits", normalize=False)
    return config.hidden_size, config.num_local_experts, config.num_experts_per_tok, rule


def _minimax_m2(config: Any) -> Sizes:
    _require(config, "scoring_func", "sigmoid")
    _require(config, "router_jitter_noise", 0.0)
    rule = RoutingRule(score="sigmoid", selection_bias=True)
    return config.hidden_size, config.num_local_experts, config.num_experts_per_tok, rule


def _mixtral(config: Any) -> Sizes:
    _require(config, "router_jitter_noise", 0.0)
    return config.hidden_size, config.num_local_experts, config.num_experts_per_tok, RoutingRule()


def _qwen3(config: Any) -> Sizes:
    rule = RoutingRule(normalize=config.norm_topk_prob)
    return config.hidden_size, config.num_experts, config.num_experts_per_tok, rule


def _megatron(config: Any) -> Sizes:
    _require(config, "moe_router_score_function", "softmax", "sigmoid", "sqrtsoftplus")
    kinds = config.moe_router_load_balancing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"):
            raise ValueError(
                "[Router] moe_router_load_balancing_type must be 'aux_loss', 'seq_aux_loss', "
                f"'global_aux_loss' or 'none'; got {kind!r}"
            )
    _require(config, "moe_input_jitter_eps", None)
    top_k, groups = config.moe_router_topk, config.moe_router_group_topk
    bias, factor = config.moe_router_enable_expert_bias, config.moe_router_topk_scaling_factor
    softmax = config.moe_router_score_function == "softmax"
    if softmax and bias:
        raise ValueError(
            "[Router] moe_router_score_function must be 'sigmoid' or 'sqrtsoftplus' with "
            "moe_router_enable_expert_bias; got 'softmax'"
        )
    after = softmax and not config.moe_router_pre_softmax
    scores = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}
    rule = RoutingRule(
        score=scores[config.moe_router_score_function],  # type: ignore[arg-type]
        select_by="logits" if after else "scores",
        selection_bias=bias,
        num_groups=config.moe_router_num_groups if groups else 1,
        topk_groups=groups or 1,
        best_per_group=top_k // groups if groups else None,
        gate_bias=config.add_bias_linear,
        softmax_after_topk=after,
        normalize=not softmax and top_k > 1,
        routed_scaling_factor=factor or 1.0,
    )
    return config.hidden_size, config.num_moe_experts, top_k, rule


_MODELS: dict[str, Callable[[Any], Sizes]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v4": _deepseek_v4,
    "gemma4_text": _gemma4,
    "glm4_moe": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek_v3,
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "nemotron_h": _deepseek_v3,
    "qwen3_moe": _qwen3,
}
