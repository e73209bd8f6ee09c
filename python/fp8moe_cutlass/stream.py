"""The CUDA stream for arrays whose framework does not name its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fp8moe_cutlass import _C


@contextmanager
def use_stream(handle: int) -> Iterator[None]:
    """Run this thread's calls on `handle`, a cudaStream_t (cupy.cuda.get_current_stream().ptr).

    For CuPy, JAX and other DLPack producers; without it their calls go to the default stream. torch
    tensors run on torch's current stream whatever is set here.
    """
    previous = _C.set_stream(handle)
    try:
        yield
    finally:
        _C.set_stream(previous)
