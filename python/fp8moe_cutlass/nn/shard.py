"""shard_experts: the ranks of a group share the experts of a model, beside fully_shard or DDP."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8moe_cutlass.autograd.arguments import check_word
from fp8moe_cutlass.autograd.weights import is_codes
from fp8moe_cutlass.distributed import Exchange, GroupMove
from fp8moe_cutlass.distributed.exchange import TRANSPORTS
from fp8moe_cutlass.distributed.shards import Average, is_sharded
from fp8moe_cutlass.nn.experts import MoEExperts
from fp8moe_cutlass.nn.fp8_checkpoint import WEIGHTS


def shard_experts(
    model: nn.Module,
    group: Any,
    *,
    rank_capacity: int | tuple[int, int] | None = None,
    transport: str = "auto",
) -> set[nn.Parameter]:
    """Turns every MoEExperts of `model` into this rank's share, in place; returns their parameters,
    which fully_shard must be told to ignore:

        experts = nn.shard_experts(model, dist.group.WORLD)
        fully_shard(model, ignored_params=experts)
        optimizer = torch.optim.AdamW(model.parameters())

    group: the process group, or the one-dimensional DeviceMesh, whose ranks share the experts; or a
      DeviceMesh of two dimensions, whose second one shares them and whose first one has replicas,
      as fully_shard has with this mesh.
    rank_capacity, transport: as of MoEExperts.

    New parameters replace the old ones, wherever the model has them (ties stay). Hooks and
    attributes of the old ones, such as main_grad, stay behind. A warning says where something still
    holds an old one: make optimizers after this, and after fully_shard.

    The parameters become DTensors [E, ...], sharded over the experts: state dicts, optimizers,
    torch.distributed.checkpoint and clip_grad_norm_ take them as they take those of fully_shard.
    From whole parameters a rank keeps its part. On the meta device nothing is allocated before
    to_empty(). A state dict to load may have whole tensors [E, ...], of which each rank takes its
    part. A layer made with group= has its part already.
    Gradients, in .grad or main_grad, are averages over all ranks of the mesh: what data parallelism
    makes of the other parameters', for a loss that is a mean over the rank's tokens.
    DistributedDataParallel ignores the parameters by itself. An optimizer takes them in a parameter
    group apart from plain tensors.

    FP8 weights, which are frozen, become plain parameters: this rank's part [E / W, ...], which the
    layer's state dict then holds. So are the parameters of add_lora, which must come after; their
    gradients are averages, and DistributedDataParallel must be told to ignore them. Of both
    torch.distributed.checkpoint keeps one rank's for all.
    """
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    layers = [(name, m) for name, m in modules if isinstance(m, MoEExperts)]
    if not layers:
        raise ValueError(
            f"[shard_experts] model must contain a MoEExperts; got {type(model).__name__}"
        )
    check_word("shard_experts", "transport", transport, *TRANSPORTS)
    mesh = _mesh(group)
    for name, layer in layers:
        _refuse(name, layer)
    # Which may refuse, too:
    exchanges = [_exchange(layer, mesh, rank_capacity, transport) for _, layer in layers]
    made: dict[nn.Parameter, nn.Parameter] = {}  # by what they replace, wherever that is tied
    for (_, layer), exchange in zip(layers, exchanges, strict=True):
        _shard(layer, mesh, exchange, made)
    _replace(model, made)
    shares, replaced = set(made.values()), [weakref.ref(w) for w in made]
    del made
    if any(w() is not None for w in replaced):
        warnings.warn(
            "[shard_experts] something still holds parameters that it has replaced: an optimizer "
            "made before it trains none of them; make it, and DistributedDataParallel, after "
            "shard_experts and fully_shard. An earlier output, or its loss, holds them harmlessly",
            stacklevel=2,
        )
    return shares


def _replace(model: nn.Module, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Puts the values of `made` where `model` has its keys; DDP ignores them."""
    names: list[str] = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for name, module in model.named_modules():
        for key, w in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if w in made:
                setattr(module, key, made[w])
                names.append(f"{name}.{key}")
    model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]


def _mesh(group: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ValueError(
                f"[shard_experts] a mesh must have one or two dimensions; got {group.ndim}"
            )
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"[shard_experts] group must be a ProcessGroup or a DeviceMesh; got {group!r}"
        )
    # Equal to the mesh of fully_shard's default, where the group is the world.
    cuda = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
    return DeviceMesh.from_group(group, "cuda" if cuda else "cpu")


def _refuse(name: str, layer: MoEExperts) -> None:
    got = None
    if layer._average is not None:
        got = "one that is shared already"
    elif layer.lora_rank:
        got = "one with LoRA: add it after"
    elif layer.delay_wgrad:
        got = "delay_wgrad=True"
    elif layer._reused is not None:
        got = "one inside reuse_fp8_weights"
    elif any(is_sharded(getattr(layer, w)) for w in WEIGHTS):
        got = "a DTensor (fully_shard): shard the experts first"
    if got is not None:
        raise RuntimeError(
            f"[shard_experts] a layer must have plain parameters and no delay_wgrad; got {got}, in "
            f"{name or type(layer).__name__}"
        )


def _exchange(
    layer: MoEExperts, mesh: Any, rank_capacity: int | tuple[int, int] | None, transport: str
) -> Exchange:
    group = mesh.get_group(mesh.ndim - 1)
    device = layer.down_proj.device
    made = Exchange(group, layer.num_experts, rank_capacity, device, transport)
    if layer.group is not None and layer.local_experts != made.local_experts:
        raise RuntimeError(
            f"[shard_experts] a layer with a group must hold experts {made.local_experts}; got "
            f"{layer.local_experts}"
        )
    return made


def _shard(
    layer: MoEExperts, mesh: Any, exchange: Exchange, made: dict[nn.Parameter, nn.Parameter]
) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mine, whole = exchange.local_experts, layer.group is None
    layer._move = GroupMove(exchange)
    average = Average(1 / mesh.size(), mesh.get_group(0) if mesh.ndim == 2 else None)
    layer._lora_average = average
    if is_codes(layer.gate_up_proj):
        for w in layer.parameters(recurse=False):
            if w not in made:
                part = w.detach()[mine.start : mine.stop].clone() if whole else w.detach()
                made[w] = nn.Parameter(part, requires_grad=False)
        return
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    layer._average = average
    for w in (getattr(layer, name) for name in layer.weight_names + layer.bias_names):
        if w in made:
            continue
        part = w.detach()
        if whole:
            part = part[mine.start : mine.stop].clone()
        sharded = DTensor.from_local(part, mesh, placements, run_check=False)
        made[w] = nn.Parameter(sharded, requires_grad=w.requires_grad)
