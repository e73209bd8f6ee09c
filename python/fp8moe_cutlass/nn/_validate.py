"""Checks of the layers' arguments: rule, then the value received."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass.autograd.arguments import as_counts, check_tensor
from fp8moe_cutlass.routing import RoutingPlan

MOST_EXPERTS = 1024  # that a plan has, and that a router chooses among
MOST_CHOSEN = 32  # of a token
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_int(op: str, name: str, value: Any) -> None:
    """ValueError unless value is a whole number; True and 2.0 are none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"[{op}] {name} must be an int; got {value!r}")


def check_size(op: str, name: str, value: Any) -> None:
    """ValueError unless value is a whole number of at least 1."""
    if type(value) is not int:
        check_int(op, name, value)
    if value < 1:
        raise ValueError(f"[{op}] {name} must be at least 1; got {value}")


def check_bool(op: str, name: str, value: Any) -> None:
    """ValueError unless value is True or False; 1 and a tensor are neither."""
    if type(value) is not bool:
        raise ValueError(f"[{op}] {name} must be True or False; got {value!r}")


def check_device(op: str, device: Any) -> None:
    """ValueError unless torch takes device for one; None is the default device."""
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"[{op}] device must be a torch.device; got {device!r}") from error


def check_dtype(op: str, dtype: Any) -> None:
    """ValueError unless parameters may have dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
        raise ValueError(f"[{op}] dtype must be bfloat16, float16 or float32; got {dtype!r}")


def check_number(op: str, name: str, value: Any) -> None:
    """ValueError unless value is a finite number of at least 0; True is none."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= float(value) < math.inf:
        raise ValueError(f"[{op}] {name} must be finite and not negative; got {value!r}")


def check_tokens(op: str, name: str, t: Any, hidden_size: int, least: int = 2) -> None:
    """ValueError unless t is a tensor [..., hidden_size] of floats, of `least` dimensions."""
    check_tensor(op, name, t)
    if t.dtype not in _DTYPES:
        raise ValueError(f"[{op}] {name} must be bfloat16, float16 or float32; got {t.dtype}")
    if t.ndim < least or t.shape[-1] != hidden_size:
        raise ValueError(f"[{op}] {name} must be [..., {hidden_size}]; got {tuple(t.shape)}")


def check_leading(op: str, name: str, t: Any, x: Tensor, last: str | None = None) -> None:
    """ValueError unless t is a tensor with the sizes of x but its last one; then a size of its own,
    if `last` names one."""
    check_tensor(op, name, t)
    leading, own = x.shape[:-1], t.shape if last is None else t.shape[:-1]
    if own != leading or (last is not None and not (t.ndim and t.shape[-1])):
        sizes = "[...]" if last is None else f"[..., {last}]"
        raise ValueError(
            f"[{op}] {name} must be {sizes} with x's leading sizes {tuple(leading)}; "
            f"got {tuple(t.shape)}"
        )


def check_sizes(num_experts: int, hidden_size: int, intermediate_size: int, multiple: int) -> None:
    """Checks sizes that the GEMMs take."""
    check_size("MoEExperts", "num_experts", num_experts)
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        check_int("MoEExperts", name, size)
        if size <= 0 or size % multiple:
            raise ValueError(
                f"[MoEExperts] {name} must be a positive multiple of {multiple}; got {size}"
            )


def check_inputs(weight: Tensor, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
    """Checks the arguments of MoEExperts.forward, given its gate_up_proj."""
    _check_ready(weight)
    check_tokens("MoEExperts", "x", x, weight.shape[-1])
    check_leading("MoEExperts", "topk_idx", topk_idx, x, "slots")
    check_tensor("MoEExperts", "topk_weights", topk_weights)
    if topk_idx.dtype not in (torch.int32, torch.int64, torch.bool):
        raise ValueError(
            f"[MoEExperts] topk_idx must be int32, int64 or a bool mask; got {topk_idx.dtype}"
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
    if not (x.device == topk_idx.device == topk_weights.device == device):
        for name, t in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            _check_device(weight, name, t)


def check_mask(weight: Tensor, mask: Tensor, max_assignments: int | None, shared: bool) -> None:
    """Checks a mask that check_inputs has seen, and max_assignments; shared: by a group."""
    if mask.dtype != torch.bool:
        raise ValueError(
            f"[MoEExperts] max_assignments needs a bool mask as topk_idx; got {mask.dtype} ids"
        )
    if shared:
        raise ValueError("[MoEExperts] a mask must be given as ids to a layer with a group")
    if mask.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"[MoEExperts] a mask must be [..., {weight.shape[0]}]; got {tuple(mask.shape)}"
        )
    most = max_assignments
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise ValueError(
            f"[MoEExperts] a mask needs max_assignments, an int of at least 0; got {most!r}"
        )


def check_rows(weight: Tensor, rows: Tensor, counts: Any, probs: Tensor | None) -> None:
    """Checks the arguments of MoEExperts.forward_rows, given its gate_up_proj."""
    _check_ready(weight)
    check_tokens("MoEExperts", "rows", rows, weight.shape[-1])
    if rows.ndim != 2:
        raise ValueError(f"[MoEExperts] rows must be [R, H]; got {tuple(rows.shape)}")
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
    counts = as_counts("MoEExperts", counts)
    if counts.shape != (experts,) or counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"[MoEExperts] counts must be [{experts}] int32 or int64; "
            f"got {tuple(counts.shape)}, {counts.dtype}"
        )


def check_weights_alone(op: str, layer: Any) -> None:
    """ValueError for a layer whose projections have biases or LoRA beside their weights."""
    if layer.has_bias or layer.lora_rank:
        got = "biases" if layer.has_bias else f"a LoRA of {layer.lora_rank}"
        raise ValueError(f"[{op}] layer must have weights alone; got {got}")


def _check_ready(weight: Tensor) -> None:
    if weight.is_meta:
        raise RuntimeError(
            "[MoEExperts] parameters must have storage; got device meta: call to_empty() and "
            "load or reset them"
        )
    if hasattr(weight, "full_tensor"):
        raise RuntimeError(
            "[MoEExperts] parameters must be whole in a forward; got a DTensor: call the module "
            "given to fully_shard"
        )


def _check_device(weight: Tensor, name: str, t: Tensor) -> None:
    if t.device != weight.device:
        raise ValueError(
            f"[MoEExperts] {name} must be on the parameters' device {weight.device}; got {t.device}"
        )
