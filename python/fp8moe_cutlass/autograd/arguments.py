"""Checks of what a caller passes as a tensor, a plan, a routing or options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass.activation import SWIGLU, Activation
from fp8moe_cutlass.autograd.body import Options
from fp8moe_cutlass.ops._words import refuse, shown
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan

_PLAIN = (Tensor, torch.nn.Parameter)


def check_tensor(op: str, name: str, value: Any, *, distributed: bool = False) -> None:
    """ValueError unless value is a dense tensor of torch's; an Fp8Tensor, a nested or sparse tensor
    and, unless `distributed`, a DTensor are none."""
    if type(value) in _PLAIN and not value.is_nested and value.layout == torch.strided:
        return  # in a third of the time
    got = None
    if not isinstance(value, Tensor):
        got = type(value).__name__
    elif value.is_nested or value.layout != torch.strided:
        got = "a nested tensor" if value.is_nested else str(value.layout)
    elif not distributed and hasattr(value, "full_tensor"):
        got = "a DTensor: pass its to_local()"
    if got is not None:
        raise ValueError(f"[{op}] {name} must be a torch.Tensor; got {got}")


def check_plan(op: str, plan: Any) -> None:
    """ValueError unless plan is a RoutingPlan."""
    if not isinstance(plan, RoutingPlan):
        refuse(op, "plan", "a RoutingPlan", plan)


def as_counts(op: str, counts: Any) -> Tensor:
    """counts [E] of rows as a tensor; ValueError unless they are numbers."""
    if isinstance(counts, Tensor):
        check_tensor(op, "counts", counts)
        return counts
    try:
        return torch.as_tensor(counts)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"[{op}] counts must be int32 or int64 numbers or a RoutingPlan; got {shown(counts)}"
        ) from error


def check_weights(op: str, gate_up: Any, down: Any, activation: Activation | None = None) -> None:
    """ValueError unless the two are tensors that fit each other, and the activation; None: any."""
    for name, t in (("gate_up", gate_up), ("down", down)):
        check_tensor(op, name, t)
    e, h, i = down.shape if down.ndim == 3 else (-1, -1, -1)
    parts = (1, 2) if activation is None else (activation.parts,)
    if not any(gate_up.shape == (e, n * i, h) for n in parts):
        of = "[E, I, H]" if parts == (1,) else "[E, 2I, H]"
        raise ValueError(
            f"[{op}] gate_up must be {of} and down [E, H, I]; "
            f"got {tuple(gate_up.shape)} and {tuple(down.shape)}"
        )


def check_word(op: str, name: str, value: Any, *words: str) -> None:
    """ValueError unless value is one of the words."""
    if not isinstance(value, str) or value not in words:
        quoted = [repr(word) for word in words]
        allowed = " or ".join([", ".join(quoted[:-1]), quoted[-1]])
        raise ValueError(f"[{op}] {name} must be {allowed}; got {value!r}")


def check_options(op: str, options: Options) -> None:
    """ValueError unless the options are known, and go together."""
    recipe, preactivation, transposed_weights, activation = options
    if not isinstance(activation, Activation):
        raise ValueError(f"[{op}] activation must be an Activation; got {activation!r}")
    if not isinstance(recipe, Fp8Recipe | None):
        raise ValueError(f"[{op}] recipe must be an Fp8Recipe or None (bf16); got {recipe!r}")
    if recipe is not None and recipe.rounding != "none" and activation != SWIGLU:
        raise ValueError(
            f"[{op}] recipe must not round ({recipe.rounding!r}) but a plain SwiGLU; "
            f"got {activation}"
        )
    check_word(op, "preactivation", preactivation, "save", "save_fp8", "recompute")
    if preactivation == "save_fp8" and recipe is None:
        raise ValueError(
            f"[{op}] preactivation must be 'save' or 'recompute' without a recipe; got 'save_fp8'"
        )
    check_word(op, "transposed_weights", transposed_weights, "save", "recompute")
