"""RoutingRule: how a router scores experts, chooses among them and weights what it chose."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal

from fp8moe_cutlass.nn._validate import check_bool, check_int, check_number

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]


@dataclass(frozen=True, kw_only=True)
class RoutingRule:
    """The rule by which a Router gets from logits [T, E] to top_k experts and weights per token.

    The defaults are Mixtral's rule, which is Qwen3's with norm_topk_prob: softmax over all experts,
    then the top k, then weights that sum to 1. docs/reference/routers.md has the other models'.

    Which experts:
    score: "softmax" over the experts, or "sigmoid" or "sqrt_softplus" of each.
    select_by: whether groups and top-k compare the "scores" or the "logits". The default is that of
      all models but Llama 4 and those with softmax_after_topk.
    selection_bias: a buffer [E] is added to what is compared, and not to the weights (DeepSeek-V3;
      `Router.update_selection_bias` moves it). Default: none, as where a loss balances.
    num_groups, topk_groups: experts come from the topk_groups best of num_groups equal groups. The
      default, 1 of 1, leaves every expert open.
    best_per_group: a group's score is the sum of this many of its best. Models differ, so it has no
      default: 1 in DeepSeek-V2, 2 in DeepSeek-V3, top_k // topk_groups in Megatron.
    closed_value: what is compared for an expert outside the best groups. -inf, the default, is
      that of Megatron, DeepSeek-V3's own code and transformers 5.17. Older transformers had 0,
      which beats a negative biased score.

    Which logits:
    gate_bias: a learned bias [E] is added to the logits (GPT-OSS).
    input_norm_eps: the gate reads x / sqrt(mean(x^2) + input_norm_eps) times a learned scale [H]
      over sqrt(H) (Gemma 4); None: x itself.

    Which weights:
    softmax_after_topk: they are the softmax of the k chosen logits (GPT-OSS; Megatron without
      pre_softmax). It takes select_by="logits".
    normalize: they sum to 1, up to `epsilon` in the sum's denominator; then
    routed_scaling_factor multiplies them, then
    expert_scale: a learned scale [E], that of the chosen expert (Gemma 4).
    constant_weights: accept top_k = 1 with weights that sum to 1. Each is then constant, and the
      gate learns from losses alone; a Router refuses that otherwise.
    """

    score: Score = "softmax"
    select_by: Literal["scores", "logits"] = "scores"
    selection_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    best_per_group: int | None = None
    closed_value: float = -math.inf
    gate_bias: bool = False
    input_norm_eps: float | None = None
    softmax_after_topk: bool = False
    normalize: bool = True
    epsilon: float = 1e-20
    routed_scaling_factor: float = 1.0
    expert_scale: bool = False
    constant_weights: bool = False

    def __post_init__(self) -> None:
        for name, value, words in (
            ("score", self.score, ("softmax", "sigmoid", "sqrt_softplus")),
            ("select_by", self.select_by, ("scores", "logits")),
            ("closed_value", self.closed_value, (0.0, -math.inf)),
        ):
            if isinstance(value, bool) or not isinstance(value, str | Real) or value not in words:
                raise ValueError(f"[RoutingRule] {name} must be one of {words}; got {value!r}")
        for name in ("num_groups", "topk_groups"):
            check_int("RoutingRule", name, getattr(self, name))
        if self.best_per_group is not None:
            check_int("RoutingRule", "best_per_group", self.best_per_group)
        for field in fields(self):
            if isinstance(field.default, bool):
                check_bool("RoutingRule", field.name, getattr(self, field.name))
        check_number("RoutingRule", "epsilon", self.epsilon)
        check_number("RoutingRule", "routed_scaling_factor", self.routed_scaling_factor)
        if self.input_norm_eps is not None:
            check_number("RoutingRule", "input_norm_eps", self.input_norm_eps)
        if self.num_groups < 1:
            raise ValueError(f"[RoutingRule] num_groups must be at least 1; got {self.num_groups}")
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"[RoutingRule] topk_groups must be in [1, {self.num_groups}]; "
                f"got {self.topk_groups}"
            )
        if self.has_closed_groups and self.best_per_group is None:
            raise ValueError(
                "[RoutingRule] best_per_group must be given with groups: 1 as in DeepSeek-V2, 2 as "
                "in DeepSeek-V3, top_k // topk_groups as in Megatron; got None"
            )
        if self.softmax_after_topk and (self.score, self.select_by) != ("softmax", "logits"):
            raise ValueError(
                "[RoutingRule] softmax_after_topk must come with score 'softmax' and select_by "
                f"'logits'; got {self.score!r} and {self.select_by!r}"
            )
        if self.selection_bias and self.select_by == "logits":
            raise ValueError(
                "[RoutingRule] selection_bias must come with select_by 'scores'; got 'logits'"
            )

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError if this rule cannot choose top_k of num_experts."""
        if num_experts % self.num_groups:
            raise ValueError(
                f"[Router] num_groups must divide num_experts {num_experts}; got {self.num_groups}"
            )
        size = num_experts // self.num_groups
        if self.best_per_group is not None and not 1 <= self.best_per_group <= size:
            raise ValueError(
                f"[Router] best_per_group must be in [1, {size}]; got {self.best_per_group}"
            )
        reachable = size * self.topk_groups
        if not 1 <= top_k <= reachable:
            raise ValueError(f"[Router] top_k must be in [1, {reachable}]; got {top_k}")
        if top_k == 1 and self.sums_to_one and not self.constant_weights:
            raise ValueError(
                "[Router] top_k must be at least 2 with weights that sum to 1; got 1, whose weight "
                "is constant and gives the gate no gradient: pass RoutingRule(normalize=False), "
                "or constant_weights=True"
            )

    @property
    def has_closed_groups(self) -> bool:
        """Whether some experts are out of reach for a token."""
        return self.topk_groups < self.num_groups

    @property
    def sums_to_one(self) -> bool:
        """Whether a token's weights sum to routed_scaling_factor."""
        return self.normalize or self.softmax_after_topk

    def options(self) -> dict[str, Any]:
        """The arguments of ops.router_topk that this rule stands for."""
        return {
            "score": self.score,
            "select_by": self.select_by,
            "num_groups": self.num_groups,
            "topk_groups": self.topk_groups,
            "best_per_group": 1 if self.best_per_group is None else self.best_per_group,
            "closed_value": self.closed_value,
            "softmax_after_topk": self.softmax_after_topk,
            "normalize": self.normalize,
            "epsilon": self.epsilon,
            "routed_scaling_factor": self.routed_scaling_factor,
        }
