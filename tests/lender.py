"""An array of no framework, for the tests of the binding."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class Lender:
    """A DLPack producer with `__dlpack__` alone, as older frameworks are; it names no stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.tensor.__dlpack_device__()


class ReadOnly(Lender):
    """A Lender whose tensor may not be written."""

    def __dlpack__(self, **kwargs: Any) -> Any:
        if kwargs.get("max_version") is None:
            raise BufferError("only a versioned capsule can say read-only")
        capsule = self.tensor.__dlpack__(**kwargs)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        flags = pointer(capsule, b"dltensor_versioned") + 24  # behind version, context, deleter
        ctypes.c_uint64.from_address(flags).value |= 1
        return capsule
