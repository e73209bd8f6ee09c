"""Backward passes without a derivative of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A Function's `backward` that raises where a graph of it is asked for (create_graph=True).

    torch's runs there, and of a constant gradient gives one without a graph, whose derivative is
    then left out without a word. Autograd has grad mode off otherwise, so nothing turns it off.
    """
    name = backward.__qualname__.split(".")[0].removeprefix("_")

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"[{name}] has no second derivative; got create_graph=True")
        return backward(ctx, *gradients)

    return once
