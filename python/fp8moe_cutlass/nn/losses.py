"""The results of a router, the losses that balance it, and how they reach the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8moe_cutlass.nn._validate import check_number


@dataclass(frozen=True, kw_only=True)
class LossCoefficients:
    """The factors by which a Router adds its losses to the training loss by itself.

    Backward adds the losses' gradients where it reaches the routing weights, and nothing has to be
    passed along or added. A coefficient weighs its loss against the one that backward() is called
    on: where that is divided by the number of microbatches, divide the coefficients, too. 0, the
    default, adds nothing: there a loss may be added by hand (Router.balancing_loss, z_loss).

    balancing: of the balancing loss of the batch; with the router's group, of all ranks' batch.
    balancing_per_sequence: of the mean over the sequences of each one's balancing loss.
    z: of z_loss.
    """

    balancing: float = 0.0
    balancing_per_sequence: float = 0.0
    z: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number("LossCoefficients", name, value)


class Routing(NamedTuple):
    """The results of a router for T tokens. The caller owns them: the router keeps nothing."""

    topk_idx: Tensor  # [T, top_k] i64, best first; or as given
    topk_weights: Tensor  # [T, top_k] f32, differentiable
    logits: Tensor  # [T, E] f32, differentiable
    scores: Tensor  # [T, E] f32, differentiable: without bias and groups
    tokens_per_expert: Tensor  # [E] i64 without padding; with a group, of all its ranks
    padding: Tensor | None  # [T] bool, True for padding, as given
    replayed: bool  # topk_idx was given
    losses: dict[str, Tensor]  # those with a coefficient, by its name, detached


class _WithLoss(torch.autograd.Function):
    """The weights as they are; backward gives the loss, of their dtype, a gradient of 1."""

    @staticmethod
    def forward(weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dweights: Tensor) -> tuple[Tensor, Tensor]:
        return dweights, dweights.new_ones(())


# (weights, loss) -> weights whose backward is that of `loss`, a scalar, too.
with_loss: Callable[[Tensor, Tensor], Tensor] = _WithLoss.apply


def z_loss(routing: Routing) -> Tensor:
    """The mean over the tokens, without padding, of logsumexp(logits)^2 (ST-MoE), a scalar."""
    check_routing("z_loss", routing)
    logits, padding = routing.logits, routing.padding
    if padding is None:
        return logits.logsumexp(dim=1).square().sum() / max(logits.shape[0], 1)
    square = logits.masked_fill(padding[:, None], 0.0).logsumexp(dim=1).square()
    return square.masked_fill(padding, 0.0).sum() / (~padding).sum().clamp(min=1)


def check_routing(op: str, routing: Any) -> None:
    """ValueError unless routing is what a Router returns."""
    if not isinstance(routing, Routing):
        raise ValueError(f"[{op}] routing must be a Routing; got {type(routing).__name__}")
