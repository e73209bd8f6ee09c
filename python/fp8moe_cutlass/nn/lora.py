"""Low-rank terms (LoRA) of an expert layer: its parameters, and their names in PEFT's form.

MoEExperts.add_lora describes them.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8moe_cutlass.autograd.body import Lora
from fp8moe_cutlass.autograd.weights import is_codes, quantize_weight
from fp8moe_cutlass.distributed.shards import is_sharded
from fp8moe_cutlass.nn._validate import check_dtype, check_number, check_size
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.tensor import TILE

if TYPE_CHECKING:
    from fp8moe_cutlass.nn.experts import MoEExperts

FACTORS = ("gate_up_lora_A", "gate_up_lora_B", "down_lora_A", "down_lora_B")
# PEFT wraps gate_up_proj first, whatever the order of its target_parameters: the inner wrapper.
PEFT_NAMES = (
    "base_layer.lora_A.default.weight",
    "base_layer.lora_B.default.weight",
    "lora_A.default.weight",
    "lora_B.default.weight",
)


def add(layer: MoEExperts, rank: int, alpha: float, dtype: torch.dtype) -> None:
    """MoEExperts.add_lora."""
    check_size("add_lora", "rank", rank)
    if rank % 8 or rank > 64:
        raise ValueError(f"[add_lora] rank must be a multiple of 8, 8 to 64; got {rank}")
    check_number("add_lora", "alpha", alpha)
    if alpha == 0:
        raise ValueError(f"[add_lora] alpha must be more than 0; got {alpha}")
    check_dtype("add_lora", dtype)
    if layer.recipe is None:
        raise ValueError("[add_lora] the layer must have an FP8 recipe; got None")
    if layer.lora_rank:
        raise RuntimeError(f"[add_lora] the layer must have no LoRA; got one of {layer.lora_rank}")
    if layer._average is not None or is_sharded(layer.gate_up_proj):
        raise RuntimeError(
            "[add_lora] the layer must have plain parameters: add LoRA before fully_shard, and "
            "share experts by group=; got DTensors"
        )
    e, h, i = len(layer.local_experts), layer.hidden_size, layer.intermediate_size
    shapes = (e, rank, h), (e, 2 * i, rank), (e, rank, i), (e, h, rank)
    layer.gate_up_proj.requires_grad_(False)
    layer.down_proj.requires_grad_(False)
    device = layer.gate_up_proj.device
    for name, shape in zip(FACTORS, shapes, strict=True):
        setattr(layer, name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
    layer._lora = rank, alpha / rank
    reset(layer)


@torch.no_grad()
def reset(layer: MoEExperts) -> None:
    """A uniform within 1/sqrt(fan in), as PEFT has it, B zero. Ranks of a group that start from the
    same random state draw those of all experts, and keep theirs."""
    for name in FACTORS[0::2]:
        mine = getattr(layer, name)
        bound, other = mine.shape[-1] ** -0.5, torch.empty_like(mine[0])
        for e in range(layer.num_experts):
            here = e in layer.local_experts
            nn.init.uniform_(mine[e - layer.local_experts.start] if here else other, -bound, bound)
    for name in FACTORS[1::2]:
        nn.init.zeros_(getattr(layer, name))


def remove(layer: MoEExperts) -> None:
    """The layer without its LoRA; its weights stay frozen."""
    for name in FACTORS:
        delattr(layer, name)
    layer._lora = None


def factors_of(layer: Any) -> Lora | None:
    """What a forward of the layer adds to its projections."""
    if layer._lora is None or not layer.lora_enabled:
        return None
    return Lora(tuple(getattr(layer, name) for name in FACTORS), layer._lora[1])


# ---- in PEFT's form ------------------------------------------------------------------------------


def to_peft(name: str, factor: Tensor) -> Tensor:
    """A [E, r, C] as PEFT's lora_A [E r, C]; B [E, C, r] as its lora_B [C, r E], the expert the
    fastest."""
    if name.endswith("A"):
        return factor.flatten(0, 1)
    return factor.permute(1, 2, 0).flatten(1).contiguous()


def from_peft(name: str, weight: Tensor, rank: int) -> Tensor:
    """The reverse."""
    if name.endswith("A"):
        return weight.view(-1, rank, weight.shape[1])
    return weight.view(len(weight), rank, -1).permute(2, 0, 1)


def rename_saved(layer: MoEExperts, state: MutableMapping[str, Any], prefix: str) -> None:
    """Gives LoRA's factors, in a state dict of the layer, PEFT's names and shapes. Those that
    fully_shard holds keep theirs."""
    for name, peft in zip(FACTORS, PEFT_NAMES, strict=True):
        factor = state.get(prefix + name)
        if factor is not None and not is_sharded(factor):
            del state[prefix + name]
            state[prefix + peft] = to_peft(name, factor)


def rename_loaded(layer: MoEExperts, state: MutableMapping[str, Any], prefix: str) -> list[str]:
    """The reverse, in place, of a state dict to load: of all experts, or of this rank's. Errors."""
    errors = []
    for name, peft in zip(FACTORS, PEFT_NAMES, strict=True):
        key = prefix + peft
        weight: Any = state.get(key)
        if weight is None:
            continue
        mine: Tensor = getattr(layer, name)
        e, rank = len(layer.local_experts), layer.lora_rank
        wide = name.endswith("B")
        c = mine.shape[1 if wide else 2]
        shapes = [(c, rank * n) if wide else (n * rank, c) for n in (e, layer.num_experts)]
        if tuple(weight.shape) not in shapes:
            errors.append(
                f"[MoEExperts] {key} must be {list(shapes[-1])}, of a LoRA of rank {rank}; got "
                f"{list(weight.shape)}"
            )
            continue
        factor = from_peft(name, state.pop(key), rank)
        if len(factor) != e:
            factor = factor[layer.local_experts.start : layer.local_experts.stop]
        state[prefix + name] = factor
    return errors


def rename_missing(keys: list[str], prefix: str) -> None:
    """Gives keys that a state dict to load lacks PEFT's names."""
    names = {prefix + name: prefix + peft for name, peft in zip(FACTORS, PEFT_NAMES, strict=True)}
    keys[:] = [names.get(key, key) for key in keys]


# ---- merging -------------------------------------------------------------------------------------


def merged(layer: MoEExperts, of: int, expert: int) -> Tensor:
    """W + scaling B A of a local expert: of gate_up_proj (of=0) or down_proj (1), [N, K] f32."""
    a, b = (getattr(layer, name).detach()[expert].float() for name in FACTORS[2 * of : 2 * of + 2])
    w = (layer.gate_up_proj, layer.down_proj)[of].detach()[expert]
    value = w.float()
    if is_codes(w):
        scales = (layer.gate_up_proj_scale_inv, layer.down_proj_scale_inv)[of].detach()[expert]
        n, k = value.shape
        by_block = scales.float().repeat_interleave(TILE, 0)[:n].repeat_interleave(TILE, 1)[:, :k]
        value *= by_block
    assert layer._lora is not None
    return torch.addmm(value, b, a, alpha=layer._lora[1])


@torch.no_grad()
def merge(layer: MoEExperts) -> None:
    """MoEExperts.merge_lora."""
    if not layer.lora_rank:
        raise RuntimeError("[merge_lora] the layer must have a LoRA: add_lora; got none")
    weights: Any = (layer.gate_up_proj, layer.down_proj)
    if is_sharded(weights[0]) or is_sharded(getattr(layer, FACTORS[0])):
        raise RuntimeError("[merge_lora] the layer must hold its experts whole; got DTensors")
    scales: Any = (None, None)
    if is_codes(weights[0]):
        scales = layer.gate_up_proj_scale_inv, layer.down_proj_scale_inv
    for of, (w, scale) in enumerate(zip(weights, scales, strict=True)):
        for expert in range(len(w)):
            value = merged(layer, of, expert)
            if scale is None:
                w[expert].copy_(value)
                continue
            q, _ = quantize_weight(value[None], rule_of(layer, scale), transposed=False)
            w[expert].view(torch.uint8).copy_(q.data[0].view(torch.uint8))
            scale[expert].copy_(q.scale_inv[0])
    remove(layer)


def rule_of(layer: MoEExperts, scale: Tensor) -> Fp8Recipe:
    """The recipe by which weights get scales of this dtype: float32 takes any scale."""
    recipe: Any = layer.recipe
    return recipe if scale.dtype == torch.float32 else Fp8Recipe(eps=recipe.eps)
