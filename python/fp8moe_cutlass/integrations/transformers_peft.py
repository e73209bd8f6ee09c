"""get_peft_model: PEFT's LoRA on a model whose experts are nn.MoEExperts.

PEFT's own target_parameters would compute W + B A, which FP8 codes cannot be and other experts have
in a copy of all weights. integrations.transformers exports it. docs/how-to/lora.md.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from typing import Any

import torch
from torch import nn

from fp8moe_cutlass.nn import MoEExperts, lora

ADAPTER = "default"
# Of a LoraConfig, what experts follow, or what is of other modules: all else is a variant of LoRA.
READ = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "r", "lora_alpha", "use_rslora", "rank_pattern"),
    *("alpha_pattern", "target_parameters", "target_modules", "exclude_modules", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "trainable_token_indices", "ensure_weight_tying"),
    *("megatron_config", "megatron_core", "runtime_config"),
}
REFUSED = {  # of the PeftModel, and what to do instead
    "add_adapter": "give DPO or GRPO a reference model of its own (ref_model=), or beta 0",
    "delete_adapter": "load the model again",
    "merge_adapter": "merge_and_unload()",
    "unmerge_adapter": "disable_adapter()",
}


def get_peft_model(model: nn.Module, config: Any, **options: Any) -> Any:
    """peft.get_peft_model, but that the experts which config.target_parameters names get
    MoEExperts.add_lora: terms inside the FP8 GEMMs, over frozen weights, FP8 codes or values.

    model: with nn.MoEExperts, such as `swap` makes. config: a peft.LoraConfig whose
    target_parameters names both gate_up_proj and down_proj of experts, as PEFT has them; all else
    of it is PEFT's. options: peft.get_peft_model's, but for adapter_name. Saving, loading,
    disable_adapter and merge_and_unload of the PeftModel take the experts along. Where ranks share
    the experts, save_pretrained is refused: it would write one rank's.
    ValueError for what the experts' LoRA has not: dropout, biases, another initialization, DoRA
    and every other variant that the config asks for.
    """
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.constants import DUMMY_TARGET_MODULES

    _check(peft, config, options)
    found = {name: m for name, m in model.named_modules() if isinstance(m, MoEExperts)}
    wanted, others = _chosen(found, config.target_parameters or [])
    _refuse_copies(wanted, config.modules_to_save)
    wide = options.get("autocast_adapter_dtype", True)
    dtype = torch.float32 if wide else torch.bfloat16
    terms = {name: (*_rank_and_alpha(config, name, found[name]), dtype) for name in wanted}
    for name in wanted:
        lora.check(found[name], *terms[name])
    own = copy.copy(config)
    own.target_parameters = others or None
    if not own.target_modules and not others:
        own.target_modules = DUMMY_TARGET_MODULES
    made = peft.get_peft_model(model, own, **options)
    own = made.peft_config[ADAPTER]
    own.target_parameters, own.target_modules = config.target_parameters, config.target_modules
    for name in wanted:
        layer = found[name]
        lora.add(layer, *terms[name])
        for owner in (layer.base_layer, layer):
            for key in ("lora_A", "lora_B"):
                adapter = _adapter_type()(layer, getattr(owner, key)[ADAPTER])
                setattr(owner, key, adapter.requires_grad_(not own.inference_mode))
    made.base_model.tuner_layer_cls = BaseTunerLayer  # what set_adapter looks for, not LoraLayer
    made._enable_peft_forward_hooks = _hooks_of_a_forward
    for name, instead in REFUSED.items():
        setattr(made, name, functools.partial(_refuse, name, instead))  # which pickle takes
    # DistributedDataParallel would average and copy what ranks hold of different experts:
    shares = [layer for layer in found.values() if layer.group is not None]
    if shares:
        of_ranks = {p for layer in shares for p in layer.parameters()}
        names = [name for name, p in made.named_parameters() if p in of_ranks]
        made._ddp_params_and_buffers_to_ignore = names
    if any(found[name].group is not None for name in wanted):
        made.save_pretrained = functools.partial(_refuse_shares, found[wanted[0]].num_experts)
    return made


def _refuse(name: str, instead: str, *_: Any, **__: Any) -> None:
    raise NotImplementedError(
        f"[get_peft_model] {name} cannot be called of a model with LoRA on experts, which have one "
        f"adapter; instead: {instead}"
    )


def _hooks_of_a_forward(*_: Any, adapter_names: Any = None, **__: Any) -> Any:
    """In the place of PEFT's context, which lets each row of a batch choose its adapter."""
    if adapter_names is not None:
        raise NotImplementedError(
            "[get_peft_model] adapter_names must be None for LoRA on experts, which a whole batch "
            f"has; got {adapter_names}; instead: disable_adapter()"
        )
    return contextlib.nullcontext()


def _refuse_shares(experts: int, *_: Any, **__: Any) -> None:
    raise NotImplementedError(
        "[get_peft_model] save_pretrained writes the adapters of all experts, and the ranks of a "
        f"group hold parts of {experts}; instead: save each rank's state_dict()"
    )


def _check(peft: Any, config: Any, options: dict[str, Any]) -> None:
    if not isinstance(config, peft.LoraConfig):
        raise ValueError(
            f"[get_peft_model] config must be a peft.LoraConfig; got {type(config).__name__}"
        )
    usual = peft.LoraConfig()
    names = [field.name for field in dataclasses.fields(usual) if field.name not in READ]
    rules = {name: (getattr(config, name), getattr(usual, name)) for name in names}
    rules["adapter_name"] = options.get("adapter_name", ADAPTER), ADAPTER
    if config.target_modules == "all-linear":
        raise ValueError(
            "[get_peft_model] target_modules must be names, such as ['q_proj', 'v_proj']; got "
            "'all-linear', which takes the experts, too"
        )
    for name, (got, want) in rules.items():
        if got != want:
            raise ValueError(
                f"[get_peft_model] {name} must be {want!r} for LoRA on experts; got {got!r}"
            )


def _chosen(
    found: dict[str, MoEExperts], target_parameters: list[str]
) -> tuple[list[str], list[str]]:
    """The experts that target_parameters names, and the names that are of none."""
    keys = {f"{name}.{w}": name for name, m in found.items() for w in m.weight_names}
    named = {t: [k for k in keys if k == t or k.endswith(f".{t}")] for t in target_parameters}
    hit = {k for of in named.values() for k in of}
    wanted = [name for name, m in found.items() if f"{name}.{m.weight_names[0]}" in hit]
    one = {keys[k] for k in hit} - {n for n in wanted if f"{n}.down_proj" in hit}
    if not hit or one:
        got = f"one of them, of {min(one)}" if one else f"{target_parameters}"
        first = "" if found else "; model has none: swap it first"
        raise ValueError(
            "[get_peft_model] target_parameters must name both gate_up_proj and down_proj of "
            f"nn.MoEExperts, such as 'mlp.experts.down_proj'; got {got}{first}"
        )
    return wanted, [t for t, of in named.items() if not of]


def _refuse_copies(wanted: list[str], modules_to_save: list[str] | None) -> None:
    """PEFT trains a copy of a module in modules_to_save, found by the end of its name."""
    for name in wanted:
        for place in itertools.accumulate(name.split("."), "{}.{}".format):
            if any(place.endswith(end) for end in modules_to_save or ()):
                raise ValueError(
                    "[get_peft_model] modules_to_save must hold no experts with LoRA, of which "
                    f"PEFT would train a copy without it; got {place}"
                )


def _rank_and_alpha(config: Any, name: str, layer: MoEExperts) -> tuple[int, float]:
    """add_lora's arguments by PEFT's patterns, the same for both weights of an experts module."""
    from peft.utils.other import get_pattern_key

    found = set()
    for w in layer.weight_names:
        key = f"{name}.{w}"
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, key), config.r)
        alpha = config.alpha_pattern.get(
            get_pattern_key(config.alpha_pattern, key), config.lora_alpha
        )
        found.add((rank, alpha * rank**0.5 if config.use_rslora else alpha))
    if len(found) > 1:
        raise ValueError(
            "[get_peft_model] rank_pattern and alpha_pattern must say the same of gate_up_proj and "
            f"down_proj; got {sorted(found)} of {name}"
        )
    return found.pop()


@functools.cache  # made once, when PEFT is there
def _adapter_type() -> Any:
    """What PEFT finds among a model's modules: one factor, by the name of its adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    class Adapter(nn.ModuleDict, BaseTunerLayer):
        def __init__(self, layer: MoEExperts, factor: lora.Factor) -> None:
            super().__init__({ADAPTER: factor})
            self._of = [layer]  # in a list: no child of this module

        def enable_adapters(self, enabled: bool) -> None:
            self._of[0].lora_enabled = enabled
            self[ADAPTER].requires_grad_(enabled)

        def set_adapter(self, adapter_names: Any, inference_mode: bool = False) -> None:
            names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
            self._of[0].lora_enabled = ADAPTER in names
            self[ADAPTER].requires_grad_(ADAPTER in names and not inference_mode)
            self._active_adapter = names

        def set_requires_grad(self, adapter_names: Any, requires_grad: bool = True) -> None:
            if ADAPTER in adapter_names:  # one name or several
                self[ADAPTER].requires_grad_(requires_grad)

        def _move_adapter_to_device_of_base_layer(self, *_: Any, **__: Any) -> None:
            self.to(self._of[0].gate_up_proj.device)

        def __reduce__(self) -> Any:  # pickle does not find this class by its name
            return _new_adapter, (), vars(self)

    return Adapter


def _new_adapter() -> Any:
    return _adapter_type().__new__(_adapter_type())
