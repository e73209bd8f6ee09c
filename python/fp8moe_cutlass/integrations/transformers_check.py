"""check: which modules of a model are experts, what computes them, and why not FP8.

integrations.transformers exports it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Experts

from fp8moe_cutlass.autograd import Options
from fp8moe_cutlass.integrations.transformers_activation import (
    PLAIN,
    UnknownActivation,
    activation_of,
)
from fp8moe_cutlass.integrations.transformers_fp8 import experts_refused, experts_unfit
from fp8moe_cutlass.integrations.transformers_llama4 import is_llama4
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.recipe import Fp8Recipe

OWN_FORWARD = "its own forward"
registered: dict[str, Options] = {}  # by the names that `register` has given to transformers


class ExpertsFound(NamedTuple):
    """An experts module of a model, as `check` found it."""

    name: str
    kind: str  # its class
    runs: str  # "MoEExperts", the name of an experts implementation, or "its own forward"
    reason: str | None  # why no registered implementation can compute it; None: one can


def check(model: nn.Module) -> list[ExpertsFound]:
    """Every experts module of `model`, what computes it now, and whether it can run in FP8. Changes
    nothing.

    Compare `runs` with the name that was given: transformers ignores `set_experts_implementation`
    for a model whose class stands outside its own files. A module that runs "its own forward" may
    be experts, by its name, its class's or a weight [E, N, K]; what it computes is not known here.
    """
    found = []
    for name, m in model.named_modules():
        kind = type(m).__name__
        if isinstance(m, MoEExperts):
            found.append(ExpertsFound(name, kind, "MoEExperts", None))
        elif chosen(m):
            runs = getattr(m.config, "_experts_implementation", None) or "eager"
            recipe = registered[runs].recipe if runs in registered else Fp8Recipe()
            reason = refused(m) or misfit(m, weights_of(m), recipe)
            found.append(ExpertsFound(name, kind, runs, reason))
        elif _may_be_experts(name, m):
            reason = "its class takes no experts implementation of transformers"
            reason += ": swap alone takes it" if is_llama4(m) else ""
            found.append(ExpertsFound(name, kind, OWN_FORWARD, reason))
    return found


def chosen(module: nn.Module) -> bool:
    """Whether an experts implementation computes the module."""
    code = getattr(type(module).forward, "__code__", None)
    return code is PLAIN.forward.__code__ and hasattr(module, "is_concatenated")


def _may_be_experts(name: str, module: nn.Module) -> bool:
    """Whether a module that no implementation computes may hold experts, by itself."""
    named = type(module).__name__.endswith("Experts") or name.rpartition(".")[2] == "experts"
    stacked = any(p.ndim == 3 and len(p) > 1 for p in module.parameters(recurse=False))
    if not named and (not stacked or type(module).__module__.startswith("torch.")):
        return False
    return not any(isinstance(m, MoEExperts) or chosen(m) for m in module.modules())


def refused(module: Any) -> str | None:
    """Why the experts of this class are not MoEExperts'; None: they are."""
    if isinstance(module, FP8Experts):
        return experts_refused(module)
    found = []
    if getattr(module, "has_post_expert_norm", False):
        found.append("a norm after each expert")
    try:
        if activation_of(module).interleaved is getattr(module, "is_concatenated", True):
            found.append("its gate takes gate and up in another order than its flag says")
    except UnknownActivation as error:
        found.append(str(error))
    return ", ".join(found) or None


def names_of(module: Any) -> tuple[str, str]:
    """The names of the module's two weights."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"


def biases_of(module: Any) -> tuple[str, ...]:
    """The names of the module's biases, if it has any."""
    has = getattr(module, "has_bias", False)
    return tuple(f"{name}_bias" for name in names_of(module)) if has else ()


def weights_of(module: Any) -> tuple[Tensor, Tensor]:
    """The module's two weights, [E, out, in]."""
    first, second = (getattr(module, name) for name in names_of(module))
    return (first.mT, second.mT) if is_turned(module) else (first, second)


def is_turned(module: Any) -> bool:
    """Whether the module's weights lie as [E, in, out]."""
    return getattr(module, "is_transposed", False) or is_llama4(module)


def misfit(module: Any, weights: tuple[Tensor, Tensor], recipe: Fp8Recipe | None) -> str | None:
    """Why weights of this dtype and size, the module's, cannot be multiplied; None: they can."""
    if isinstance(module, FP8Experts):
        return experts_unfit(module, recipe)
    multiple = 8 if recipe is None else 16
    for name, w in zip(names_of(module), weights, strict=True):
        if w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {w.dtype}"
        if w.shape[-1] % multiple:
            return f"{name} is {tuple(w.shape)}: sizes must be multiples of {multiple}"
    return None
