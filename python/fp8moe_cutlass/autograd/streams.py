"""Work of one GPU stream that another one reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Written:
    """An event behind the current stream's writes, for other streams to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.record()

    def record(self, here: Any = None) -> None:
        """Moves the mark to now. here: the current stream, which takes 4 us to ask for."""
        self.stream = here or torch.cuda.current_stream(self.device)
        self.captured = torch.cuda.is_current_stream_capturing()
        self.event.record(self.stream)

    def wait(self, tree: Any, here: Any = None) -> None:
        """The current stream, `here` if it is known, waits before it reads a tree's tensors; their
        memory waits for its reads."""
        here = here or torch.cuda.current_stream(self.device)
        if here == self.stream:
            return
        # A graph cannot wait for work outside it, nor the other way round: a capture begins, and a
        # replay ends, in the order of its own stream.
        if self.captured == torch.cuda.is_current_stream_capturing():
            here.wait_event(self.event)
        for t in tensors_of(tree):
            t.record_stream(here)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, those of FP8 tensors and plans among them."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def written(device: torch.device) -> Written | None:
    """Marks the writes of a GPU's stream; None on a CPU, where nothing needs to wait."""
    return Written(device) if device.type == "cuda" else None


def now_on(device: torch.device, t: Tensor) -> Tensor:
    """t on `device`, with the values that it has now. The device reads pinned memory later, where
    the caller may have written by then: it gets a pageable copy, which is read before this returns.
    """
    if t.device.type != "cpu" or device.type == "cpu":
        return t.to(device)
    return t.clone().to(device, non_blocking=True)


def capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` records a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def order_with_backward(device: torch.device) -> None:
    """Has the stream that called backward() wait for what this backward has queued here, as it
    waits for every `.grad`."""
    if device.type != "cuda":
        return
    event = torch.cuda.current_stream(device).record_event()
    torch.autograd.Variable._execution_engine.queue_callback(
        lambda: torch.cuda.current_stream(device).wait_event(event)
    )
