"""Hugging Face transformers: the experts of a model in FP8, by the name "fp8moe".

    from fp8moe_cutlass.integrations import transformers as fp8moe

    fp8moe.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="fp8moe")

or, for a model that exists: `fp8moe.swap(model)`. `check(model)` says what either does to each
experts module. Both take plain SwiGLU experts and refuse all others by name, with the reason. They
go by the class and its flags. docs/how-to/hugging-face.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fp8moe_cutlass.autograd import Local, Options
from fp8moe_cutlass.autograd.torch_op import new_key
from fp8moe_cutlass.distributed.shards import is_sharded
from fp8moe_cutlass.integrations.transformers_check import (
    OWN_FORWARD,
    WEIGHTS,
    ExpertsFound,
    check,
    chosen,
    refused,
    registered,
    unfit,
)
from fp8moe_cutlass.integrations.transformers_group import (
    GroupMixin,
    GroupTrainer,
    from_pretrained,
    save_pretrained,
)
from fp8moe_cutlass.integrations.transformers_reuse import ReuseCallback
from fp8moe_cutlass.nn import MoEExperts, shard_experts
from fp8moe_cutlass.nn._validate import check_options
from fp8moe_cutlass.nn.expert_block import ExpertBlock, finders
from fp8moe_cutlass.recipe import Fp8Recipe

__all__ = [
    "ExpertsFound",
    "GroupMixin",
    "GroupTrainer",
    "ReuseCallback",
    "check",
    "from_pretrained",
    "register",
    "save_pretrained",
    "swap",
]


_HOOKS = [name for name in vars(nn.Module()) if "hook" in name]  # a module's attributes for them


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
    check_options(recipe, preactivation, transposed_weights, torch.bfloat16)
    options = Options(recipe, preactivation, transposed_weights)

    def forward(
        self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        _raise(self, refused(self))
        block = _kept(self, options) or _Registered(self, options)
        # Under expert parallelism num_experts, then the local number, is no expert.
        out: Tensor = block.forward(
            hidden_states, top_k_index, top_k_weights, no_expert=self.num_experts
        )
        return out

    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(name, forward)  # which it refuses by name
    registered[name] = options


def swap(
    model: nn.Module,
    *,
    group: Any = None,
    rank_capacity: int | tuple[int, int] | None = None,
    **options: Any,
) -> list[str]:
    """Replaces the experts modules of `model` by nn.MoEExperts over the same Parameters: nothing is
    allocated, state_dict keys stay. Returns the modules' names.

    options: MoEExperts', such as recipe. NotImplementedError if an experts module cannot run, or
    none is there; then nothing is changed. Sharded experts (DTensor) are refused, and quantized
    models: swap before parallelizing or quantizing, or use `register`. ValueError for options of a
    model whose experts are swapped already. Hooks on the experts modules go on. Afterwards
    `set_experts_implementation` has nothing to act on: the next forward raises RuntimeError.
    group, rank_capacity: as of nn.shard_experts, which then makes this rank's share of them, as new
      parameters: swap before an optimizer or a Trainer is made.
    """
    names = _swap(model, **options)
    if group is not None:
        shard_experts(model, group, rank_capacity=rank_capacity)
    return names


def swap_on_meta(model: nn.Module, **options: Any) -> list[str]:
    """The same for a model on the meta device, with new parameters; group: a process group, of
    whose share alone there are parameters."""
    return _swap(model, meta=True, **options)


def _swap(model: nn.Module, *, meta: bool = False, **options: Any) -> list[str]:
    found = check(model)
    swappable = [e for e in found if e.runs not in ("MoEExperts", OWN_FORWARD)]
    if not swappable and options and any(e.runs == "MoEExperts" for e in found):
        raise ValueError(
            "[transformers] swap: options must be those of the first swap; got "
            f"{', '.join(options)} for experts that are MoEExperts already: load the model again"
        )
    bad = [e for e in found if e.reason is not None]
    if swappable:
        reasons = ((e, _unswappable(model, e, meta, **options)) for e in swappable)
        bad = [e._replace(reason=reason) for e, reason in reasons if reason is not None]
    if bad:
        raise NotImplementedError(
            "[transformers] swap: " + "; ".join(f"{e.name} ({e.kind}): {e.reason}" for e in bad)
        )
    if not found:
        raise NotImplementedError(
            f"[transformers] swap: model must have experts modules; got {type(model).__name__}"
        )
    places = list(model.named_modules(remove_duplicate=False))
    for name in (e.name for e in swappable):
        module: Any = model.get_submodule(name)
        layer = SwappedExperts(module, **options)
        if not meta:
            for weight in WEIGHTS:
                setattr(layer, weight, getattr(module, weight))
        layer.train(module.training)
        for place in (place for place, m in places if m is module):
            model.set_submodule(place, layer)
    return [e.name for e in swappable]


class SwappedExperts(MoEExperts):
    """The module that `swap` puts in the place of transformers' experts, on the meta device."""

    def __init__(self, module: Any, **options: Any) -> None:
        w = module.down_proj
        super().__init__(*w.shape, dtype=w.dtype, device="meta", **options)
        self.config = module.config
        self._implementation = self.config._experts_implementation
        vars(self).update({name: vars(module)[name] for name in _HOOKS})  # whose handles remove

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs nn.MoEExperts'; raises RuntimeError after set_experts_implementation."""
        now = self.config._experts_implementation
        if now != self._implementation and (self._implementation, now) != _DECODING:
            raise RuntimeError(
                "[transformers] a swapped model runs nn.MoEExperts: to run another experts "
                f"implementation, load the model again; got {now!r} instead of "
                f"{self._implementation!r} after swap"
            )
        return super().forward(*args, **kwargs)


# What generate() sets on a GPU, for the time of it.
_DECODING = ("grouped_mm", "batched_mm")


class _Registered(ExpertBlock):
    """The block over the parameters that an experts module of transformers has at the moment."""

    def __init__(self, module: Any, options: Options) -> None:
        self._module, self._options = module, options
        self._move = Local(module.num_experts)

    @property
    def gate_up_proj(self) -> Any:
        return self._module.gate_up_proj

    @property
    def down_proj(self) -> Any:
        return self._module.down_proj

    def local_weights(self) -> tuple[Tensor, Tensor]:
        weights = super().local_weights()
        _raise(self._module, unfit(weights, self.recipe))
        return weights

    def __reduce__(self) -> Any:  # a copy of the module makes its own
        return type(None), ()


def _raise(module: Any, reason: str | None) -> None:
    if reason is not None:
        kind = type(module).__name__
        raise NotImplementedError(f"[transformers] {kind} cannot run in FP8: {reason}")


def _kept(module: Any, options: Options) -> _Registered | None:
    """The block that `_find` has made for this module, not for one that it is a copy of."""
    block: _Registered | None = module.__dict__.get("_fp8moe")
    own = block is not None and block._module is module and block._options is options
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
        block.key = new_key(block)
    return block


finders.append(_find)


def _unswappable(model: nn.Module, experts: ExpertsFound, meta: bool, **options: Any) -> str | None:
    """Why MoEExperts cannot take the place of an experts module; None: it can."""
    module: Any = model.get_submodule(experts.name)
    reason = refused(module)
    if reason is not None:
        return reason
    weights = module.gate_up_proj, module.down_proj
    reason = unfit(weights, options.get("recipe", Fp8Recipe()))
    if reason is not None or meta:
        return reason
    if any(getattr(m, "hf_quantizer", None) is not None for m in model.modules()):
        return "the model is quantized"
    if "forward" in vars(module):
        return "its forward is replaced (by accelerate, for a device_map): swap before"
    more = {name for name, _ in module.named_parameters()} - {*WEIGHTS}
    if more:
        return f"parameters of its own: {', '.join(sorted(more))}"
    for name, w in zip(WEIGHTS, weights, strict=True):
        if is_sharded(w):
            return f"{name} is a DTensor (sharded): swap before parallelizing"
        if w.is_meta:
            return f"{name} is on the meta device (offloaded, or not loaded)"
    return None
