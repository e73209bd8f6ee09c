"""Llama 4 of transformers: experts that take the tokens of all of them in one batch.

The block around them multiplies every token by its weight for every expert, 0 for most, and hands
over E T rows. After `swap` it hands over those of the experts that were chosen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn


def is_llama4(module: Any) -> bool:
    """Whether the module is Llama 4's experts: weights [E, in, out], [gate | up], silu."""
    return _is(module, "Llama4TextExperts")


def parent_of(model: nn.Module, name: str) -> nn.Module | None:
    """The block around the experts of that name; None: it is not transformers'."""
    parent = model.get_submodule(name.rpartition(".")[0])
    own = _is(parent, "Llama4TextMoe") and "forward" not in vars(parent)
    return parent if own else None


def route(parent: Any) -> None:
    """Has the block call nn.MoEExperts."""
    parent.forward = partial(_forward, parent)  # which pickle finds again, as it does no method


def _is(module: Any, name: str) -> bool:
    kind = type(module)
    return kind.__name__ == name and kind.__module__.startswith("transformers.models.llama4.")


def _forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    weights, ids = scores.topk(self.top_k, dim=-1)
    rows = (x[:, None] * weights[..., None]).flatten(0, 1)  # weighted before the experts
    made = self.experts(rows, ids.view(-1, 1), rows.new_ones(len(rows), 1))
    out = self.shared_expert(x)
    return out + made.view(*ids.shape, -1).sum(dim=1), logits
