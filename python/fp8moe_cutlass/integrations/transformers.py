"""Hugging Face transformers: the experts of a model in FP8, by the name "fp8moe".

    from fp8moe_cutlass.integrations import transformers as fp8moe

    fp8moe.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="fp8moe")

or, for a model that exists: `fp8moe.swap(model)`. `check(model)` says what either does to each
experts module. Both take plain SwiGLU experts and refuse all others by name, with the reason. They
go by the class and its flags. docs/how-to/hugging-face.md.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from fp8moe_cutlass.autograd import Local, Options
from fp8moe_cutlass.integrations.transformers_group import (
    GroupMixin,
    GroupTrainer,
    from_pretrained,
    save_pretrained,
)
from fp8moe_cutlass.nn import MoEExperts, reuse_fp8_weights, shard_experts
from fp8moe_cutlass.nn._sharded import is_sharded
from fp8moe_cutlass.nn._validate import check_options
from fp8moe_cutlass.nn.block import ExpertBlock, finders
from fp8moe_cutlass.recipe import Fp8Recipe

__all__ = [
    "Experts",
    "GroupMixin",
    "GroupTrainer",
    "ReuseCallback",
    "check",
    "from_pretrained",
    "register",
    "save_pretrained",
    "swap",
]


class _Experts(nn.Module):
    pass


# What transformers makes of an experts class without a gate of its own.
_Plain: Any = use_experts_implementation(_Experts)


_SILU = (nn.SiLU, type(ACT2FN["silu"]))
_WEIGHTS = ("gate_up_proj", "down_proj")
_registered: dict[str, Options] = {}  # what `register` has named


class Experts(NamedTuple):
    """An experts module of a model."""

    name: str
    kind: str  # its class
    runs: str  # what computes it now: "MoEExperts", or the name of an experts implementation
    reason: str | None  # why it cannot run in FP8; None: it can


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
        reason = _refused(self)
        if reason is not None:
            kind = type(self).__name__
            raise NotImplementedError(f"[transformers] {kind} cannot run in FP8: {reason}")
        block: Any = self.__dict__.get("_fp8moe")  # that reuse or telemetry has found
        if block is None or block._options is not options:
            block = _Registered(self, options)
        # Under expert parallelism num_experts, then the local number, is no expert.
        out: Tensor = block.forward(
            hidden_states, top_k_index, top_k_weights, no_expert=self.num_experts
        )
        return out

    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    _registered[name] = options


def swap(
    model: nn.Module,
    *,
    group: Any = None,
    capacity: int | tuple[int, int] | None = None,
    **options: Any,
) -> list[str]:
    """Replaces the experts modules of `model` by nn.MoEExperts over the same Parameters: nothing is
    allocated, state_dict keys stay. Returns the modules' names.

    options: MoEExperts', such as recipe. NotImplementedError if an experts module cannot run, or
    none is there; then nothing is changed. Sharded experts (DTensor) are refused, and quantized
    models: swap before parallelizing or quantizing, or use `register`.
    group, capacity: as of nn.shard_experts, which then makes this rank's share of them, as new
      parameters: swap before an optimizer or a Trainer is made.
    """
    names = _swap(model, **options)
    if group is not None:
        shard_experts(model, group, capacity=capacity)
    return names


def swap_on_meta(model: nn.Module, **options: Any) -> list[str]:
    """The same for a model on the meta device, with new parameters; group: a process group, of
    whose share alone there are parameters."""
    return _swap(model, meta=True, **options)


def _swap(model: nn.Module, *, meta: bool = False, **options: Any) -> list[str]:
    found = check(model)
    swappable = [e for e in found if e.runs not in ("MoEExperts", "its own forward")]
    if meta:
        bad = [e for e in swappable if _refused(model.get_submodule(e.name)) is not None]
    else:
        bad = [e for e in swappable if e.reason is not None]
    if not swappable:
        bad = [e for e in found if e.reason is not None]
    if bad:
        raise NotImplementedError(
            "[transformers] swap: " + "; ".join(f"{e.name} ({e.kind}): {e.reason}" for e in bad)
        )
    if not found:
        raise NotImplementedError(
            f"[transformers] swap: model must have experts modules; got {type(model).__name__}"
        )
    for name in (e.name for e in swappable):
        module: Any = model.get_submodule(name)
        experts, hidden, intermediate = module.down_proj.shape
        dtype = module.down_proj.dtype
        layer = MoEExperts(experts, hidden, intermediate, dtype=dtype, device="meta", **options)
        if not meta:
            for weight in _WEIGHTS:
                setattr(layer, weight, getattr(module, weight))
        layer.train(module.training)
        model.set_submodule(name, layer)
    return [e.name for e in swappable]


def check(model: nn.Module) -> list[Experts]:
    """Every experts module of `model`, and whether it can run in FP8. Changes nothing.

    `runs` is what computes it now: compare it with the name that was asked for. transformers
    ignores `set_experts_implementation` for a model whose class stands outside its own files.
    """
    quantized = any(getattr(m, "hf_quantizer", None) is not None for m in model.modules())
    found = []
    for name, m in model.named_modules():
        kind = type(m).__name__
        if isinstance(m, MoEExperts):
            found.append(Experts(name, kind, "MoEExperts", None))
        elif _chosen(m):
            reason = "the model is quantized" if quantized else _refused(m) or _unusable(m)
            runs = getattr(m.config, "_experts_implementation", None) or "eager"
            found.append(Experts(name, kind, runs, reason))
        elif kind.endswith("Experts"):
            reason = "its class takes no experts implementation of transformers"
            found.append(Experts(name, kind, "its own forward", reason))
    return found


class ReuseCallback(TrainerCallback):
    """For Trainer with gradient_accumulation_steps: FP8 weights are quantized once per optimizer
    step, by nn.reuse_fp8_weights, for all its microbatches. check: as there."""

    def __init__(self, check: bool = False) -> None:
        self._check, self._scope = check, ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._scope.close()
        self._scope.enter_context(reuse_fp8_weights(given["model"], check=self._check))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._scope.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._scope.close()


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


def _find(module: Any) -> ExpertBlock | None:
    """The block of a module that runs a registered implementation, which the module keeps."""
    if not _chosen(module) or _refused(module) is not None:
        return None
    options = _registered.get(module.config._experts_implementation)
    if options is None:
        return None
    block: ExpertBlock | None = module.__dict__.get("_fp8moe")
    if block is None or block._options is not options:
        block = module.__dict__["_fp8moe"] = _Registered(module, options)
    return block


finders.append(_find)


def _chosen(module: nn.Module) -> bool:
    """Whether an experts implementation computes the module."""
    code = getattr(type(module).forward, "__code__", None)
    return code is _Plain.forward.__code__ and hasattr(module, "is_concatenated")


def _refused(module: Any) -> str | None:
    """Why experts of this class are not MoEExperts'; None: they are."""
    act = getattr(module, "act_fn", None)
    plain = type(module)._apply_gate is _Plain._apply_gate
    reasons = {
        "no gate": not getattr(module, "has_gate", True),
        "biases": getattr(module, "has_bias", False),
        "weights are [E, in, out]": getattr(module, "is_transposed", False),
        "gate and up are interleaved": not getattr(module, "is_concatenated", True),
        "a norm after each expert": getattr(module, "has_post_expert_norm", False),
        "a gate of its own": not plain,
        f"its activation is {getattr(act, '__name__', type(act).__name__)}, not SiLU": plain
        and not (isinstance(act, _SILU) or act is F.silu),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds) or None


def _unusable(module: nn.Module) -> str | None:
    """Why the parameters of a plain experts module cannot be MoEExperts'; None: they can."""
    more = {name for name, _ in module.named_parameters()} - {*_WEIGHTS}
    if more:
        return f"parameters of its own: {', '.join(sorted(more))}"
    for name in _WEIGHTS:
        w = getattr(module, name)
        if is_sharded(w):
            return f"{name} is a DTensor (sharded): swap before parallelizing"
        if w.is_meta:
            return f"{name} is on the meta device (offloaded, or not loaded)"
        if w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {w.dtype}"
        if w.shape[-1] % 16:
            return f"{name} is {tuple(w.shape)}: sizes must be multiples of 16"
    return None
