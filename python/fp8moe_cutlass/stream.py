"""The CUDA stream for arrays whose framework does not name its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_stream = ContextVar("fp8moe_cutlass.stream", default=0)


def current() -> int:
    """The stream that use_stream names in this context, a cudaStream_t; 0, the default stream."""
    return _stream.get()


@contextmanager
def use_stream(handle: int) -> Iterator[None]:
    """Run this context's calls on `handle`, a cudaStream_t (cupy.cuda.get_current_stream().ptr).

    For CuPy, JAX and other DLPack producers; without it their calls go to the default stream. torch
    tensors run on torch's current stream whatever is set here. Threads and asyncio tasks each have
    their own (contextvars).
    """
    token = _stream.set(handle)
    try:
        yield
    finally:
        _stream.reset(token)
