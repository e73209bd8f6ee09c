"""The operators on the device under test, so that one suite serves the CPU and CUDA.

A suite says `from on_device import ops` and `pytestmark = pytest.mark.usefixtures("device")`: each
of its tests then runs once per device of conftest.py's fixture. What a test gives, looks at and
compares stays on the CPU: arguments are copied to the device, results and what the operator wrote
into an argument are copied back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8moe_cutlass.ops
from fp8moe_cutlass import Fp8Tensor, RoutingPlan

# Values that only the CPU looks at, arrays that are not torch's, addresses.
CPU_ONLY = pytest.mark.parametrize("device", ["cpu"], indirect=True)
# Sizes and sweeps that a GPU needs; for the CPU they are slow ones.
LARGE = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
    indirect=True,
)


def moved(thing: Any, device: Any) -> Any:
    """The same argument on another device."""
    if isinstance(thing, (tuple, list)):
        parts = [moved(part, device) for part in thing]
        return type(thing)(*parts) if hasattr(thing, "_fields") else type(thing)(parts)
    if isinstance(thing, (Fp8Tensor, RoutingPlan)):
        part = thing.data if isinstance(thing, Fp8Tensor) else thing.buffer
        return thing.to(device) if isinstance(part, Tensor) else thing
    if not isinstance(thing, Tensor) or thing.is_meta:
        return thing
    if thing.is_contiguous():
        return thing.to(device)
    there = torch.empty_strided(thing.shape, thing.stride(), dtype=thing.dtype, device=device)
    return there.copy_(thing)


def write_back(thing: Any, there: Any) -> None:
    """What an operator wrote into `there`, the moved `thing`, into `thing`."""
    if isinstance(thing, (tuple, list)):
        for part, part_there in zip(thing, there, strict=True):
            write_back(part, part_there)
    elif isinstance(thing, Fp8Tensor):
        write_back((thing.data, thing.scale_inv), (there.data, there.scale_inv))
    elif isinstance(thing, RoutingPlan):
        write_back(thing.buffer, there.buffer)
    elif isinstance(thing, Tensor) and thing is not there and thing.numel():
        contents, now = (t.cpu().flatten().contiguous().view(torch.uint8) for t in (thing, there))
        if not torch.equal(contents, now):
            thing.copy_(there)


class Operators:
    """fp8moe_cutlass.ops; `device` is the fixture's."""

    device = torch.device("cpu")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op: Callable[..., Any] = getattr(fp8moe_cutlass.ops, name)
        if self.device.type == "cpu":
            return op

        def on_device(*args: Any, **kwargs: Any) -> Any:
            args_there = moved(args, self.device)
            kwargs_there = {key: moved(value, self.device) for key, value in kwargs.items()}
            try:
                result = op(*args_there, **kwargs_there)
                torch.cuda.synchronize()
            finally:
                write_back(args, args_there)
                write_back([*kwargs.values()], [*kwargs_there.values()])
            out = kwargs.get("out")
            if out is not None and result is kwargs_there["out"]:
                return out
            return moved(result, "cpu")

        return on_device


ops = Operators()


def capture(run: Callable[[], Any], eager_runs: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of run() and what it gives, after eager runs on a side stream."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(eager_runs):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        result = run()
    return graph, result
