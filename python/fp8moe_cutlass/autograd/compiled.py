"""Small functions of tensors, each as one or two kernels on a GPU, by torch.compile."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_refused: list[str] = []  # why torch cannot compile in this process


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of tensors [rows] or [rows, width], compiled where they are on a GPU: at its first
    call, once per width, for any number of rows.

    It runs as written on a CPU, inside an outer torch.compile or export, and where torch cannot
    compile, which one warning says.
    """

    @functools.wraps(function)
    def run(*tensors: Tensor) -> Any:
        if torch.compiler.is_compiling() or _refused or not _on_gpu(tensors):
            return function(*tensors)
        for tensor in tensors:
            if tensor.ndim == 2:  # what gathers rows of any width takes three times as long
                torch._dynamo.mark_static(tensor, 1)
        widths = tuple((tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors)
        try:
            return _compile(function, widths)(*tensors)
        except torch._dynamo.exc.TorchDynamoException as error:
            _refused.append(str(error))
            warnings.warn(
                "[MoEExperts] torch cannot compile here: recipe=None runs eagerly, which is slower; "
                f"got {type(error).__name__}: {error}",
                stacklevel=2,
            )
            return function(*tensors)

    return run


def _on_gpu(tensors: tuple[Tensor, ...]) -> bool:
    """Nor empty: torch compiles again for a size of 0."""
    return all(tensor.is_cuda and tensor.numel() for tensor in tensors)


@functools.cache
def _compile(function: Callable[..., Any], widths: object) -> Callable[..., Any]:
    """By code of its own for each of `widths`, as torch gives up after compiling one code object
    eight times."""
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, dynamic=True)
