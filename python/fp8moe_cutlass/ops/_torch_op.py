"""torch.ops.fp8moe.<op>, from the fields that _C tells.

Arguments are flat: an Fp8Tensor is `x, x_scale, x_layout`, a RoutingPlan `plan` and its five sizes.
An op fills the outputs it is given, returns nothing and has no autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.utils.flop_counter import register_flop_formula

from fp8moe_cutlass import _C
from fp8moe_cutlass.ops._outputs import TORCH_DTYPES, is_torch
from fp8moe_cutlass.ops._words import refuse
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array

FIELDS = _C.operators()
WORKSPACES = ("workspace", "zero_workspace")  # roles
# One of this process, also where this module is imported again.
_LIBRARY: Any = vars(torch.ops.fp8moe).get("_library")
if _LIBRARY is None:
    _LIBRARY = torch.library.Library("fp8moe", "DEF")  # type: ignore[no-untyped-call]
    vars(torch.ops.fp8moe)["_library"] = _LIBRARY

# Selective checkpointing keeps what an op returns, which here is nothing: its backward would leave
# the op out and read outputs that nobody filled. Private; a torch without it checkpoints otherwise.
NEVER_KEPT: Any = getattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", set())

_LOST = "require grad, its gradient would be lost; use fp8moe_cutlass.autograd or .nn, or detach it"
_TANGENT = "have a tangent, which would be lost: ops have no forward-mode AD"


def _schema(name: str) -> str:
    """Of torch.ops.fp8moe.<name>, from its fields."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    sizes = "SymInt tokens, SymInt slots, SymInt experts, SymInt align, SymInt capacity"
    words = {"int": "SymInt", "float": "float", "bool": "bool", "format": "str"}
    arguments = []
    for field, kind, role, plain_too in FIELDS[name]:
        none = "?" if role.startswith("optional") or role in WORKSPACES else ""
        writes = role in ("out", "optional_out", "status", *WORKSPACES)

        def array(optional: str, writes: bool = writes) -> str:
            return f"Tensor({next(letters)}!){optional}" if writes else f"Tensor{optional}"

        if kind == "rule":
            arguments += ["str scale", "float eps"]
        elif kind in words:
            arguments.append(f"{words[kind]} {field}")
        else:
            arguments.append(f"{array(none)} {field}")
        if kind == "fp8":
            scale = array("?" if plain_too else none)
            arguments += [f"{scale} {field}_scale", f"str {field}_layout"]
        if kind == "plan":
            arguments.append(sizes)
    return f"{name}({', '.join(arguments)}) -> ()"


def _flops_of_rows(a: Any, _scale: Any, _layout: str, w: Any, *rest: Any, **_: Any) -> int:
    """Of shapes: d [R, N] = a [R, K] w [E, N, K]^T over the plan's assignments."""
    capacity: int = rest[7]
    return 2 * capacity * int(w[1]) * int(a[1])


def _flops_of_wgrad(dy_t: Any, _scale: Any, _layout: str, x_t: Any, *rest: Any, **_: Any) -> int:
    """Of shapes: dw [E, N, K] from dy_t [N, Kcap] and x_t [K, Kcap]."""
    capacity: int = rest[7]
    return 2 * capacity * int(dy_t[0]) * int(x_t[0])


_FLOPS: dict[str, Any] = {
    "grouped_gemm": _flops_of_rows,
    "grouped_gemm_wgrad": _flops_of_wgrad,
}


def register(
    name: str, run: Callable[..., None], direct: Callable[..., Any]
) -> Callable[[tuple[Any, ...]], None]:
    """Defines torch.ops.fp8moe.<name> by `run`, of flat arguments. Returns the function of `given`
    that takes this way; `direct` runs what has no tensor of torch's."""
    if not hasattr(torch.ops.fp8moe, name):
        _LIBRARY.define(_schema(name))
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, run, key)
        torch.library.register_fake(f"fp8moe::{name}", _fill_nothing, lib=_LIBRARY)
        if name in _FLOPS:
            register_flop_formula(getattr(torch.ops.fp8moe, name))(_FLOPS[name])
    op = getattr(torch.ops.fp8moe, name).default
    NEVER_KEPT.add(op)

    def through_torch(given: tuple[Any, ...]) -> None:
        args, arrays, written = _flatten(name, given)
        if torch.is_grad_enabled():
            for field, array in arrays:
                if getattr(array, "requires_grad", False):
                    raise ValueError(f"[{name}] {field} must not {_LOST}")
        if torch.compiler.is_compiling():
            op(*args)
            return
        for field, array in arrays:
            if is_torch(array) and _tangent(array) is not None:
                raise ValueError(f"[{name}] {field} must not {_TANGENT}")
        if any(is_torch(arg) for arg in args):
            op(*args)
            increment_version([array for array in written if is_torch(array)])
        else:
            direct(*given)

    return through_torch


def _tangent(t: Any) -> Any:
    return forward_ad.unpack_dual(t).tangent  # type: ignore[no-untyped-call]


def _fill_nothing(*args: Any) -> None:
    """The fake of every op: outputs exist already."""


def _flatten(
    name: str, given: tuple[Any, ...]
) -> tuple[list[Any], list[tuple[str, Array]], list[Array]]:
    """What `given` stands for: the flat arguments, the arrays among them (but plans), and those
    that are written."""
    args: list[Any] = []
    arrays: list[tuple[str, Array]] = []
    written: list[Array] = []
    at = 0
    for field, kind, role, _ in FIELDS[name]:
        arg = given[at]
        at += 1
        flat: tuple[Any, ...] = (arg,)
        if kind == "rule":
            flat = (arg, given[at])
            at += 1
        elif kind == "plan":
            if arg is not None and not isinstance(arg, RoutingPlan):
                refuse(name, field, "a RoutingPlan", arg)
            flat = (None, 0, 0, 0, 0, 0) if arg is None else (arg.buffer, *arg.sizes)
        elif kind == "fp8":
            is_fp8 = isinstance(arg, Fp8Tensor)
            flat = (_codes(arg), arg.scale_inv, arg.scale_layout) if is_fp8 else (arg, None, "")
        args += flat
        if kind in ("array", "fp8"):
            names = (field, f"{field}.scale_inv")
            arrays += [
                (n, array) for n, array in zip(names, flat, strict=False) if array is not None
            ]
        if role in ("out", "optional_out"):
            written += [array for array in flat[: 2 if kind == "fp8" else 1] if array is not None]
    return args, arrays, written


def _codes(t: Fp8Tensor) -> Array:
    """The data; uint8 codes as torch's FP8 dtype."""
    data = t.data
    if is_torch(data) and data.dtype is torch.uint8:
        return data.view(TORCH_DTYPES[str(t.fp8_dtype)])
    return data
