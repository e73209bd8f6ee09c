"""Words among the arguments: dtypes, scale kinds, columns, and what a shape must be."""

from __future__ import annotations

from typing import Any

from fp8moe_cutlass.typing import Array, DType

# By name; a framework's object is known by its own.
_NAMES: dict[Any, str] = {
    **{name: name for name in ("float32", "float16", "bfloat16", "e4m3", "e5m2")},
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
