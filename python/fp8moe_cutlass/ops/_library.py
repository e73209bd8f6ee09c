"""What the ops share: registration with torch, allocation of outputs, flat arguments.

torch is optional. With it, every op is also torch.ops.fp8moe.<op> over flat arguments: it fills the
outputs it is given and returns nothing, and has no autograd. Eager calls go straight to _C, through
_C.eager and into outputs from _C.empty* (src/bindings/eager.cpp; what these leave is done here).
The torch op is taken where something traces, intercepts or watches (torch.compile, make_fx,
torch.jit.trace, dispatch modes, the profiler, which then names the op). Eager calls count up the
versions of the outputs, as torch's in-place operations do; torch.ops.fp8moe.<op> itself, called
directly, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fp8moe_cutlass import _C
from fp8moe_cutlass.routing import RoutingPlan, empty_plan
from fp8moe_cutlass.tensor import Fp8Tensor, scale_shape
from fp8moe_cutlass.typing import Array, DType

try:
    import torch
    from torch.autograd import forward_ad
    from torch.utils.checkpoint import SAC_IGNORED_OPS
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = None  # type: ignore[assignment]

_NAMES: dict[Any, str] = {
    **{name: name for name in ("float32", "float16", "bfloat16", "e4m3", "e5m2")},
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}

# A plan's sizes in a schema. Plain integers: torch's dispatcher is twice as slow with a list.
PLAN = "SymInt tokens, SymInt slots, SymInt experts, SymInt align, SymInt capacity"

if torch is not None:
    _LIBRARY: Any = torch.library.Library("fp8moe", "DEF")  # type: ignore[no-untyped-call]
    _TORCH = {
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "int32": torch.int32,
        "uint8": torch.uint8,
    }
    _FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    _NAMES |= {dtype: name for name, dtype in _TORCH.items() if name not in ("int32", "uint8")}
    is_dynamo_compiling = torch.compiler.is_dynamo_compiling
    _guards = torch._C._dynamo.guards
    _C.attach_torch(
        {
            "tensor": torch.Tensor,
            "requires_grad": torch.Tensor.requires_grad,
            "fp8_tensor": Fp8Tensor,
            "plan": RoutingPlan,
            "formats": {t: (f, _TORCH[f]) for t, f in _NAMES.items() if f in ("e4m3", "e5m2")},
            "dtypes": _TORCH,
            "forward_ad": forward_ad.__dict__,
            "profiler": torch.autograd.profiler.__dict__,
            "is_grad_enabled": torch.is_grad_enabled,
            "dispatch_modes": torch._C._len_torch_dispatch_stack,
            "is_jit_tracing": torch._C._is_tracing,
            "is_deterministic": torch._C._get_deterministic_algorithms,
            "increment_version": torch._C._increment_version,
            "flatten": lambda kinds, given: _flatten(kinds, given),  # defined below
            "current_device": getattr(torch._C, "_cuda_getDevice", None),
            "empty_cpu": getattr(_guards, "_empty_strided_cpu", None),
            "empty_cuda": getattr(_guards, "_empty_strided_cuda", None),
        }
    )
else:
    _FP8 = ()

    def is_dynamo_compiling() -> bool:
        return False


_LOST = "require grad, its gradient would be lost; use fp8moe_cutlass.autograd or .nn, or detach it"


def define(
    schema: str, run: Callable[..., None] | None = None, *, counts_in: str = ""
) -> Callable[..., None]:
    """Registers `name(arguments)` with torch, if it is here, and returns the way to call it: an
    Fp8Tensor stands for `x, x_scale[, x_layout]`, a RoutingPlan for `plan` and its sizes, None for
    either.

    run: the implementation, _C.<name> if not given. The caller refuses arguments that require grad
    where grad mode is on, because their gradient would be lost. counts_in: an output of which the
    op only counts up a status word; its version stays, or a backward could not run a second time.
    """
    name, _, arguments = schema.partition("(")
    direct: Callable[..., None] = run or getattr(_C, name)
    words = arguments.rstrip(")").split(", ")
    names = [w.split()[-1] for w in words]
    kinds = _kinds(names)
    if torch is None:
        return lambda *args: direct(*_flatten(kinds, args))
    _LIBRARY.define(f"{schema} -> ()")
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, direct, key)
    torch.library.register_fake(f"fp8moe::{name}", _fill_nothing, lib=_LIBRARY)
    through_torch = getattr(torch.ops.fp8moe, name).default
    # Selective checkpointing keeps what an op returns, which here is nothing: its backward would
    # leave the op out and read outputs that nobody filled.
    SAC_IGNORED_OPS.add(through_torch)
    places = [i for i, w in enumerate(words) if w.startswith("Tensor")]
    floats = [i for i in places if names[i] != "plan"]  # a plan's integers require no grad
    written = [i for i in places if "!)" in words[i] and names[i] != counts_in]

    def watched(given: tuple[Any, ...]) -> None:
        args = _flatten(kinds, given)
        if torch.is_grad_enabled():
            for i in floats:
                if getattr(args[i], "requires_grad", False):
                    refuse(i, _LOST)
        if torch.compiler.is_compiling():
            through_torch(*args)
            return
        if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
            for i in floats:
                if _has_tangent(args[i]):
                    refuse(i, "have a tangent, which would be lost: ops have no forward-mode AD")
        (through_torch if any(_is_torch(args[i]) for i in places) else direct)(*args)
        torch._C._increment_version([args[i] for i in written if _is_torch(args[i])])

    def refuse(i: int, what: str) -> None:
        raise ValueError(f"[{name}] {names[i]} must not {what}")

    bits = (sum(1 << i for i in at) for at in (floats, written))
    eager = _C.eager(direct, watched, kinds, *bits)

    def call(*given: Any) -> None:
        (watched if is_dynamo_compiling() else eager)(given)

    return call


def _kinds(names: list[str]) -> str:
    """What each argument of a call stands for in the schema: "3" an Fp8Tensor's data, scale and
    layout, "2" the first two of them, "p" a plan's buffer and sizes, "." itself."""
    kinds, at = "", 0
    while at < len(names):
        name, *after = names[at : at + 3]
        if after == [f"{name}_scale", f"{name}_layout"]:
            kind, count = "3", 3
        elif after[:1] == [f"{name}_scale"]:
            kind, count = "2", 2
        elif name == "plan":
            kind, count = "p", 6
        else:
            kind, count = ".", 1
        kinds += kind
        at += count
    return kinds


def _flatten(kinds: str, given: tuple[Any, ...]) -> list[Any]:
    """What `given` stands for, as the schema has it. An array that is no Fp8Tensor has no scale."""
    args: list[Any] = []
    for kind, arg in zip(kinds, given, strict=True):
        if kind == ".":
            args.append(arg)
        elif kind == "p":
            args += (None, 0, 0, 0, 0, 0) if arg is None else (arg.buffer, *arg.sizes)
        else:
            fp8 = isinstance(arg, Fp8Tensor)
            flat = (_codes(arg), arg.scale_inv, arg.scale_layout) if fp8 else (arg, None, "")
            args += flat[: int(kind)]
    return args


def _has_tangent(t: Any) -> bool:
    if not isinstance(t, torch.Tensor):
        return False
    return forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]


def _fill_nothing(*args: Any) -> None:
    """The fake of every op: outputs exist already."""


# ---- allocation ---------------------------------------------------------------------------------


def empty(op: str, like: Array, shape: tuple[int, ...], dtype: str | None = None) -> Array:
    """An uninitialized array of the framework and device of `like`; dtype None: its own too."""
    if not is_dynamo_compiling() and (array := _C.empty(like, shape, dtype)) is not None:
        return array
    if not _is_torch(like):
        return _numpy(op, like, shape, dtype)
    torch_dtype = like.dtype if dtype is None else _TORCH[dtype]
    # Sizes as arguments: torch reads them in two thirds of a tuple's time.
    return torch.empty(*shape, dtype=torch_dtype, device=like.device)


def _numpy(op: str, like: Array, shape: tuple[int, ...], dtype: str | None) -> Array:
    if not isinstance(like, np.ndarray):
        raise ValueError(
            f"[{op}] allocates outputs for torch and NumPy only; give out= for {type(like)}"
        )
    if dtype == "bfloat16":
        raise ValueError(f"[{op}] NumPy has no bfloat16; ask for 'float32'")
    return np.empty(shape, "uint8" if dtype in ("e4m3", "e5m2") else dtype or like.dtype)


def contiguous(array: Array) -> Array:
    """The array, copied into row-major order where it is not."""
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.contiguous()


def split_columns(rows: Array, *columns: int) -> Sequence[Array]:
    """Views of so many columns of [R, C] each, and of the rest."""
    if not _is_torch(rows):
        return np.split(rows, np.cumsum(columns), axis=1)
    views: Sequence[Array] = rows.split_with_sizes((*columns, rows.shape[1] - sum(columns)), 1)
    return views


def codes_view(bytes: Array, format: str) -> Array:
    """uint8 codes as torch's FP8 dtype; as they are in NumPy, which has none."""
    return bytes.view(_TORCH[format]) if _is_torch(bytes) else bytes


def words_view(bytes: Array) -> Array:
    """uint8 [R, 4 n], rows at multiples of 4 bytes, as float32 [R, n]."""
    return bytes.view(torch.float32 if _is_torch(bytes) else np.float32)


def new_fp8(
    op: str,
    like: Array,
    shape: tuple[int, ...],
    layout: str,
    fp8_dtype: DType,
    pow2: bool,
) -> Fp8Tensor:
    """An uninitialized Fp8Tensor of the framework and device of `like`."""
    if not is_dynamo_compiling():
        made: Fp8Tensor | None = _C.empty_fp8(like, shape, layout, fp8_dtype, pow2)
        if made is not None:
            return made
    format = dtype_name(op, "fp8_dtype", fp8_dtype, "e4m3", "e5m2")
    data = empty(op, like, shape, format)
    scale_inv = empty(op, like, scale_shape(shape, layout), "float32")
    return Fp8Tensor(data, scale_inv, layout, pow2, format)


def given_fp8(
    op: str, out: Fp8Tensor | Array | None, layout: str, fp8_dtype: DType, pow2: bool
) -> Fp8Tensor:
    """`out`; ValueError if it is not what the arguments ask for. Its shape is for _C to look at."""
    if (  # in words, at little cost; a dtype that is a framework's object is named below
        out is not None
        and out.fp8_dtype == fp8_dtype
        and out.scale_layout == layout
        and out.pow2 is pow2
    ):
        return out
    if out is None:
        raise ValueError(f"[{op}] out must hold an Fp8Tensor for each output; got None")
    format = dtype_name(op, "fp8_dtype", fp8_dtype, "e4m3", "e5m2")
    asked, got = (layout, format, pow2), (out.scale_layout, out.fp8_dtype, out.pow2)
    if asked != got:
        raise ValueError(f"[{op}] out must have (scale_layout, fp8_dtype, pow2) {asked}; got {got}")
    return out


def new_plan(op: str, like: Array, sizes: tuple[int, int, int, int, int]) -> RoutingPlan:
    """A plan beside `like` for an op to fill."""
    plan: RoutingPlan | None = None if is_dynamo_compiling() else _C.empty_plan(like, sizes)
    return plan or empty_plan(lambda words: empty(op, like, (words,), "int32"), sizes)


# ---- words --------------------------------------------------------------------------------------


def dtype_name(op: str, argument: str, dtype: DType, *allowed: str) -> str:
    """The name among `allowed` of a dtype given by name or as a framework's object."""
    name = _NAMES.get(dtype)
    if name is None and not isinstance(dtype, str):
        name = _NAMES.get(getattr(dtype, "name", getattr(dtype, "__name__", None)))
    if name not in allowed:
        raise ValueError(f"[{op}] {argument} must be one of {allowed}; got {dtype!r}")
    return name


def shape_of(op: str, name: str, array: Array, count: int) -> tuple[int, ...]:
    """The array's shape, a tuple of its framework; ValueError if it has not `count` dimensions."""
    shape: tuple[int, ...] = array.shape
    if len(shape) != count:
        raise ValueError(f"[{op}] {name} must have {count} dimensions; got {list(shape)}")
    return shape


def is_pow2(op: str, scale: str) -> bool:
    """Whether the word asks for power-of-two scales."""
    if scale == "pow2":
        return True
    if scale == "fp32":
        return False
    raise ValueError(f"[{op}] scale must be 'pow2' or 'fp32'; got {scale!r}")


def column_layout(op: str, columns: str) -> str:
    """Scale layout of a transposed operand: 128x128 tiles, or 1x128 tiles along tokens."""
    if columns == "block":
        return "block"
    if columns == "column":
        return "gemm"
    raise ValueError(f"[{op}] columns must be 'block' or 'column'; got {columns!r}")


def require_layout(op: str, name: str, t: Fp8Tensor, layout: str) -> None:
    """ValueError for an Fp8Tensor where only `layout` is legal, if it has another."""
    if t.scale_layout != layout:
        raise ValueError(f"[{op}] {name} must have scale layout {layout!r}; got {t.scale_layout!r}")


def _is_torch(array: Array) -> bool:
    return torch is not None and isinstance(array, torch.Tensor)


def _codes(t: Fp8Tensor) -> Array:
    """The data; uint8 codes as torch's FP8 dtype, or with their format where there is none."""
    data = t.data
    if data.dtype in _FP8:
        return data
    if _is_torch(data):  # no NumPy here: dynamo traces it
        return data.view(_TORCH[str(t.fp8_dtype)]) if data.dtype is torch.uint8 else data
    return (data, t.fp8_dtype) if data.dtype == np.uint8 else data
