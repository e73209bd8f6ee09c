"""Router: which experts a token goes to, with what weights, and the loss that balances them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe_cutlass.autograd import gate_logits
from fp8moe_cutlass.distributed import Shared


class Routing(NamedTuple):
    """What a router decides for T tokens."""

    topk_idx: Tensor  # [T, top_k] i64
    topk_weights: Tensor  # [T, top_k] f32, differentiable
    aux_loss: Tensor  # [] f32, differentiable
    tokens_per_expert: Tensor  # [E] i64; with a group, of all its ranks


class Router(nn.Module):
    """Scores of a linear gate in float32, then the top k experts of each token.

    The gate is float32 whatever autocast says. bfloat16 tokens on CUDA meet its weight as three
    bfloat16 parts on the tensor core, which sums in float32 (autograd.gate_logits says what that
    rounds); other tokens are cast to float32.
    score_function: "softmax" over the experts, or "sigmoid" of each.
    selection_bias: a buffer [E] added to the scores to choose experts, not to weight them
      (auxiliary-loss-free balancing, DeepSeek-V3); `update_selection_bias` moves it.
    num_groups, topk_groups: experts are chosen within the topk_groups best of num_groups equal
      groups; a group's score is the sum of its two best experts' (its best, where a group has one).
    normalize: weights sum to 1 before routed_scaling_factor multiplies them.
    Auxiliary loss (Switch Transformers, eq. 4, for top k): E * sum over e of
    (share of assignments e received) * (mean probability of e); 1 when balanced.
    group: a torch.distributed process group whose ranks route parts of one batch. The shares are
      then those of the whole batch, the probabilities of this rank's tokens: the ranks' losses,
      averaged by their tokens, are the loss of one process. Collective.
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: str = "softmax",
        selection_bias: bool = False,
        num_groups: int = 1,
        topk_groups: int = 1,
        normalize: bool = True,
        routed_scaling_factor: float = 1.0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if score_function not in ("softmax", "sigmoid"):
            raise ValueError(
                f"[Router] score_function must be 'softmax' or 'sigmoid'; got {score_function!r}"
            )
        for name, size in (("hidden_size", hidden_size), ("num_experts", num_experts)):
            if size < 1:
                raise ValueError(f"[Router] {name} must be at least 1; got {size}")
        if num_groups < 1 or num_experts % num_groups:
            raise ValueError(
                f"[Router] num_groups must divide num_experts {num_experts}; got {num_groups}"
            )
        if not 1 <= topk_groups <= num_groups:
            raise ValueError(
                f"[Router] topk_groups must be in [1, {num_groups}]; got {topk_groups}"
            )
        reachable = num_experts // num_groups * topk_groups
        if not 1 <= top_k <= reachable:
            raise ValueError(f"[Router] top_k must be in [1, {reachable}]; got {top_k}")
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.score_function = score_function
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.normalize = normalize
        self.routed_scaling_factor = routed_scaling_factor
        self._group = Shared(group)
        factory: Any = {"dtype": torch.float32, "device": device}
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, **factory))
        self.register_buffer(
            "selection_bias", torch.zeros(num_experts, **factory) if selection_bias else None
        )
        self.reset_parameters()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that route one batch; None: this one alone."""
        return self._group.group

    @group.setter
    def group(self, group: dist.ProcessGroup | None) -> None:
        self._group = Shared(group)

    def reset_parameters(self) -> None:
        """Uniform within 1/sqrt(hidden_size), the selection bias 0."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def forward(self, x: Tensor) -> Routing:
        """x [T, H] -> Routing."""
        if x.ndim != 2 or x.shape[1] != self.hidden_size:
            raise ValueError(f"[Router] x must be [T, {self.hidden_size}]; got {tuple(x.shape)}")
        logits = gate_logits(x, self.weight)
        if self.score_function == "softmax":
            scores = probability = logits.softmax(dim=-1)
        else:
            scores = logits.sigmoid()
            probability = _shares(scores)
        topk_idx = self._select(scores.detach())
        topk_weights = scores.gather(1, topk_idx)
        if self.normalize:
            topk_weights = _shares(topk_weights)
        if self.routed_scaling_factor != 1.0:
            topk_weights = topk_weights * self.routed_scaling_factor

        chosen = topk_idx.flatten()
        counts = chosen.new_zeros(self.num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        tokens = max(x.shape[0], 1)
        routed: Tensor | int = tokens * self.top_k
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
            routed = counts.sum().clamp(min=1)
        share = counts.float() / routed
        aux_loss = self.num_experts * (share * probability.sum(dim=0) / tokens).sum()
        return Routing(topk_idx, topk_weights, aux_loss, counts)

    @torch.no_grad()
    def update_selection_bias(self, tokens_per_expert: Tensor, rate: float = 1e-3) -> None:
        """Raise the bias of experts below the mean load by `rate`, lower that of those above."""
        if self.selection_bias is None:
            raise ValueError("[Router] update_selection_bias needs selection_bias=True")
        load = tokens_per_expert.float()
        self.selection_bias.add_(torch.sign(load.mean() - load), alpha=rate)

    def _select(self, scores: Tensor) -> Tensor:
        """The top k experts of each token [T, top_k], best first."""
        choice = scores if self.selection_bias is None else scores + self.selection_bias
        if self.topk_groups < self.num_groups:
            groups = choice.view(-1, self.num_groups, self.num_experts // self.num_groups)
            best = groups.topk(min(2, groups.shape[-1]), sorted=False).values.sum(dim=-1)
            chosen = best.topk(self.topk_groups, sorted=False).indices
            closed = torch.full_like(best, float("-inf")).scatter_(1, chosen, 0.0)
            choice = (groups + closed[..., None]).flatten(1)
        return choice.topk(self.top_k, dim=-1).indices


def _shares(scores: Tensor) -> Tensor:
    """scores [T, k] over their sum; 0 where all are 0."""
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
