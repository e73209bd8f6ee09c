"""Words among the arguments: dtypes, scale kinds, columns, and what a shape must be."""

from __future__ import annotations

from typing import Any, NoReturn

from fp8moe_cutlass.arrays import dtype_name
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, DType

FORMATS = ("e4m3", "e5m2")
FP8_TENSOR = "an Fp8Tensor (ops.quantize, of weights ops.quantize_weight)"


def shown(value: Any) -> str:
    """Names a value in a message: None, a word, a number, or a type and its dtype."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ + ("" if dtype is None else f" of dtype {dtype}")


def refuse(op: str, name: str, rule: str, value: Any) -> NoReturn:
    raise ValueError(f"[{op}] {name} must be {rule}; got {shown(value)}")


def require_out_plan(op: str, out: Any, sizes: tuple[int, ...]) -> RoutingPlan:
    """`out`; ValueError unless it is a plan of these sizes, of which -1 stands for any."""
    if not isinstance(out, RoutingPlan):
        refuse(op, "out", "a RoutingPlan", out)
    if any(want not in (-1, got) for want, got in zip(sizes, out.sizes, strict=True)):
        raise ValueError(f"[{op}] out must be a plan of {sizes} (-1: any); got {out.sizes}")
    return out


def _is_integer(value: Any) -> bool:
    if hasattr(value, "__dlpack__"):
        return getattr(value, "ndim", None) == 0 and "int" in str(getattr(value, "dtype", ""))
    return hasattr(value, "__index__")


def given_fp8(op: str, out: Any, layout: str, fp8_dtype: DType, pow2: bool) -> Fp8Tensor:
    """`out`; ValueError if it is not what the arguments ask for. Its shape is for _C to look at."""
    if not isinstance(out, Fp8Tensor):
        refuse(op, "out", "an Fp8Tensor for each output", out)
    format = dtype_name(op, "fp8_dtype", fp8_dtype, "e4m3", "e5m2")
    asked, got = (layout, format, pow2), (out.scale_layout, out.fp8_dtype, out.pow2)
    if asked != got:
        raise ValueError(f"[{op}] out must have (scale_layout, fp8_dtype, pow2) {asked}; got {got}")
    return out


def count(op: str, name: str, value: Any) -> None:
    """ValueError unless value is a number of things: an int, or an array of one without dimensions,
    but no bool."""
    if isinstance(value, bool) or not _is_integer(value):
        refuse(op, name, "an int", value)


def flag(op: str, name: str, value: Any) -> bool:
    """True or False; a number and an array are neither."""
    if value is not True and value is not False:
        refuse(op, name, "True or False", value)
    return bool(value)


def parts(op: str, out: Any, *names: str) -> Any:
    """`out`, a tuple of so many; Nones where it is None."""
    if out is None:
        return (None,) * len(names)
    if not isinstance(out, tuple | list):
        refuse(op, "out", f"({', '.join(names)})", out)
    if len(out) != len(names):
        raise ValueError(f"[{op}] out must be ({', '.join(names)}); got {len(out)} parts")
    return out


def shape_of(op: str, name: str, array: Array, count: int) -> tuple[int, ...]:
    """The array's shape, a tuple of its framework; ValueError if it has not `count` dimensions."""
    if getattr(array, "is_nested", False):  # whose shape raises, or is no number
        raise ValueError(f"[{op}] {name} must be a dense array; got a nested tensor")
    shape: tuple[int, ...] | None = getattr(array, "shape", None)
    if shape is None:
        refuse(op, name, "an array", array)
    if len(shape) != count:
        raise ValueError(f"[{op}] {name} must have {count} dimensions; got {list(shape)}")
    return shape


def is_pow2(op: str, scale: str) -> bool:
    """Whether the word asks for power-of-two scales."""
    if isinstance(scale, str):
        if scale == "pow2":
            return True
        if scale in ("fp32", "amax", "approx"):
            return False
    refuse(op, "scale", "'pow2', 'fp32', 'amax' or 'approx'", scale)


ROUNDINGS = {"none": 0, "product": 1, "silu": 2}  # ActRounding of ops.h


def column_layout(op: str, columns: str) -> str:
    """Scale layout of a transposed operand: 128x128 tiles, or 1x128 tiles along tokens."""
    if isinstance(columns, str):
        if columns == "block":
            return "block"
        if columns == "column":
            return "gemm"
    refuse(op, "columns", "'block' or 'column'", columns)
