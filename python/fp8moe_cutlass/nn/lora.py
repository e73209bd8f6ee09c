"""Low-rank terms (LoRA) of an expert layer: its parameters, and their names in PEFT's form.

MoEExperts.add_lora describes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8moe_cutlass.autograd.body import Lora
from fp8moe_cutlass.autograd.weights import is_codes, quantize_weight
from fp8moe_cutlass.distributed.shards import draw_share, held, is_sharded
from fp8moe_cutlass.nn._validate import check_dtype, check_number, check_size
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.tensor import Fp8Tensor

if TYPE_CHECKING:
    from fp8moe_cutlass.nn.experts import MoEExperts

NAMES = (  # of the parameters, as PEFT's target_parameters have them, which wrap gate_up_proj first
    "base_layer.lora_A.default.weight",
    "base_layer.lora_B.default.weight",
    "lora_A.default.weight",
    "lora_B.default.weight",
)


class Factor(nn.Module):
    """A factor of all local experts. `weight` is an A, [E, r, C], or a B, [E, C, r]; in a state
    dict it has PEFT's shape, [E r, C] or [C, r E], the expert the fastest. A state dict to load may
    hold the `experts` of all ranks."""

    def __init__(
        self, shape: tuple[int, int, int], is_a: bool, local: range, experts: int, **factory: Any
    ) -> None:
        super().__init__()
        self.is_a, self.local, self.experts = is_a, local, experts
        self.weight = nn.Parameter(torch.empty(shape, **factory))

    def __setattr__(self, name: str, value: Any) -> None:
        if is_sharded(value) and len(self.local) < self.experts:
            raise RuntimeError(
                "[add_lora] fully_shard must ignore the LoRA of shared experts, of which each rank "
                "has its own: ignored_params={*experts.parameters()} of each MoEExperts; got a "
                "DTensor"
            )
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key = prefix + "weight"
        w = destination[key]
        if not is_sharded(w):
            shaped = w if self.is_a else w.permute(1, 2, 0)  # and a copy, also of one expert
            shaped = shaped.clone(memory_format=torch.contiguous_format)
            destination[key] = shaped.flatten(0, 1) if self.is_a else shaped.flatten(1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        key = prefix + "weight"
        new, own, e = state_dict.get(key), self.weight, len(self.local)
        if isinstance(new, Tensor) and not is_sharded(own) and new.shape != own.shape:
            rank, c = own.shape[1:] if self.is_a else own.shape[:0:-1]
            shapes = [[n * rank, c] if self.is_a else [c, rank * n] for n in (e, self.experts)]
            if list(new.shape) not in shapes:
                want = " or ".join(dict.fromkeys(map(str, shapes)))
                args[-1].append(
                    f"[MoEExperts] {key} must be {want}, of a LoRA of rank {rank} on {e} experts; "
                    f"got {list(new.shape)}"
                )
                return
            new = new.view(-1, rank, c) if self.is_a else new.view(c, rank, -1).permute(2, 0, 1)
            state_dict[key] = new if len(new) == e else new[self.local.start : self.local.stop]
        super()._load_from_state_dict(state_dict, prefix, *args)


class Pair(nn.Module):
    """A and B of one projection, by PEFT's names."""

    def __init__(self, a: Factor, b: Factor) -> None:
        super().__init__()
        self.lora_A, self.lora_B = (nn.ModuleDict({"default": factor}) for factor in (a, b))


class LayerLora(NamedTuple):
    """The low-rank terms that a layer has."""

    rank: int
    scaling: float  # alpha / rank
    factors: list[Factor]  # A and B of gate_up_proj, A and B of down_proj


def check(layer: MoEExperts, rank: int, alpha: float, dtype: torch.dtype) -> None:
    """Raises what add raises, before anything changes."""
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
    if layer._average is None and is_sharded(layer.gate_up_proj):
        raise RuntimeError(
            "[add_lora] the layer must have plain parameters: add LoRA before fully_shard; got "
            "DTensors"
        )


def add(layer: MoEExperts, rank: int, alpha: float, dtype: torch.dtype) -> None:
    """MoEExperts.add_lora."""
    check(layer, rank, alpha, dtype)
    e, h, i = len(layer.local_experts), layer.hidden_size, layer.intermediate_size
    shapes = (e, rank, h), (e, layer.activation.parts * i, rank), (e, rank, i), (e, h, rank)
    factory: Any = {"dtype": dtype, "device": layer.gate_up_proj.device}
    for name in layer.weight_names + layer.bias_names:
        getattr(layer, name).requires_grad_(False)
    ids = layer.local_experts, layer.num_experts
    made = [Factor(s, n % 2 == 0, *ids, **factory) for n, s in enumerate(shapes)]
    layer.base_layer, outer = Pair(*made[:2]), Pair(*made[2:])
    layer.lora_A, layer.lora_B = outer.lora_A, outer.lora_B
    layer._lora = LayerLora(rank, alpha / rank, made)
    reset(layer)


@torch.no_grad()
def reset(layer: MoEExperts) -> None:
    """A uniform within 1/sqrt(fan in), as PEFT has it, B zero. Ranks of a group that start from the
    same random state draw those of all experts, and keep theirs."""
    a1, b1, a2, b2 = factors(layer)
    for mine in (a1, a2):
        draw_share(mine, mine.shape[-1] ** -0.5, layer.local_experts, layer.num_experts)
    for mine in (b1, b2):
        nn.init.zeros_(mine)


def remove(layer: MoEExperts) -> None:
    """The layer without its LoRA; its weights stay frozen."""
    del layer.base_layer, layer.lora_A, layer.lora_B
    layer._lora = None


def factors(layer: Any) -> list[Tensor]:
    """The four parameters: A and B of gate_up_proj, A and B of down_proj."""
    return [factor.weight for factor in layer._lora.factors]


def factors_of(layer: Any) -> Lora | None:
    """What a forward of a layer with LoRA adds to its projections."""
    return Lora(tuple(factors(layer)), layer._lora.scaling) if layer.lora_enabled else None


# ---- merging -------------------------------------------------------------------------------------


def merged(layer: MoEExperts, of: int, expert: int) -> Tensor:
    """W + scaling B A of a local expert: of gate_up_proj (of=0) or down_proj (1), [N, K] f32."""
    a, b = (t.detach()[expert].float() for t in factors(layer)[2 * of : 2 * of + 2])
    w = held((layer.gate_up_proj, layer.down_proj)[of]).detach()[expert]
    w = w.mT if layer._turned else w
    if is_codes(w):
        scales = (layer.gate_up_proj_scale_inv, layer.down_proj_scale_inv)[of].detach()[expert]
        value = Fp8Tensor(w, scales.float(), "block").float()
    else:
        value = w.float()
    assert layer._lora is not None
    with torch.autocast(value.device.type, enabled=False):
        return torch.addmm(value, b, a, alpha=layer._lora.scaling)


@torch.no_grad()
def merge(layer: MoEExperts) -> None:
    """MoEExperts.merge_lora."""
    if not layer.lora_rank:
        raise RuntimeError("[merge_lora] the layer must have a LoRA: add_lora; got none")
    weights: Any = (layer.gate_up_proj, layer.down_proj)
    if layer._average is not None:
        weights = held(weights[0]), held(weights[1])
    if is_sharded(weights[0]) or is_sharded(factors(layer)[0]):
        raise RuntimeError("[merge_lora] the layer must hold its experts whole; got DTensors")
    scales: Any = (None, None)
    if is_codes(weights[0]):
        scales = layer.gate_up_proj_scale_inv, layer.down_proj_scale_inv
    for of, (w, scale) in enumerate(zip(weights, scales, strict=True)):
        for expert in range(len(w)):
            value = merged(layer, of, expert)
            if scale is None:
                (w.mT if layer._turned else w)[expert].copy_(value)
                continue
            q, _ = quantize_weight(value[None], rule_of(layer, scale), transposed=False)
            w[expert].view(torch.uint8).copy_(q.data[0].view(torch.uint8))
            scale[expert].copy_(q.scale_inv[0])
    remove(layer)


def rule_of(layer: MoEExperts, scale: Tensor) -> Fp8Recipe:
    """The recipe by which weights get scales of this dtype: float32 takes any scale."""
    recipe: Any = layer.recipe
    return recipe if scale.dtype == torch.float32 else Fp8Recipe(eps=recipe.eps)
