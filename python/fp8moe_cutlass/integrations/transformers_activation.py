"""The activations of transformers' experts classes: which Activation computes what a class does.

A class whose gate is transformers' default is known by its act_fn, one with a gate of its own by
its name. tests/test_integrations_transformers.py compares each with the class's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from fp8moe_cutlass.activation import SWIGLU, Activation


class _Experts(nn.Module):
    pass


# What transformers makes of an experts class without a gate of its own.
PLAIN: Any = use_experts_implementation(_Experts)
_SILU = (nn.SiLU, type(ACT2FN["silu"]))
_GELU_TANH = type(ACT2FN["gelu_pytorch_tanh"])
_RELU2 = type(ACT2FN["relu2"])


def _clamped(m: Any) -> Activation:
    return Activation(limit=m.limit) if is_silu(m.act_fn) else _other(m.act_fn)


def _gpt_oss(m: Any, interleaved: bool) -> Activation:
    return Activation(alpha=m.alpha, offset=1.0, limit=m.limit, interleaved=interleaved)


# Of classes with a gate of their own.
_OWN: dict[str, Callable[[Any], Activation]] = {
    "GptOssExperts": lambda m: _gpt_oss(m, interleaved=True),
    "OpenAIPrivacyFilterExperts": lambda m: _gpt_oss(m, interleaved=False),
    "DeepseekV4Experts": _clamped,
    "Glm5NextTextExperts": lambda m: Activation(limit=m.swiglu_limit),
    "HYV4Experts": lambda m: Activation(limit=m.swiglu_limit),
    "MiniMaxM3VLExperts": lambda m: Activation(
        alpha=m.swiglu_alpha, offset=1.0, limit=m.swiglu_limit
    ),
}


class UnknownActivation(ValueError):
    """The reason why no Activation computes what a class does."""


def activation_of(module: Any) -> Activation:
    """The activation of an experts module of transformers, not of FP8Experts. UnknownActivation
    with the reason where there is none."""
    act = getattr(module, "act_fn", None)
    if not getattr(module, "has_gate", True):
        return Activation("relu2") if isinstance(act, _RELU2) else _other(act, "no gate, ")
    if getattr(type(module), "_apply_gate", PLAIN._apply_gate) is PLAIN._apply_gate:
        if isinstance(act, _GELU_TANH):
            return Activation("gelu_tanh")
        return SWIGLU if is_silu(act) else _other(act)
    gate = type(module)._apply_gate  # of a class that parametrize or fully_shard has derived, too
    kinds = (kind for kind in type(module).__mro__ if vars(kind).get("_apply_gate") is gate)
    kind = next(kinds, object)
    own = _OWN.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None
    if own is None:
        raise UnknownActivation("a gate of its own")
    try:
        return own(module)
    except UnknownActivation:
        raise
    except ValueError as error:  # a number that Activation does not take
        raise UnknownActivation(f"a gate of its own: {error}") from error


def is_silu(act: Any) -> bool:
    """Whether a module's act_fn is SiLU, as a module or as torch's function."""
    return isinstance(act, _SILU) or act is F.silu


def _other(act: Any, before: str = "") -> Activation:
    name = getattr(act, "__name__", type(act).__name__)
    raise UnknownActivation(f"{before}its activation is {name}")
