"""Types of the public interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias

Array: TypeAlias = Any
"""What an op returns: an array of its inputs' framework (torch.Tensor, numpy.ndarray)."""

DType: TypeAlias = Any
"""A dtype by name ("bfloat16", "e4m3") or as the framework's own object."""

ScaleLayout: TypeAlias = Literal["row", "gemm", "block"]
Columns: TypeAlias = Literal["block", "column"]
ScaleKind: TypeAlias = Literal["pow2", "fp32", "amax", "approx"]
Rounding: TypeAlias = Literal["none", "product", "silu"]
Engine: TypeAlias = Literal["sglang", "vllm"]
Weighting: TypeAlias = Literal["activation", "output"]
Fp8DType: TypeAlias = Literal["e4m3", "e5m2"]


class DLPackArray(Protocol):
    """An array of any framework that lends its memory through DLPack."""

    @property
    def __dlpack__(self) -> Callable[..., Any]: ...

    @property
    def __dlpack_device__(self) -> Callable[[], tuple[Any, int]]: ...


ArrayArg: TypeAlias = DLPackArray | tuple[DLPackArray, str]
"""An argument of the extension: an array, or uint8 codes with their format ("e4m3", "e5m2")."""
