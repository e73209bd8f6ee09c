"""Small functions of tensors, each as one kernel on a GPU, by torch.compile."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fp8moe_cutlass.slow_path import slow_path

R = TypeVar("R")

_refused: list[str] = []  # why torch cannot compile in this process


def compiled(function: Callable[..., R]) -> Callable[..., R]:
    """`function` of tensors [rows] or [rows, width], compiled where they are on a GPU: at its first
    call, once per width, for any number of rows.

    It runs as written on a CPU, and where torch cannot compile, which one warning says.
    """

    @functools.wraps(function)
    def run(*tensors: Tensor) -> R:
        if _refused or not _on_gpu(tensors):
            return function(*tensors)
        for tensor in tensors:
            if tensor.ndim == 2:  # what gathers rows of any width takes three times as long
                torch._dynamo.mark_static(tensor, 1)
        widths = tuple((tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors)
        try:
            fast: Callable[..., R] = _compile(function, widths)
            return fast(*tensors)
        except torch._dynamo.exc.TorchDynamoException as error:
            _refused.append(str(error))
            slow_path(
                "torch.compile",
                "[MoEExperts] torch cannot compile here: recipe=None runs eagerly and slower; "
                f"got {type(error).__name__}: {error}",
            )
            return function(*tensors)

    return run


def _on_gpu(tensors: tuple[Tensor, ...]) -> bool:
    """Plain tensors, no subclasses as fake ones are; not empty, since torch compiles a size of 0
    apart."""
    return all(type(t) is Tensor and t.is_cuda and t.numel() for t in tensors)


# 0: what is concatenated is written in place by the kernel that computes it, and not by a second
# one with masked reads. An older torch does not have it.
_CONCATENATE = {"max_complex_pointwise_cat_inputs": 0}


@functools.cache
def _compile(function: Callable[..., R], widths: object) -> Callable[..., R]:
    """Compiles a copy of the code for each of `widths`: torch compiles one code object at most
    eight times."""
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        closure=function.__closure__,
    )
    known = torch._inductor.list_options()
    options: Any = {name: value for name, value in _CONCATENATE.items() if name in known}
    return torch.compile(own, dynamic=True, options=options)
