"""swap: nn.MoEExperts in the place of a model's experts modules, over the same Parameters.

integrations.transformers exports it. docs/how-to/hugging-face.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Experts

from fp8moe_cutlass.activation import SWIGLU
from fp8moe_cutlass.distributed.shards import is_sharded
from fp8moe_cutlass.integrations.transformers_activation import activation_of
from fp8moe_cutlass.integrations.transformers_check import (
    OWN_FORWARD,
    ExpertsFound,
    biases_of,
    check,
    is_turned,
    misfit,
    names_of,
    refused,
    weights_of,
)
from fp8moe_cutlass.integrations.transformers_fp8 import (
    dequantize_linears,
    linears_unfit,
    quantized_otherwise,
)
from fp8moe_cutlass.integrations.transformers_llama4 import is_llama4, parent_of, route
from fp8moe_cutlass.nn import MoEExperts, shard_experts
from fp8moe_cutlass.nn.fp8_checkpoint import NAMES
from fp8moe_cutlass.nn.lora import merged, remove
from fp8moe_cutlass.recipe import Fp8Recipe

_HOOKS = [name for name in vars(nn.Module()) if "hook" in name]  # a module's attributes for them
# What generate() sets on a GPU, for the time of it.
_DECODING = ("grouped_mm", "batched_mm")


def swap(
    model: nn.Module,
    *,
    group: Any = None,
    rank_capacity: int | tuple[int, int] | None = None,
    transport: str = "auto",
    **options: Any,
) -> list[str]:
    """Replaces the experts modules of `model` by nn.MoEExperts over the same Parameters: nothing is
    allocated, state_dict keys stay. Returns the modules' names. Of a model of an FP8 checkpoint the
    experts' codes are frozen, and its FP8 linear layers become plain ones.

    options: MoEExperts', such as recipe. NotImplementedError if an experts module cannot run, or
    none is there; then nothing is changed. Sharded experts (DTensor) are refused, and models that
    are quantized in another way: swap before parallelizing or quantizing, or use `register`.
    ValueError for options of a model whose experts are swapped already. Hooks on the experts
    modules go on. Afterwards `set_experts_implementation` has nothing to act on: the next forward
    raises RuntimeError, but for "batched_mm" after "grouped_mm", as generate() sets it on a GPU.
    group, rank_capacity, transport: as of nn.shard_experts, which then makes this rank's share of
      them, as new parameters: swap before an optimizer or a Trainer is made.
    """
    names = _swap(model, **options)
    if group is not None:
        shard_experts(model, group, rank_capacity=rank_capacity, transport=transport)
    return names


def swap_on_meta(model: nn.Module, **options: Any) -> list[str]:
    """The same for a model on the meta device, with new parameters; group: a process group, of
    whose share alone there are parameters."""
    return _swap(model, meta=True, **options)


def _swap(model: nn.Module, *, meta: bool = False, **options: Any) -> list[str]:
    found = check(model)
    own = [e for e in found if e.runs == OWN_FORWARD and not is_llama4(model.get_submodule(e.name))]
    swappable = [e for e in found if e.runs != "MoEExperts" and e not in own]
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
    if any(isinstance(model.get_submodule(e.name), FP8Experts) for e in swappable):
        reason = linears_unfit(model)
        if reason is not None:
            raise NotImplementedError(f"[transformers] swap: {reason}")
        dequantize_linears(model, _HOOKS)
    for parent in [parent_of(model, e.name) for e in swappable]:
        if parent is not None:
            route(parent)
    places = list(model.named_modules(remove_duplicate=False))
    for name in (e.name for e in swappable):
        module: Any = model.get_submodule(name)
        layer = SwappedExperts(module, **options)
        if not meta:
            codes = isinstance(module, FP8Experts)
            for key in NAMES if codes else names_of(module) + biases_of(module):
                setattr(layer, key, getattr(module, key))
            if codes:
                layer.requires_grad_(False)
        layer.train(module.training)
        for place in (place for place, m in places if m is module):
            model.set_submodule(place, layer)
    return [e.name for e in swappable]


class SwappedExperts(MoEExperts):
    """The module that `swap` puts in the place of transformers' experts, on the meta device."""

    def __init__(self, module: Any, **options: Any) -> None:
        w, turned = module.down_proj, is_turned(module)
        e, h, i = w.mT.shape if turned else w.shape
        bias = bool(biases_of(module))
        activation = SWIGLU if isinstance(module, FP8Experts) else activation_of(module)
        how: Any = {"activation": activation, "bias": bias, "dtype": w.dtype, "device": "meta"}
        super().__init__(e, h, i, **how, **options)
        if turned:
            self._turned = True
            for name in self.weight_names:
                setattr(self, name, nn.Parameter(getattr(self, name).detach().mT.contiguous()))
        self.is_transposed = getattr(module, "is_transposed", False)  # which PEFT reads
        self.config = getattr(module, "config", None)
        self._implementation = getattr(self.config, "_experts_implementation", None)
        vars(self).update({name: vars(module)[name] for name in _HOOKS})  # whose handles remove

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs nn.MoEExperts'; raises RuntimeError after set_experts_implementation."""
        now = getattr(self.config, "_experts_implementation", None)
        if now != self._implementation and (self._implementation, now) != _DECODING:
            raise RuntimeError(
                "[transformers] a swapped model runs nn.MoEExperts: to run another experts "
                f"implementation, load the model again; got {now!r} instead of "
                f"{self._implementation!r} after swap"
            )
        return super().forward(*args, **kwargs)

    @property
    def unload_and_optionally_merge_module(self) -> Callable[..., SwappedExperts]:
        """What PEFT's merge_and_unload and unload call; a layer without LoRA has no such method,
        of which some of PEFT's tuners expect a weight, too."""
        if not self.lora_rank:
            raise AttributeError("unload_and_optionally_merge_module")
        return self._unloaded

    def _unloaded(self, merge: bool, safe_merge: bool = False, **_: Any) -> SwappedExperts:
        if merge and safe_merge:
            for of, e in itertools.product(range(2), range(len(self.local_experts))):
                if not merged(self, of, e).isfinite().all():
                    raise ValueError(
                        f"[merge_and_unload] safe_merge: {self.weight_names[of]} must be finite "
                        f"with LoRA's terms; got NaN or infinity in expert {e} of this rank"
                    )
        if merge:
            self.merge_lora()
        else:
            remove(self)
        return self


def _unswappable(model: nn.Module, experts: ExpertsFound, meta: bool, **options: Any) -> str | None:
    """Why MoEExperts cannot take the place of an experts module; None: it can."""
    module: Any = model.get_submodule(experts.name)
    reason = refused(module)
    if reason is None and is_llama4(module) and parent_of(model, experts.name) is None:
        reason = "the block around it is not transformers'"
    if reason is not None:
        return reason
    weights = weights_of(module)
    reason = misfit(module, weights, options.get("recipe", Fp8Recipe()))
    if reason is not None or meta:
        return reason
    if quantized_otherwise(model):
        return "the model is quantized"
    if "forward" in vars(module):
        return "its forward is replaced (by accelerate, for a device_map): swap before"
    more = {name for name, _ in module.named_parameters()}
    more -= {*NAMES, *names_of(module), *biases_of(module)}
    if more:
        return f"parameters of its own: {', '.join(sorted(more))}"
    for name, w in zip(names_of(module), weights, strict=True):
        if is_sharded(w):
            return f"{name} is a DTensor (sharded): swap before parallelizing"
        if w.is_meta:
            return f"{name} is on the meta device (offloaded, or not loaded)"
    return None
