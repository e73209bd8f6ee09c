"""Which host memory copies to another device read; the meta device may stand for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostCopies(TorchDispatchMode):
    """`read`: the addresses that copies may read after the call, as of pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("non_blocking"):
            self.read.append(args[0].data_ptr())
        return func(*args, **kwargs)
