# SPDX-License-Identifier: Apache-2.0
"""Casting-free blockwise FP8 for Mixture-of-Experts training.

Importing this needs neither torch nor a GPU and makes no CUDA call. `ops` (the operators), `nn`
(the layers), `autograd`, `distributed` and `integrations` are imported on first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8moe_cutlass._C import CudaError, DeviceUnavailable, UnsupportedDevice, build_info
from fp8moe_cutlass.activation import Activation
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.slow_path import SlowPathWarning
from fp8moe_cutlass.stream import use_stream
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.version import VersionMismatch, __version__

if TYPE_CHECKING:
    from fp8moe_cutlass import autograd, distributed, integrations, nn, ops, telemetry

_SUBMODULES = ("autograd", "distributed", "integrations", "nn", "ops", "telemetry")

__all__ = [
    "Activation",
    "CudaError",
    "DeviceUnavailable",
    "Fp8Recipe",
    "Fp8Tensor",
    "RoutingPlan",
    "SlowPathWarning",
    "UnsupportedDevice",
    "VersionMismatch",
    "__version__",
    "autograd",
    "build_info",
    "cmake_dir",
    "distributed",
    "include_dir",
    "integrations",
    "nn",
    "ops",
    "telemetry",
    "use_stream",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _installed() -> Path:
    """The folder of the compiled parts, which an editable install keeps elsewhere."""
    from fp8moe_cutlass import _C

    return Path(str(_C.__file__)).parent


def cmake_dir() -> str:
    """The directory of fp8moeConfig.cmake, for -Dfp8moe_ROOT or CMAKE_PREFIX_PATH."""
    return str(_installed() / "lib" / "cmake" / "fp8moe")


def include_dir() -> str:
    """The directory of the C++ and C headers (fp8moe/ops.h)."""
    return str(_installed() / "include")
