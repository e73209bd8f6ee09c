"""Checks of MoEExperts: rule, then the value received."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8moe_cutlass.nn._sharded import is_sharded
from fp8moe_cutlass.recipe import Fp8Recipe


def check_sizes(num_experts: int, hidden_size: int, intermediate_size: int, multiple: int) -> None:
    """Sizes the GEMMs take."""
    if num_experts < 1:
        raise ValueError(f"[MoEExperts] num_experts must be at least 1; got {num_experts}")
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        if size <= 0 or size % multiple:
            raise ValueError(
                f"[MoEExperts] {name} must be a positive multiple of {multiple}; got {size}"
            )


def check_options(
    recipe: Fp8Recipe | None,
    preactivation: str,
    transposed_weights: str,
    bias: bool,
    activation: str,
    dtype: torch.dtype,
) -> None:
    """The choices MoEExperts offers; what it does not do is refused by name."""
    if not isinstance(recipe, Fp8Recipe | None):
        raise ValueError(f"[MoEExperts] recipe must be an Fp8Recipe or None (bf16); got {recipe!r}")
    if bias:
        raise NotImplementedError("[MoEExperts] expert biases are not supported; got bias=True")
    if activation != "swiglu":
        raise NotImplementedError(
            "[MoEExperts] activation must be 'swiglu', silu(gate) * up; the shifted, clamped one "
            f"of GPT-OSS is not supported; got {activation!r}"
        )
    if preactivation not in ("save", "save_fp8", "recompute"):
        raise ValueError(
            "[MoEExperts] preactivation must be 'save', 'save_fp8' or 'recompute'; "
            f"got {preactivation!r}"
        )
    if preactivation == "save_fp8" and recipe is None:
        raise ValueError(
            "[MoEExperts] preactivation must be 'save' or 'recompute' without a recipe; "
            "got 'save_fp8'"
        )
    if transposed_weights not in ("save", "recompute"):
        raise ValueError(
            "[MoEExperts] transposed_weights must be 'save' or 'recompute'; "
            f"got {transposed_weights!r}"
        )
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"[MoEExperts] dtype must be bfloat16, float16 or float32; got {dtype}")


def check_inputs(weight: Tensor, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
    """What MoEExperts.forward takes, given its gate_up_proj."""
    hidden_size = weight.shape[-1]
    if weight.is_meta:
        raise RuntimeError(
            "[MoEExperts] parameters must have storage; got device meta: call to_empty() and "
            "load or reset them"
        )
    if is_sharded(weight):
        raise RuntimeError(
            "[MoEExperts] parameters must be whole in a forward; got a DTensor: call the module "
            "given to fully_shard"
        )
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"[MoEExperts] x must be bfloat16, float16 or float32; got {x.dtype}")
    if x.ndim < 2 or x.shape[-1] != hidden_size:
        raise ValueError(f"[MoEExperts] x must be [..., {hidden_size}]; got {tuple(x.shape)}")
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"[MoEExperts] topk_idx must be int32 or int64; got {topk_idx.dtype}")
    if topk_idx.ndim != x.ndim or topk_idx.shape[:-1] != x.shape[:-1] or not topk_idx.shape[-1]:
        raise ValueError(
            f"[MoEExperts] topk_idx must be [..., slots] with x's leading sizes "
            f"{tuple(x.shape[:-1])}; got {tuple(topk_idx.shape)}"
        )
    if topk_weights.shape != topk_idx.shape:
        raise ValueError(
            f"[MoEExperts] topk_weights must have topk_idx's shape {tuple(topk_idx.shape)}; "
            f"got {tuple(topk_weights.shape)}"
        )
    if not topk_weights.dtype.is_floating_point:
        raise ValueError(
            f"[MoEExperts] topk_weights must be floating point; got {topk_weights.dtype}"
        )
    device = weight.device
    for name, t in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if t.device != device:
            raise ValueError(
                f"[MoEExperts] {name} must be on the parameters' device {device}; got {t.device}"
            )
