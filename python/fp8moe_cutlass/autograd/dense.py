"""Tensors as the operators read and write them."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(t: Tensor) -> Tensor:
    """t itself where it is contiguous and starts at a multiple of 16 bytes; else a copy, such as of
    a view from the middle of a flat buffer."""
    t = t.contiguous()
    return t.clone() if _misaligned(t) else t


def _misaligned(t: Tensor) -> bool:
    if torch.compiler.is_compiling():  # dynamo knows no address
        return False
    try:
        return t.data_ptr() % 16 != 0
    except RuntimeError:  # nor has a fake tensor one
        return False
