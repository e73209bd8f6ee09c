"""An array of no framework, for the tests of the binding."""

from __future__ import annotations

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
