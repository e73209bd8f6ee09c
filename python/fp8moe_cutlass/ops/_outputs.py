"""What the operators write into: arrays of the framework and device of an input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8moe_cutlass import _C
from fp8moe_cutlass.ops._words import dtype_name, refuse
from fp8moe_cutlass.routing import RoutingPlan, empty_plan
from fp8moe_cutlass.tensor import LAYOUTS, Fp8Tensor, scale_shape
from fp8moe_cutlass.typing import Array, DType

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = None  # type: ignore[assignment]

TORCH_DTYPES: dict[str, Any] = {}
if torch is not None:
    TORCH_DTYPES = {
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "int32": torch.int32,
        "int64": torch.int64,
        "uint8": torch.uint8,
    }


def is_torch(array: Any) -> bool:
    return torch is not None and isinstance(array, torch.Tensor)


def empty(op: str, like: Array, shape: tuple[int, ...], dtype: str | None = None) -> Array:
    """An uninitialized array of the framework and device of `like`; dtype None: its own too."""
    if not is_torch(like):
        return _numpy(op, like, shape, dtype)
    torch_dtype = like.dtype if dtype is None else TORCH_DTYPES[dtype]
    # Sizes as arguments: torch reads them in two thirds of a tuple's time.
    return torch.empty(*shape, dtype=torch_dtype, device=like.device)


def scratch(op: str, like: Array | Fp8Tensor, bytes: int, zero: bool) -> Array:
    """A workspace on the device of `like`."""
    array = like.data if isinstance(like, Fp8Tensor) else like
    if not is_torch(array):
        zeros = "zeros, " if zero else ""
        raise ValueError(
            f"[{op}] allocates its workspace for torch only; give workspace=, {zeros}{bytes} bytes "
            f"of uint8, for {type(array)}"
        )
    return (torch.zeros if zero else torch.empty)(bytes, dtype=torch.uint8, device=array.device)


def zero_workspace(like: Array) -> Array | None:
    """What operators count by while they run, zeros on the device of `like`; None on the CPU.

    uint8, zero before a call and zero after it. One serves every operator with `workspace=`, in
    calls that follow one another on a stream. Calls that may run at the same time need one each.
    """
    if not is_torch(like) or not like.is_cuda:
        return None
    return scratch("zero_workspace", like, _C.ZERO_WORKSPACE_BYTES, True)


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
    if not is_torch(rows):
        return np.split(rows, np.cumsum(columns), axis=1)
    views: Sequence[Array] = rows.split_with_sizes((*columns, rows.shape[1] - sum(columns)), 1)
    return views


def codes_view(bytes: Array, format: str) -> Array:
    """uint8 codes as torch's FP8 dtype; as they are in NumPy, which has none."""
    return bytes.view(TORCH_DTYPES[format]) if is_torch(bytes) else bytes


def words_view(bytes: Array) -> Array:
    """uint8 [R, 4 n], rows at multiples of 4 bytes, as float32 [R, n]."""
    return bytes.view(torch.float32 if is_torch(bytes) else np.float32)


def new_fp8(
    op: str, like: Array, shape: tuple[int, ...], layout: str, fp8_dtype: DType, pow2: bool
) -> Fp8Tensor:
    """An uninitialized Fp8Tensor of the framework and device of `like`."""
    word = isinstance(fp8_dtype, str) and fp8_dtype in ("e4m3", "e5m2")
    format = fp8_dtype if word else dtype_name(op, "fp8_dtype", fp8_dtype, "e4m3", "e5m2")
    if not isinstance(layout, str) or layout not in LAYOUTS:
        refuse(op, "scale_layout", "'row', 'gemm' or 'block'", layout)
    scales = scale_shape(shape, layout)
    if is_torch(like):  # as empty() does
        device = like.device
        data = torch.empty(*shape, dtype=TORCH_DTYPES[format], device=device)
        scale_inv = torch.empty(*scales, dtype=torch.float32, device=device)
    else:
        data, scale_inv = _numpy(op, like, shape, format), _numpy(op, like, scales, "float32")
    return Fp8Tensor(data, scale_inv, layout, pow2, format, check=False)


def given_fp8(
    op: str, out: Fp8Tensor | Array | None, layout: str, fp8_dtype: DType, pow2: bool
) -> Fp8Tensor:
    """`out`; ValueError if it is not what the arguments ask for. Its shape is for _C to look at."""
    if not isinstance(layout, str):
        refuse(op, "scale_layout", "'row', 'gemm' or 'block'", layout)
    if (  # in words, at little cost; a dtype that is a framework's object is named below
        isinstance(out, Fp8Tensor)
        and isinstance(fp8_dtype, str)
        and out.fp8_dtype == fp8_dtype
        and out.scale_layout == layout
        and out.pow2 is pow2
    ):
        return out
    if not isinstance(out, Fp8Tensor):
        refuse(op, "out", "an Fp8Tensor for each output", out)
    format = dtype_name(op, "fp8_dtype", fp8_dtype, "e4m3", "e5m2")
    asked, got = (layout, format, pow2), (out.scale_layout, out.fp8_dtype, out.pow2)
    if asked != got:
        raise ValueError(f"[{op}] out must have (scale_layout, fp8_dtype, pow2) {asked}; got {got}")
    return out


def new_plan(op: str, like: Array, sizes: tuple[int, int, int, int, int]) -> RoutingPlan:
    """A plan beside `like` for an op to fill."""
    return empty_plan(lambda words: empty(op, like, (words,), "int32"), sizes)
