"""Arrays of any framework: names of dtypes, dense copies. Without torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8moe_cutlass.typing import Array, DType

FLOATS = ("float32", "float16", "bfloat16")
# By name; a framework's object is known by its own.
_NAMES: dict[Any, str] = {
    **{name: name for name in (*FLOATS, "e4m3", "e5m2")},
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


def dtype_name(op: str, argument: str, dtype: DType, *allowed: str) -> str:
    """The name among `allowed` of a dtype given by name or as a framework's object."""
    name = _NAMES.get(dtype) if isinstance(dtype, str) else _NAMES.get(_own_name(dtype))
    if name not in allowed:
        raise ValueError(f"[{op}] {argument} must be one of {allowed}; got {dtype!r}")
    return name


def _own_name(dtype: Any) -> str:
    """torch.float32, np.float32 and np.dtype("float32") are all "float32"."""
    own = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return str(own or dtype).removeprefix("torch.")


def contiguous(array: Array) -> Array:
    """The array, copied into row-major order where it is not."""
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.contiguous()


def zeros(op: str, like: Array, shape: tuple[int, ...]) -> Array:
    """Zeros of the dtype and on the device of `like`."""
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    if not hasattr(like, "new_zeros"):
        raise ValueError(f"[{op}] allocates for torch and NumPy only; got {type(like)}")
    return like.new_zeros(shape)
