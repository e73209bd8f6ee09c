"""Router: which experts a token goes to, with what weights, and the losses that balance them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe_cutlass.autograd.arguments import check_tensor
from fp8moe_cutlass.autograd.router_logits import run as router_logits
from fp8moe_cutlass.autograd.router_topk import run as router_topk
from fp8moe_cutlass.distributed.exchange import Shared, check_group
from fp8moe_cutlass.distributed.shards import is_sharded
from fp8moe_cutlass.nn._validate import (
    MOST_CHOSEN,
    MOST_EXPERTS,
    check_device,
    check_int,
    check_number,
    check_size,
)
from fp8moe_cutlass.nn.losses import LossCoefficients, Routing, check_routing, with_loss, z_loss
from fp8moe_cutlass.nn.published import routing_of
from fp8moe_cutlass.nn.rule import RoutingRule
from fp8moe_cutlass.ops._torch import refuse_transforms

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Router(nn.Module):
    """Scores of a linear gate in float32, then the top k experts of each token by `rule`.

    The gate is float32 whatever autocast says. bfloat16 tokens on CUDA meet its weight as three
    bfloat16 parts on the tensor core, which sums in float32 (autograd.router_logits says what that
    rounds); other tokens are cast to float32. The selection bias stays float32 when the module is
    cast: bfloat16 would lose its small steps.
    Of equal scores the lower expert wins, and of equal groups the lower group, on every device.
    coefficients: the losses that reach the gradients by themselves; may be assigned between steps.
    group: a torch.distributed process group whose ranks route parts of one batch; collective.
      tokens_per_expert is then that of the whole batch, and balancing_loss says what it counts.
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        rule: RoutingRule = RoutingRule(),  # noqa: B008 (frozen)
        *,
        coefficients: LossCoefficients = LossCoefficients(),  # noqa: B008 (frozen)
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("num_experts", num_experts)):
            check_size("Router", name, size)
        check_device("Router", device)
        if num_experts > MOST_EXPERTS:
            raise ValueError(
                f"[Router] num_experts must be at most {MOST_EXPERTS}; got {num_experts}"
            )
        check_int("Router", "top_k", top_k)
        if top_k > MOST_CHOSEN:
            raise ValueError(f"[Router] top_k must be at most {MOST_CHOSEN}; got {top_k}")
        if not isinstance(rule, RoutingRule):
            raise ValueError(f"[Router] rule must be a RoutingRule; got {rule!r}")
        rule.check(num_experts, top_k)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self._rule = rule
        self._coefficients = _coefficients(coefficients)
        self._group = _shared(group)

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, dtype=torch.float32, device=device))

        self.weight = empty(num_experts, hidden_size)
        self.bias = empty(num_experts) if rule.gate_bias else None
        self.input_scale = None if rule.input_norm_eps is None else empty(hidden_size)
        self.expert_scale = empty(num_experts) if rule.expert_scale else None
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device)
        self.register_buffer("selection_bias", bias if rule.selection_bias else None)
        self.reset_parameters()

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        coefficients: LossCoefficients = LossCoefficients(),  # noqa: B008 (frozen)
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> Router:
        """The router of a model, from its transformers config or Megatron's TransformerConfig.

        Raises ValueError for a model that is not in docs/reference/routers.md.
        """
        sizes = routing_of(config)
        return cls(*sizes, coefficients=coefficients, group=group, device=device)

    @property
    def rule(self) -> RoutingRule:
        """The rule as given; read-only, since the parameters are those it names."""
        return self._rule

    @property
    def coefficients(self) -> LossCoefficients:
        """The coefficients of the losses that reach the gradients by themselves."""
        return self._coefficients

    @coefficients.setter
    def coefficients(self, coefficients: LossCoefficients) -> None:
        self._coefficients = _coefficients(coefficients)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that route one batch; None: this one alone."""
        return self._group.group

    @group.setter
    def group(self, group: dist.ProcessGroup | None) -> None:
        self._group = _shared(group)

    def extra_repr(self) -> str:
        rule = [(f.name, getattr(self.rule, f.name), f.default) for f in fields(self.rule)]
        told = {name: value for name, value, usual in rule if value != usual}
        told |= {name: value for name, value in vars(self.coefficients).items() if value}
        sizes = ("num_experts", "hidden_size", "top_k")
        said = {name: getattr(self, name) for name in sizes} | told
        return ", ".join(f"{name}={value!r}" for name, value in said.items())

    def reset_parameters(self) -> None:
        """The weight uniform within 1/sqrt(hidden_size), biases 0, scales 1."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight, -bound, bound)
        for bias in (self.bias, self.selection_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for scale in (self.input_scale, self.expert_scale):
            if scale is not None:
                nn.init.ones_(scale)

    def forward(
        self,
        x: Tensor,
        *,
        topk_idx: Tensor | None = None,
        padding: Tensor | None = None,
        sequences: int = 1,
    ) -> Routing:
        """x [T, H] -> Routing.

        topk_idx [T, top_k], integers in [0, num_experts): the experts to take instead of the best
        (replay). Weights, scores and losses are those of x all the same. A token may name an expert
        twice. -1 names none: its weight is 0, and the others' are as if it were not there. Other
        ids raise on the CPU; on a GPU their weights are NaN.
        padding [T] bool, True for padding (attention_mask == 0): tokens that no loss and no load
        counts; they are routed all the same. One that is not finite is routed as zeros, and reaches
        no gradient here.
        sequences: the tokens are this many sequences of equal length, one after the other.
        """
        self._check(x, topk_idx, padding)
        check_size("Router", "sequences", sequences)
        topk_idx = None if topk_idx is None else topk_idx.long()
        logits = self._logits(x if padding is None else _finite(x, padding))
        arrays = (logits, self.selection_bias, padding, topk_idx)
        chosen = router_topk(arrays, self.top_k, 1, self._rule.options())
        scores, idx, topk_weights, counts = chosen
        if self.expert_scale is not None:
            topk_weights = topk_weights * self.expert_scale.float()[idx]
        if padding is not None:  # whose gradient may be NaN
            topk_weights = torch.where(padding[:, None], topk_weights.detach(), topk_weights)
        counts, replayed = self._summed(counts), topk_idx is not None
        routing = Routing(idx, topk_weights, logits, scores, counts, padding, replayed, {})
        losses = self._losses(routing, sequences)
        for name, loss in losses.items():
            topk_weights = with_loss(topk_weights, loss * getattr(self._coefficients, name))
            losses[name] = loss.detach()
        # Made anew: torch 2.11's dynamo cannot return what _replace makes.
        return Routing(idx, topk_weights, logits, scores, counts, padding, replayed, losses)

    def balancing_loss(
        self, routing: Routing, *, sequences: int | None = None, counts: Tensor | None = None
    ) -> Tensor:
        """E / (k T) * sum over e of n_e * (mean over tokens of p_te), a scalar; 1 when balanced.

        p is the softmax, or each score over the sum of the token's. n_e counts the tokens that have
        e among their k best scores, without bias and groups, as Megatron does; for k = 1 this is
        eq. 4 of Switch Transformers. Padding counts nowhere.
        sequences: the tokens are this many sequences of equal length, one after the other, and the
          loss is the mean of theirs (DeepSeek-V3), each with its own n_e and T, with a group too.
          A sequence of padding has loss 0.
        Without sequences, a group's n_e and T are those of all ranks, p of this rank's tokens: the
        ranks' losses, averaged by their tokens, are the loss of one process. Collective.
        counts: [E], take these n_e and their T instead, such as the sum of `count(routing)` over
          the microbatches of a step so far (Megatron's global_aux_loss).
        """
        check_routing("Router", routing)
        tokens = routing.scores.shape[0]
        if sequences is not None:
            check_int("Router", "sequences", sequences)
            if sequences < 1 or tokens % sequences:
                raise ValueError(
                    f"[Router] sequences must divide the number of tokens {tokens}; got {sequences}"
                )
        if counts is None:
            counts = self._counted(routing, sequences)
        elif sequences is not None:
            raise ValueError(f"[Router] counts must come without sequences; got {sequences}")
        else:
            self._check_load("counts", counts)
        sequences = sequences or 1
        each = tokens // sequences
        p = routing.scores
        if routing.padding is not None:
            p = p.masked_fill(routing.padding[:, None], 0.0)  # by no product: 0 * NaN is NaN
        if self._rule.score != "softmax":
            p = p / (p.sum(dim=1, keepdim=True) + 1e-20)
        counts = counts.view(sequences, self.num_experts)
        share = counts.float() / counts.sum(dim=1, keepdim=True).clamp(min=1)
        length: Tensor | int = max(each, 1)
        if routing.padding is not None:
            real = ~routing.padding
            length = real.view(sequences, each).sum(dim=1, keepdim=True).clamp(min=1)
        p = p.view(sequences, each, self.num_experts).sum(dim=1)
        loss: Tensor = self.num_experts * (share * p / length).sum(dim=1).mean()
        return loss

    def count(self, routing: Routing) -> Tensor:
        """[E] i64, the n_e of balancing_loss: how many tokens have e among their k best scores,
        without bias, groups and padding; with a group, on all ranks. Collective."""
        check_routing("Router", routing)
        return self._counted(routing, None)

    @torch.no_grad()
    def update_selection_bias(self, tokens_per_expert: Tensor, rate: float = 1e-3) -> None:
        """Raise the bias of experts below the mean load by `rate`, lower that of those above.

        Once per step, after all backwards: a checkpointed forward runs again in its backward, and
        must route by the same bias. tokens_per_expert [E] must be that of all ranks that route
        parts of one batch, as with a group it is, or their biases will differ.
        """
        if self.selection_bias is None:
            raise ValueError("[Router] update_selection_bias needs selection_bias=True")
        self._check_load("tokens_per_expert", tokens_per_expert)
        check_number("Router", "rate", rate)
        load = tokens_per_expert.float()
        self.selection_bias.add_(torch.sign(load.mean() - load), alpha=rate)

    def _check(self, x: Tensor, topk_idx: Tensor | None, padding: Tensor | None) -> None:
        refuse_transforms("Router", x, self.weight)
        # By tensor parallelism: x may be a DTensor, too.
        parallel = hasattr(self.weight, "full_tensor")
        check_tensor("Router", "x", x, distributed=parallel)
        if x.ndim != 2 or x.shape[1] != self.hidden_size:
            raise ValueError(f"[Router] x must be [T, {self.hidden_size}]; got {tuple(x.shape)}")
        tokens = x.shape[0]
        true = ", True for padding (attention_mask == 0)"
        for name, given, kind, dtypes, shape, more in (
            ("topk_idx", topk_idx, "integers", _INTEGERS, (tokens, self.top_k), ""),
            ("padding", padding, "bool", (torch.bool,), (tokens,), true),
        ):
            if given is None:
                continue
            check_tensor("Router", name, given, distributed=parallel)
            if given.dtype not in dtypes or given.shape != shape:
                raise ValueError(
                    f"[Router] {name} must be {kind} {list(shape)}{more}; "
                    f"got {given.dtype} {tuple(given.shape)}"
                )
        for name, given in (("x", x), ("topk_idx", topk_idx), ("padding", padding)):
            if given is not None and given.device != self.weight.device:
                raise ValueError(
                    f"[Router] {name} must be on the parameters' device {self.weight.device}; "
                    f"got {given.device}"
                )

    def _check_load(self, name: str, load: Tensor) -> None:
        check_tensor("Router", name, load, distributed=is_sharded(self.weight))
        if load.shape != (self.num_experts,) or load.is_complex():
            raise ValueError(
                f"[Router] {name} must be [{self.num_experts}] numbers; "
                f"got {tuple(load.shape)}, {load.dtype}"
            )

    def _losses(self, routing: Routing, sequences: int) -> dict[str, Tensor]:
        """The losses that have a coefficient."""
        losses = {}
        if self._coefficients.balancing:
            losses["balancing"] = self.balancing_loss(routing)
        if self._coefficients.balancing_per_sequence:
            each = self.balancing_loss(routing, sequences=sequences)
            losses["balancing_per_sequence"] = each
        if self._coefficients.z:
            losses["z"] = z_loss(routing)
        return losses

    def _counted(self, routing: Routing, sequences: int | None) -> Tensor:
        """The n_e of each sequence, [sequences * E] i64; None: of the batch, over the group."""
        unlike = routing.replayed or self.selection_bias is not None or self._rule.has_closed_groups
        of_batch = sequences is None or (sequences == 1 and self.group is None)
        if of_batch and not unlike:
            return routing.tokens_per_expert
        own = {**self._rule.options(), "topk_groups": self._rule.num_groups}
        arrays = (routing.logits.detach(), None, routing.padding, None)
        counts: Tensor = router_topk(arrays, self.top_k, sequences or 1, own).tokens_per_expert
        return self._summed(counts) if sequences is None else counts

    def _summed(self, counts: Tensor) -> Tensor:
        group = self._group.group
        if group is not None:
            dist.all_reduce(counts, group=group)
        return counts

    def _logits(self, x: Tensor) -> Tensor:
        weight, eps = self.weight, self._rule.input_norm_eps
        if self.input_scale is None or eps is None:
            logits = router_logits(x, weight)
        else:  # The norm is a factor per token: applied to the logits, x stays as it is.
            scale = self.input_scale.float() / math.sqrt(self.hidden_size)
            square = x.float().square().mean(dim=1, keepdim=True)
            logits = router_logits(x, weight.float() * scale) * torch.rsqrt(square + eps)
        return logits if self.bias is None else logits + self.bias.float()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        name = f"{prefix}selection_bias"
        bias = state_dict.get(name)
        if isinstance(bias, Tensor):
            state_dict[name] = bias.float()  # also with assign=True
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = self.selection_bias
        if bias is not None and moved is not None and moved.dtype != bias.dtype:
            self.selection_bias = bias.to(moved.device)
        return self


# Not by the setters alone: torch would make a module or a parameter a part of the router.
def _coefficients(given: Any) -> LossCoefficients:
    if not isinstance(given, LossCoefficients):
        raise ValueError(f"[Router] coefficients must be LossCoefficients; got {given!r}")
    return given


def _shared(group: Any) -> Shared:
    if group is not None:
        check_group("Router", group)
    return Shared(group)


def _finite(x: Tensor, padding: Tensor) -> Tensor:
    """x [T, H], zero in the rows of padding that are not finite: the gate's gradient sums over all
    rows, and 0 * NaN is NaN."""
    lost = padding & ~x.detach().sum(dim=1, dtype=torch.float32).isfinite()
    return x.masked_fill(lost[:, None], 0.0)
