"""Checks of the layers' arguments: rule, then the value received."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass.nn._sharded import is_sharded
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan


def check_int(op: str, name: str, value: Any) -> None:
    """ValueError unless value is a whole number; True and 2.0 are none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"[{op}] {name} must be an int; got {value!r}")


def check_bool(op: str, name: str, value: Any) -> None:
    """ValueError unless value is True or False; 1 and a tensor are neither."""
    if type(value) is not bool:
        raise ValueError(f"[{op}] {name} must be True or False; got {value!r}")


def check_tensor(op: str, name: str, value: Any) -> None:
    """ValueError unless value is a tensor of torch's; an Fp8Tensor is none."""
    if not isinstance(value, Tensor):
        raise ValueError(f"[{op}] {name} must be a torch.Tensor; got {type(value).__name__}")


def check_sizes(num_experts: int, hidden_size: int, intermediate_size: int, multiple: int) -> None:
    """Sizes the GEMMs take."""
    check_int("MoEExperts", "num_experts", num_experts)
    if num_experts < 1:
        raise ValueError(f"[MoEExperts] num_experts must be at least 1; got {num_experts}")
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        check_int("MoEExperts", name, size)
        if size <= 0 or size % multiple:
            raise ValueError(
                f"[MoEExperts] {name} must be a positive multiple of {multiple}; got {size}"
            )


def check_options(
    recipe: Fp8Recipe | None,
    preactivation: str,
    transposed_weights: str,
    dtype: torch.dtype,
) -> None:
    """The choices MoEExperts offers."""
    if not isinstance(recipe, Fp8Recipe | None):
        raise ValueError(f"[MoEExperts] recipe must be an Fp8Recipe or None (bf16); got {recipe!r}")
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
    _check_ready(weight)
    given = (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights))
    for name, t in given:
        check_tensor("MoEExperts", name, t)
    _check_x(weight, x, "x")
    if topk_idx.dtype not in (torch.int32, torch.int64, torch.bool):
        raise ValueError(
            f"[MoEExperts] topk_idx must be int32, int64 or a bool mask; got {topk_idx.dtype}"
        )
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
    for name, t in given:
        _check_device(weight, name, t)


def check_mask(weight: Tensor, mask: Tensor, capacity: int | None, shared: bool) -> None:
    """A routing mask that check_inputs has seen, and its capacity; shared: by a group."""
    if mask.dtype != torch.bool:
        raise ValueError(f"[MoEExperts] capacity is of a bool mask; got {mask.dtype} ids")
    if shared:
        raise ValueError("[MoEExperts] a mask must be given as ids to a layer with a group")
    if mask.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"[MoEExperts] a mask must be [..., {weight.shape[0]}]; got {tuple(mask.shape)}"
        )
    if not isinstance(capacity, int) or capacity < 0:
        raise ValueError(
            "[MoEExperts] a mask needs capacity, the most assignments that it may hold; "
            f"got {capacity!r}"
        )
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        held = int(mask.sum())
        if held > capacity:
            raise ValueError(f"[MoEExperts] a mask must hold at most {capacity}; got {held}")


def check_rows(weight: Tensor, rows: Tensor, counts: Any, probs: Tensor | None) -> None:
    """What MoEExperts.forward_rows takes, given its gate_up_proj."""
    _check_ready(weight)
    check_tensor("MoEExperts", "rows", rows)
    if rows.ndim != 2:
        raise ValueError(f"[MoEExperts] rows must be [R, H]; got {tuple(rows.shape)}")
    _check_x(weight, rows, "rows")
    _check_device(weight, "rows", rows)
    _check_counts(weight.shape[0], len(rows), counts)
    if probs is not None:
        check_tensor("MoEExperts", "probs", probs)
        if probs.shape != rows.shape[:1] or not probs.dtype.is_floating_point:
            raise ValueError(
                f"[MoEExperts] probs must be [{len(rows)}] floating point; "
                f"got {tuple(probs.shape)}, {probs.dtype}"
            )
        _check_device(weight, "probs", probs)


def _check_counts(experts: int, rows: int, counts: Any) -> None:
    if isinstance(counts, RoutingPlan):
        if (counts.experts, counts.rows) != (experts, rows):
            raise ValueError(
                f"[MoEExperts] counts must be a plan of {experts} experts and {rows} rows; "
                f"got {counts.experts} and {counts.rows}"
            )
        return
    if not isinstance(counts, Tensor):
        counts = torch.as_tensor(counts)
    if counts.shape != (experts,) or counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"[MoEExperts] counts must be [{experts}] int32 or int64; "
            f"got {tuple(counts.shape)}, {counts.dtype}"
        )
    if counts.device.type == "cpu" and not torch.compiler.is_compiling():
        numbers = counts.tolist()
        if min(numbers) < 0 or sum(numbers) > rows:
            raise ValueError(
                f"[MoEExperts] counts must be at least 0 and their sum at most the {rows} rows; "
                f"got {numbers}"
            )


def _check_ready(weight: Tensor) -> None:
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


def _check_x(weight: Tensor, x: Tensor, name: str) -> None:
    hidden_size = weight.shape[-1]
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"[MoEExperts] {name} must be bfloat16, float16 or float32; got {x.dtype}")
    if x.ndim < 2 or x.shape[-1] != hidden_size:
        raise ValueError(f"[MoEExperts] {name} must be [..., {hidden_size}]; got {tuple(x.shape)}")


def _check_device(weight: Tensor, name: str, t: Tensor) -> None:
    if t.device != weight.device:
        raise ValueError(
            f"[MoEExperts] {name} must be on the parameters' device {weight.device}; got {t.device}"
        )
