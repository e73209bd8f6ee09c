"""The FP8 checkpoints that transformers loads: which of their experts run, and their linear layers.

transformers holds experts as FP8Experts, whose codes and scales are MoEExperts', and other layers
as FP8Linear, whose kernel passes no gradient on. `swap` takes the one and dequantizes the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd.weights import is_codes
from fp8moe_cutlass.integrations.transformers_activation import is_silu
from fp8moe_cutlass.nn.fp8_checkpoint import WEIGHTS
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.tensor import TILE, Fp8Tensor, scale_shape

_OTHERS = tuple(
    kind
    for name, kind in vars(finegrained_fp8).items()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and name.startswith("FP8")
)


def experts_refused(module: Any) -> str | None:
    """Why these FP8Experts are not MoEExperts'; None: they are."""
    if not module.has_gate:
        return "no gate"
    found = []
    if module.has_bias:
        found.append("biases")
    if module.swiglu_alpha is not None or module.limit is not None:
        found.append("a gate of its own")
    if module.activation_scheme != "dynamic":
        found.append("static scales of activations")
    if not is_silu(module.act_fn):
        found.append(f"its activation is {type(module.act_fn).__name__}, not SiLU")
    other_blocks = _other_blocks(module)
    if other_blocks is not None:
        found.append(other_blocks)
    return ", ".join(found) or None


def experts_unfit(module: Any, recipe: Fp8Recipe | None) -> str | None:
    """Why the codes and scales of FP8Experts cannot be multiplied as they lie; None: they can."""
    if recipe is None:
        return "its weights are FP8 codes, which need an FP8 recipe; got recipe=None"
    for name in WEIGHTS:
        reason = _unfit(getattr(module, name), getattr(module, f"{name}_scale_inv"), name)
        if reason is not None:
            return reason
    return None


def linears_unfit(model: nn.Module) -> str | None:
    """Why the FP8 layers of a model that are no experts cannot become plain ones; None: they
    can, or there are none."""
    for name, m in model.named_modules():
        if isinstance(m, FP8Experts) or not isinstance(m, _OTHERS):
            continue
        if type(m) is not FP8Linear:
            return f"{name} is {type(m).__name__}, through which transformers passes no gradient"
        if not is_codes(m.weight):  # transformers has dequantized it
            continue
        weight: Any = m.weight
        reason = _other_blocks(m) or _unfit(weight, m.weight_scale_inv, "its weight")
        if reason is not None:
            return f"{name}: {reason}"
    return None


def quantized_otherwise(model: nn.Module) -> bool:
    """Whether some quantizer of transformers but that of 128x128 blocks holds the model."""
    held = [getattr(m, "hf_quantizer", None) for m in model.modules()]
    return any(q is not None and not isinstance(q, FineGrainedFP8HfQuantizer) for q in held)


def dequantize_linears(model: nn.Module, hooks: Sequence[str]) -> None:
    """Plain Linears, of the model's dtype, in the place of its FP8 layers that are no experts; and
    the names of all Linears in the model's configuration, so that a saved model loads again."""
    for name, m in list(model.named_modules()):
        if type(m) is FP8Linear:
            linear = _dequantized(m, _dtype_of(model))
            vars(linear).update({hook: vars(m)[hook] for hook in hooks})
            model.set_submodule(name, linear.train(m.training))
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return
    linears = {name for name, m in model.named_modules() if type(m) is nn.Linear}
    own = quantizer.quantization_config
    own.modules_to_not_convert = sorted({*(own.modules_to_not_convert or ()), *linears})


def _dequantized(m: Any, dtype: torch.dtype) -> nn.Linear:
    if is_codes(m.weight):
        q = Fp8Tensor(m.weight.detach(), m.weight_scale_inv.detach().float(), "block", False)
        out = torch.empty(m.weight.shape, dtype=dtype, device=m.weight.device)
        weight: Any = ops.dequantize(q, out=out)
    else:
        weight = m.weight.detach()
    linear = nn.Linear(m.in_features, m.out_features, m.bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if m.bias is not None:
        linear.bias = m.bias
    return linear


def _dtype_of(model: Any) -> torch.dtype:
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _other_blocks(module: Any) -> str | None:
    blocks = module.block_size
    if blocks is not None and tuple(blocks) == (TILE, TILE):
        return None
    return f"scales of {blocks or 'whole tensors'}, not of blocks of {TILE}x{TILE}"


def _unfit(w: Any, scale: Any, name: str) -> str | None:
    if not is_codes(w):
        return f"{name} is {w.dtype}, not float8_e4m3fn"
    want = scale_shape(tuple(w.shape), "block")
    if tuple(scale.shape) != want:
        return f"{name}_scale_inv is {tuple(scale.shape)}, not {want}"
    if any(size % 16 for size in w.shape[-2:]):
        return f"{name} is {tuple(w.shape)}: sizes must be multiples of 16"
    return None
