"""Hugging Face transformers: the experts of a model in FP8, by the name "fp8moe".

    from fp8moe_cutlass.integrations import transformers as fp8moe

    fp8moe.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="fp8moe")

or, for a model that exists: `fp8moe.swap(model)`. `check(model)` says what either does to each
experts module. Both take experts of the activations that Activation has, with and without biases,
and refuse all others by name, with the reason. They go by the class and its flags.
docs/how-to/hugging-face.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fp8moe_cutlass.autograd import Local, Options
from fp8moe_cutlass.autograd.arguments import check_options
from fp8moe_cutlass.autograd.body import Biases
from fp8moe_cutlass.autograd.torch_op import give_key
from fp8moe_cutlass.integrations.transformers_activation import activation_of
from fp8moe_cutlass.integrations.transformers_check import (
    ExpertsFound,
    biases_of,
    check,
    chosen,
    misfit,
    names_of,
    refused,
    registered,
)
from fp8moe_cutlass.integrations.transformers_group import (
    GroupMixin,
    GroupTrainer,
    from_pretrained,
    save_pretrained,
)
from fp8moe_cutlass.integrations.transformers_peft import get_peft_model
from fp8moe_cutlass.integrations.transformers_reuse import ReuseCallback
from fp8moe_cutlass.integrations.transformers_swap import swap
from fp8moe_cutlass.nn.expert_block import ExpertBlock, finders
from fp8moe_cutlass.recipe import Fp8Recipe

__all__ = [
    "ExpertsFound",
    "GroupMixin",
    "GroupTrainer",
    "ReuseCallback",
    "check",
    "from_pretrained",
    "get_peft_model",
    "register",
    "save_pretrained",
    "swap",
]


def register(
    name: str = "fp8moe",
    *,
    recipe: Fp8Recipe | None = Fp8Recipe(),  # noqa: B008 (frozen)
    preactivation: str = "save",
    transposed_weights: str = "save",
) -> None:
    """Makes `name` an experts implementation of transformers. The options are MoEExperts'.

    Then `from_pretrained(..., experts_implementation=name)`, `from_config(...)` likewise, or
    `model.set_experts_implementation(name)`. Parameters stay the model's own. A module that cannot
    run raises NotImplementedError in its first forward: transformers asks for nothing earlier.
    """
    options = Options(recipe, preactivation, transposed_weights)
    check_options("MoEExperts", options)
    if name not in registered and (name == "eager" or name in ALL_EXPERTS_FUNCTIONS):
        raise ValueError(f"[register] name must be none of transformers' own; got {name!r}")

    def forward(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        _raise(self, refused(self))
        needs = hidden_states.requires_grad or top_k_weights.requires_grad
        if isinstance(self, FP8Experts) and torch.is_grad_enabled() and needs:
            _raise(
                self,
                "to train, swap(model), which dequantizes its FP8 linear layers, through which "
                "transformers passes no gradient",
            )
        block = _kept(self, options) or _Registered(self, options)
        # Under expert parallelism num_experts, then the local number, is no expert.
        out: Tensor = block.forward(
            hidden_states, top_k_index, top_k_weights, no_expert=self.num_experts
        )
        return out

    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(name, forward)  # without gradients
    registered[name] = options


class _Registered(ExpertBlock):
    """The block over the parameters that an experts module of transformers has at the moment."""

    def __init__(self, module: Any, options: Options) -> None:
        self._module, self._registered = module, options
        if not isinstance(module, FP8Experts):
            options = options._replace(activation=activation_of(module))
        self._options = options
        self._move = Local(module.num_experts)
        self._turned = getattr(module, "is_transposed", False)
        self.has_bias = bool(biases_of(module))

    @property
    def gate_up_proj(self) -> Any:
        return getattr(self._module, names_of(self._module)[0])

    @property
    def down_proj(self) -> Any:
        return self._module.down_proj

    @property
    def gate_up_proj_scale_inv(self) -> Any:
        return self._module.gate_up_proj_scale_inv

    @property
    def down_proj_scale_inv(self) -> Any:
        return self._module.down_proj_scale_inv

    def local_weights(self) -> tuple[Tensor, Tensor]:
        weights = super().local_weights()
        _raise(self._module, misfit(self._module, weights, self.recipe))
        return weights

    def own_biases(self) -> Biases:
        return Biases(*(getattr(self._module, name) for name in biases_of(self._module)))

    def __reduce__(self) -> Any:  # a copy of the module makes its own
        return type(None), ()


def _raise(module: Any, reason: str | None) -> None:
    if reason is not None:
        kind = type(module).__name__
        raise NotImplementedError(f"[transformers] {kind} cannot run in FP8: {reason}")


def _kept(module: Any, options: Options) -> _Registered | None:
    """The block that `_find` has made for this module, not for one that it is a copy of."""
    block: _Registered | None = getattr(module, "_fp8moe", None)  # of __dict__ dynamo has no guard
    own = block is not None and block._module is module and block._registered is options
    return block if own else None


def _find(module: Any) -> ExpertBlock | None:
    """The block of a module that runs a registered implementation, which the module keeps."""
    if not chosen(module):
        return None
    options = registered.get(module.config._experts_implementation)
    if options is None or refused(module) is not None:
        return None
    block = _kept(module, options)
    if block is None:
        block = module.__dict__["_fp8moe"] = _Registered(module, options)
        give_key(block)
    return block


finders.append(_find)
