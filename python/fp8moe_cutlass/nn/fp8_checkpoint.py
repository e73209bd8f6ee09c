"""FP8 weights in and out: the tensors of a checkpoint, by their names.

MoEExperts.from_fp8 and fp8_tensors describe the two forms, per expert and fused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8moe_cutlass.autograd.body import Options
from fp8moe_cutlass.autograd.weights import is_codes, quantize_weight
from fp8moe_cutlass.distributed.shards import is_sharded
from fp8moe_cutlass.nn import lora
from fp8moe_cutlass.tensor import TILE, scale_shape

if TYPE_CHECKING:
    from fp8moe_cutlass.nn.experts import MoEExperts

WEIGHTS = ("gate_up_proj", "down_proj")
SCALES = ("gate_up_proj_scale_inv", "down_proj_scale_inv")
NAMES = WEIGHTS + SCALES
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_OF_AN_EXPERT = ("gate_proj", "up_proj", "down_proj")


def check_options(options: Options, bias: bool) -> None:
    """ValueError for options that a layer of FP8 weights cannot have."""
    if options.recipe is None:
        raise ValueError("[MoEExperts] FP8 weights need an FP8 recipe; got recipe=None")
    if options.activation.interleaved or not options.activation.gated:
        raise ValueError(
            "[MoEExperts] FP8 weights must be those of an activation with a gate that is not "
            f"interleaved; got {options.activation}"
        )
    if bias:
        raise ValueError("[MoEExperts] FP8 weights have no biases; got bias=True")


def sizes(
    tensors: Mapping[str, Tensor], prefix: str, num_experts: int
) -> tuple[int, int, tuple[torch.dtype, torch.dtype]]:
    """H, I and the dtypes of both scales, as the first tensors have them."""
    if not isinstance(tensors, Mapping):
        raise ValueError(
            f"[from_fp8] tensors must be a mapping by name; got {type(tensors).__name__}"
        )
    if f"{prefix}gate_up_proj" in tensors:
        key, ndim = f"{prefix}down_proj", 3
        scales = [f"{prefix}{name}" for name in SCALES]
    else:
        key, ndim = f"{prefix}0.down_proj.weight", 2
        scales = [f"{prefix}0.{name}.weight_scale_inv" for name in ("gate_proj", "down_proj")]
        if key not in tensors:
            raise ValueError(
                f"[from_fp8] tensors must have {prefix}gate_up_proj or {key}; got {_some(tensors)}"
            )
        beyond = f"{prefix}{num_experts}.down_proj.weight"
        if beyond in tensors:
            raise ValueError(
                f"[from_fp8] num_experts must count all experts of tensors; got {num_experts}, and "
                f"{beyond}"
            )
    _refuse_others(tensors, prefix, ndim == 3)
    down = _get(tensors, key)
    if down.ndim != ndim or (ndim == 3 and down.shape[0] != num_experts):
        want = f"[{num_experts}, H, I]" if ndim == 3 else "[H, I]"
        raise ValueError(f"[from_fp8] {key} must be {want}; got {list(down.shape)}")
    hidden, inner = down.shape[-2:]
    dtypes = [_get(tensors, name).dtype for name in scales]
    return hidden, inner, (dtypes[0], dtypes[1])


def read_into(layer: MoEExperts, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """The weights and scales of the layer's local experts, one expert after the other."""
    h, i, mine = layer.hidden_size, layer.intermediate_size, layer.local_experts
    to: list[Any] = [getattr(layer, name).data for name in NAMES]
    gate_up, down, gate_up_scale, down_scale = to
    if f"{prefix}gate_up_proj" in tensors:
        shapes: Any = (2 * i, h), (h, i)
        for name, shape, w, s in zip(WEIGHTS, shapes, to[:2], to[2:], strict=True):
            codes, scale = _codes(tensors, prefix + name, layer.num_experts, *shape)
            _fill(f"{prefix}{name}_scale_inv", s, scale[mine.start : mine.stop])
            w.copy_(codes[mine.start : mine.stop])
        return
    if i % TILE:
        raise ValueError(
            f"[from_fp8] {prefix}0.gate_proj.weight must have a multiple of {TILE} rows, so that "
            f"its blocks of scales end where up_proj's begin; got {i}"
        )
    for n, e in enumerate(mine):
        tiles = i // TILE
        parts = (
            (gate_up[n, :i], gate_up_scale[n, :tiles], i, h),
            (gate_up[n, i:], gate_up_scale[n, tiles:], i, h),
            (down[n], down_scale[n], h, i),
        )
        for name, (w, s, *shape) in zip(_OF_AN_EXPERT, parts, strict=True):
            key = f"{prefix}{e}.{name}.weight"
            codes, scale = _codes(tensors, key, *shape)
            _fill(f"{key}_scale_inv", s, scale)
            w.copy_(codes)


def _refuse_others(tensors: Mapping[str, Tensor], prefix: str, fused: bool) -> None:
    """Refuses what belongs to the experts and would not be read, such as biases."""
    own = "|".join(NAMES) if fused else rf"\d+\.({'|'.join(_OF_AN_EXPERT)})\.weight(_scale_inv)?"
    of_experts = re.compile(rf"(?!({own})$)(\d+\.|{'|'.join(WEIGHTS)})")
    for key in tensors:
        if key.startswith(prefix) and of_experts.match(key[len(prefix) :]):
            form = "fused" if fused else "per expert"
            raise ValueError(
                f"[from_fp8] tensors must have weights and scales alone, {form}; got {key}, which "
                "would not be read"
            )


def _fill(key: str, to: Tensor, scale: Tensor) -> None:
    if scale.dtype != to.dtype:
        raise ValueError(
            f"[from_fp8] {key} must be {to.dtype}, as the first expert's; got {scale.dtype}"
        )
    to.copy_(scale)


def _codes(tensors: Mapping[str, Tensor], key: str, *shape: int) -> tuple[Tensor, Tensor]:
    """Codes of that shape and their scales; ValueError that names the key."""
    codes, scale = _get(tensors, key), _get(tensors, f"{key}_scale_inv")
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"[from_fp8] {key} must be float8_e4m3fn; got {codes.dtype}")
    if tuple(codes.shape) != shape:
        raise ValueError(f"[from_fp8] {key} must be {list(shape)}; got {list(codes.shape)}")
    want = scale_shape(shape, "block")
    if tuple(scale.shape) != want:
        raise ValueError(
            f"[from_fp8] {key}_scale_inv must be {list(want)}, one scale per {TILE}x{TILE} block "
            f"of {list(shape)}; got {list(scale.shape)}"
        )
    if scale.dtype not in SCALE_DTYPES:
        raise ValueError(
            f"[from_fp8] {key}_scale_inv must be float32, bfloat16 or float8_e8m0fnu; got "
            f"{scale.dtype}"
        )
    return codes, scale


def _get(tensors: Mapping[str, Tensor], key: str) -> Tensor:
    try:
        return tensors[key]
    except KeyError:
        raise ValueError(f"[from_fp8] tensors must have {key}; got {_some(tensors)}") from None


def _some(tensors: Mapping[str, Tensor]) -> str:
    names = list(tensors)
    return f"{len(names)} others" + (f", such as {names[0]}" if names else "")


def misfits(layer: MoEExperts, state: Mapping[str, Any], prefix: str) -> list[str]:
    """Names what load_state_dict would cast, codes to values or the other way round."""
    found = []
    for name in NAMES:
        key, p = prefix + name, getattr(layer, name, None)
        new = state.get(key)
        if p is None or not isinstance(new, Tensor) or new.dtype == p.dtype:
            continue
        if is_codes(layer.gate_up_proj) or is_codes(new):
            found.append(f"[MoEExperts] {key} must be {p.dtype}, as the layer's; got {new.dtype}")
    return found


def as_bits(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """fn, of Module._apply, on the bits of a tensor: what moves it, but casts floats alone."""

    def applied(t: Tensor) -> Tensor:
        bits = _BITS[t.element_size()]
        made = fn(t.view(bits))
        if made.dtype != bits:
            raise RuntimeError(
                f"[MoEExperts] FP8 weights cannot be cast; got {made.dtype}: dequantize them"
            )
        return made.view(t.dtype)

    return applied


def write(layer: MoEExperts, prefix: str, fused: bool) -> Iterator[tuple[str, Tensor]]:
    """MoEExperts.fp8_tensors, its arguments checked."""
    gate_up, down = layer.local_weights()
    if is_sharded(gate_up):
        raise RuntimeError(
            "[fp8_tensors] the layer must hold its experts whole; got DTensors of fully_shard"
        )
    if layer.recipe is None:
        raise ValueError("[fp8_tensors] the layer must have an FP8 recipe; got None")
    if layer.activation.interleaved or not layer.activation.gated:
        raise ValueError(
            "[fp8_tensors] the layer must have a gate beside up, not interleaved; got "
            f"{layer.activation}"
        )
    if layer.has_bias:
        raise ValueError("[fp8_tensors] the layer must have no biases; got bias=True")
    if fused and layer.group is not None:
        raise ValueError(
            "[fp8_tensors] fused must be False with a group, of whose tensors a rank has a part; "
            "got True"
        )
    if not fused and layer.intermediate_size % TILE and is_codes(gate_up) and not layer.lora_rank:
        raise ValueError(
            f"[fp8_tensors] fused must be True where I is no multiple of {TILE} and a block has "
            f"rows of gate and up; got False with I {layer.intermediate_size}"
        )
    return (_fused if fused else _by_expert)(layer, prefix, gate_up.detach(), down.detach())


def _fused(
    layer: MoEExperts, prefix: str, gate_up: Tensor, down: Tensor
) -> Iterator[tuple[str, Tensor]]:
    for of, (name, w) in enumerate(zip(WEIGHTS, (gate_up, down), strict=True)):
        scale = getattr(layer, f"{name}_scale_inv").detach() if is_codes(w) else None
        if layer.lora_rank:
            made = [
                _quantized(layer, lora.merged(layer, of, n)[None], scale) for n in range(len(w))
            ]
            with torch.autocast(w.device.type, enabled=False):  # which takes no FP8 here
                w, scale = (torch.cat(parts) for parts in zip(*made, strict=True))
        elif scale is None:
            w, scale = _quantized(layer, w)
        yield prefix + name, w
        yield f"{prefix}{name}_scale_inv", scale


def _by_expert(
    layer: MoEExperts, prefix: str, gate_up: Tensor, down: Tensor
) -> Iterator[tuple[str, Tensor]]:
    i, tiles = layer.intermediate_size, layer.intermediate_size // TILE
    for n, e in enumerate(layer.local_experts):
        both, mine = gate_up[n], down[n]
        scales: Any = None, None, None
        if is_codes(both):
            gate_up_scale, down_scale = (getattr(layer, name).detach()[n] for name in SCALES)
            scales = gate_up_scale[:tiles], gate_up_scale[tiles:], down_scale
        if layer.lora_rank:
            both, mine = (lora.merged(layer, of, n) for of in range(2))
        parts = both[:i], both[i:], mine
        for name, w, scale in zip(_OF_AN_EXPERT, parts, scales, strict=True):
            if not is_codes(w):
                (w,), (scale,) = _quantized(layer, w[None], scale)
            yield f"{prefix}{e}.{name}.weight", w
            yield f"{prefix}{e}.{name}.weight_scale_inv", scale


def _quantized(layer: MoEExperts, w: Tensor, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of w [E, N, K] by the layer's rule; like: scales of FP8 weights, whose place
    these take."""
    recipe: Any = layer.recipe if like is None else lora.rule_of(layer, like)
    q, _ = quantize_weight(w, recipe, transposed=False)
    return q.data, q.scale_inv if like is None else q.scale_inv.to(like.dtype)
