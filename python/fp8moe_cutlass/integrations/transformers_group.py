"""transformers models whose experts the ranks of a group share: reading, writing, Trainer.

integrations.transformers exports what is here. docs/how-to/several-gpus.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fp8moe_cutlass.autograd.weights import is_codes
from fp8moe_cutlass.distributed.shards import is_sharded
from fp8moe_cutlass.integrations.transformers_swap import swap_on_meta
from fp8moe_cutlass.nn import MoEExperts, clip_grad_norm_, shard_experts

_OF_AN_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def from_pretrained(
    cls: Any,
    path: str | Path,
    *,
    group: Any,
    rank_capacity: int | tuple[int, int] | None = None,
    transport: str = "auto",
    options: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    """cls.from_pretrained(path, **given) with `swap(model, group=group, **options)`; of the experts
    a rank reads its own alone. cls: a model's class or an Auto class. path: a folder or a hub's
    name, of safetensors files."""
    folder = _folder(path)
    config = given.pop("config", None) or transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise NotImplementedError(
            "[from_pretrained] path must have no quantization_config; read the model on each rank "
            "and swap(model, group=)"
        )
    of: Any = cls._model_mapping[type(config)] if hasattr(cls, "_model_mapping") else cls
    how = {**(options or {}), "group": _process_group(group)}

    class Shared(of):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            swap_on_meta(self, **how)

    Shared.__name__, Shared.__qualname__ = of.__name__, of.__qualname__
    Shared.__module__ = of.__module__
    with torch.device("meta"):
        layers = [m for m in Shared(config).modules() if isinstance(m, MoEExperts)]
    state = _read(folder, layers[0].num_experts, layers[0].local_experts)
    model = Shared.from_pretrained(None, config=config, state_dict=state, **given)
    model.__class__ = of
    model.config._name_or_path = str(path)
    shard_experts(model, group, rank_capacity=rank_capacity, transport=transport)
    return model


def save_pretrained(model: Any, path: str | Path, **given: Any) -> None:
    """model.save_pretrained(path, **given) with whole weights, the files of one process. Every rank
    calls it; the first of all gathers and writes."""
    _refuse_codes("save_pretrained", model)
    state = _whole(model)
    if dist.get_rank() == 0:
        model.save_pretrained(path, state_dict=state, **given)
    dist.barrier()


class GroupMixin:
    """Before a Trainer, of transformers or TRL, for a model with swap(group=): under accelerate's
    FSDP2 or DistributedDataParallel.

        class Trainer(GroupMixin, trl.SFTTrainer): ...

    FSDP2: the experts are ignored; TrainingArguments must not ask for cpu_ram_efficient_loading,
    which sends the first rank's weights to all. DistributedDataParallel: the experts have parameter
    groups of their own, and a checkpoint has, beside whole weights, all states in a folder of
    torch.distributed.checkpoint, from which any number of ranks goes on. Gradients are clipped by
    the whole model's norm.
    """

    accelerator: Any
    args: Any
    lr_scheduler: Any
    model: Any
    optimizer: Any
    state: Any
    is_fsdp_enabled: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shared = [m for m in self.model.modules() if isinstance(m, MoEExperts) and m.group]
        if not shared:
            raise ValueError("[GroupMixin] model must have experts with a group; got none: swap")
        if self.accelerator.num_processes < dist.get_world_size(shared[0].group):
            raise ValueError(
                "[GroupMixin] accelerate must know of the group's processes, or it averages no "
                f"gradients: launch them by torchrun; got {self.accelerator.num_processes}"
            )
        _refuse_codes("GroupMixin", self.model)
        if any(m.lora_rank for m in shared):
            raise NotImplementedError(
                "[GroupMixin] model must have no LoRA on shared experts, of which a checkpoint "
                "would hold one rank's: train it in a loop of your own, or on one GPU"
            )
        if self.args.save_only_model and self.args.load_best_model_at_end:
            raise ValueError(
                "[GroupMixin] save_only_model must be False with load_best_model_at_end, which "
                "reads what it leaves out; got True"
            )
        if self.args.optim == "adafactor":
            raise ValueError(
                "[GroupMixin] optim must take DTensors, such as adamw_torch or sgd; got adafactor"
            )
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            if plugin.fsdp_version != 2 or plugin.cpu_ram_efficient_loading:
                raise ValueError(
                    "[GroupMixin] FSDP must be of version 2 without cpu_ram_efficient_loading; got "
                    f"version {plugin.fsdp_version}, {plugin.cpu_ram_efficient_loading}"
                )
            plugin.ignored_modules = shared
            if self.accelerator.mixed_precision != "no":
                for m in shared:  # as accelerate does with all parameters, wrongly with DTensors
                    m.float()

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """DistributedDataParallel by us: on GPUs accelerate refuses a model with DTensors."""
        made: Any = super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
        kind = self.accelerator.distributed_type
        data_parallel = kind in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
        if made is not self.model or not training or not data_parallel:
            return made
        # Autocast and torch.compile, but no wrapper.
        made = self.accelerator.prepare_model(made, device_placement=False, evaluation_mode=True)
        # shard_experts has said so to the model that it was given, which PEFT or compile wraps.
        made._ddp_params_and_buffers_to_ignore = [
            name for name, p in made.named_parameters() if is_sharded(p)
        ]
        device, handler = self.accelerator.device, self.accelerator.ddp_handler
        wrapped = nn.parallel.DistributedDataParallel(
            made, [device] if device.type == "cuda" else None, **handler.to_kwargs()
        )
        handler.register_comm_hook(wrapped)
        return wrapped

    def create_optimizer(self, *given: Any, **named: Any) -> Any:
        made: Any = super().create_optimizer(*given, **named)  # type: ignore[misc]
        for group in list(made.param_groups):
            kinds = [
                [p for p in group["params"] if is_sharded(p) is share] for share in (False, True)
            ]
            if all(kinds):
                group["params"] = kinds[0]
                made.add_param_group({**group, "params": kinds[1]})
        return made

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self._norm(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._norm(model, float("inf")) if grad_norm is None else grad_norm

    def _norm(self, model: Any, limit: float) -> Tensor:
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(model.parameters(), limit)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.is_fsdp_enabled:
            return super().save_model(output_dir, _internal_call)  # type: ignore[misc,no-any-return]
        state = _whole(self.model)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)  # type: ignore[attr-defined]
        dist.barrier()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc,no-any-return]
        state = {**self._model_state(), **self._optimizer_state()}
        state_dict_saver.save(state, checkpoint_id=_states(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:
            return super()._load_from_checkpoint(checkpoint, model)  # type: ignore[misc,no-any-return]
        state = self._model_state()
        state_dict_loader.load(state, checkpoint_id=_states(checkpoint))
        set_model_state_dict(self.model, state["model"], options=_options(self.model))

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled:
            return super()._load_best_model()  # type: ignore[misc,no-any-return]
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.is_fsdp_enabled:
            return super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc,no-any-return]
        state = self._optimizer_state()
        state_dict_loader.load(state, checkpoint_id=_states(checkpoint))
        set_optimizer_state_dict(
            self.model, self._plain_optimizer(), state["optimizer"], options=_options(self.model)
        )
        scheduler = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _model_state(self) -> dict[str, Any]:
        return {"model": get_model_state_dict(self.model, options=_options(self.model))}

    def _optimizer_state(self) -> dict[str, Any]:
        options = _options(self.model)
        optimizer = self._plain_optimizer()
        return {"optimizer": get_optimizer_state_dict(self.model, optimizer, options=options)}

    def _plain_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's has one in it


class GroupTrainer(GroupMixin, transformers.Trainer):
    """transformers' Trainer for a model with swap(group=)."""


def _refuse_codes(op: str, model: nn.Module) -> None:
    """Refuses FP8 weights: a rank's are plain parameters, which no state dict gathers."""
    if any(isinstance(m, MoEExperts) and is_codes(m.gate_up_proj) for m in model.modules()):
        raise NotImplementedError(
            f"[{op}] model must not have FP8 weights; save adapters, and write the experts of each "
            "rank by fp8_tensors()"
        )


def _states(checkpoint: str | Path) -> Path:
    return Path(checkpoint) / "states"


def _options(model: Any, **more: Any) -> StateDictOptions:
    """The options of a state dict: PEFT's models save only what is trained."""
    return StateDictOptions(
        ignore_frozen_params=hasattr(model, "peft_config"), strict=False, **more
    )


def _whole(model: Any) -> dict[str, Any]:
    """The state_dict of one process, on the CPU of the first rank. Collective."""
    state: dict[str, Any] = get_model_state_dict(
        model, options=_options(model, full_state_dict=True, cpu_offload=True)
    )
    return state


def _process_group(group: Any) -> Any:
    """The process group, of a mesh that whose ranks share the experts."""
    return group.get_group(group.ndim - 1) if hasattr(group, "get_group") else group


def _folder(path: str | Path) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))


def _read(folder: Path, experts: int, mine: range) -> dict[str, Tensor]:
    """The tensors of a checkpoint; of the experts, one by one or stacked [E, ...], only `mine`, as
    if there were no others."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"[from_pretrained] path must have safetensors; got {folder}")
    state: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                found = _OF_AN_EXPERT.search(name)
                if found is not None:
                    if (expert := int(found[0])) in mine:
                        here = _OF_AN_EXPERT.sub(str(expert - mine.start), name)
                        state[here] = opened.get_tensor(name)
                    continue
                part = opened.get_slice(name)
                shape = part.get_shape()
                stacked = len(shape) == 3 and shape[0] == experts and shape[1] > 1
                stacked = stacked or (name.endswith("_proj_bias") and shape[0] == experts)
                state[name] = part[mine.start : mine.stop] if stacked else opened.get_tensor(name)
    return state
