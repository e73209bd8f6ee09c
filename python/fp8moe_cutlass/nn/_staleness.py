"""Whether parameters have changed since their FP8 copies were made."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdRef


class Kept(tuple[Any, ...]):
    """A fingerprint to compare with later; no copy of its module has it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


def fingerprint(*parameters: Tensor) -> tuple[Any, ...]:
    """Equal while the parameters are the same objects, in the same memory at the same version, and
    no optimizer has stepped."""
    _watch_optimizers()
    return (
        _optimizer_steps[0],
        *(
            (WeakIdRef(p), _address(p), None if p.is_inference() else p._version)
            for p in parameters
        ),
    )


def watch(module: Any) -> None:
    """Tell a module of every optimizer's step from now on: module._after_step(optimizer)."""
    _watch_optimizers()
    _watched.add(module)


def capturing(t: Tensor) -> bool:
    """Whether work on t goes into a CUDA graph."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


_optimizer_steps = [0]  # of any optimizer: fused ones write parameters without a new version


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _optimizer_steps[0] += 1
        if not torch.compiler.is_compiling():
            for module in tuple(_watched):
                module._after_step(optimizer)

    register_optimizer_step_post_hook(after_step)


def _address(t: Tensor) -> Any:
    """Where t is, and in which storage: memory is given again to another, which is not equal to one
    that is still referred to, though weakly."""
    try:
        return StorageWeakRef(t.untyped_storage()), t.data_ptr()  # type: ignore[no-untyped-call]
    except RuntimeError:  # fake tensors and DTensors have none; their identity and version must do
        return None
