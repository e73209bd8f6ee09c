"""transformer_engine.pytorch, as far as as_blockwise_tensor needs it: the same names, arguments and
attributes."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any


class DType(enum.Enum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Float8BlockQuantizer:
    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.dtype, self.amax_epsilon = fp8_dtype, amax_epsilon
        self.force_pow_2_scales, self.block_scaling_dim = force_pow_2_scales, block_scaling_dim


class Float8BlockwiseQTensor:
    def __init__(
        self,
        *,
        shape: Any,
        dtype: Any,
        rowwise_data: Any,
        rowwise_scale_inv: Any,
        columnwise_data: Any,
        columnwise_scale_inv: Any,
        fp8_dtype: DType,
        quantizer: Float8BlockQuantizer,
        is_2D_scaled: bool,
    ) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._columnwise_data, self._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self._fp8_dtype, self._quantizer, self._is_2D_scaled = fp8_dtype, quantizer, is_2D_scaled


def modules() -> dict[str, ModuleType]:
    """What to put into sys.modules where TransformerEngine is not installed."""
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    for kind in (DType, Float8BlockQuantizer, Float8BlockwiseQTensor):
        setattr(pytorch, kind.__name__, kind)
    package.pytorch = pytorch  # type: ignore[attr-defined]
    return {module.__name__: module for module in (package, pytorch)}
