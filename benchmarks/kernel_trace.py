"""What ran: the kernels a call launched, each under the operator that launched it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8moe_cutlass import _C, ops

PREFIX = "fp8moe::"


@dataclass(frozen=True)
class Kernel:
    """One launch. op: the operator that asked for it, "torch" for what torch itself launched; call:
    the how-manieth call of that operator; name: the kernel's, or the operator's on the CPU."""

    op: str
    call: int
    name: str
    us: float


def profile(run: Callable[[], object], device: torch.device) -> list[Kernel]:
    """The kernels of one `run`, in launch order; on the CPU its operators, each as one kernel."""
    return kernels_of(trace(run, device), device.type == "cuda")


@contextmanager
def named_operators() -> Iterator[None]:
    """Every function of ops under the operator's name in a trace."""

    def named(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(PREFIX + name):
                return function(*args, **kwargs)

        return call

    own = {name: getattr(ops, name) for name in _C.operators()}
    for name, function in own.items():
        setattr(ops, name, named(name, function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(ops, name, function)


def trace(run: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """The complete events of one `run` as torch.profiler saw it, oldest first.

    The caller warms up: what a first call compiles or loads would be timed as well.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with named_operators(), torch.profiler.profile(activities=kinds) as profiler:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    complete = [event for event in events_of(profiler) if event.get("ph") == "X"]
    return sorted(complete, key=lambda event: float(event["ts"]))


def durations(run: Callable[[], object]) -> Iterator[tuple[str, float]]:
    """Name and microseconds of each kernel of `run` on a GPU, whoever launched it."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    for event in events_of(profiler):
        if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"):
            yield event["name"], float(event["dur"])


def events_of(profiler: Any) -> list[dict[str, Any]]:
    """What torch.profiler saw, in Chrome's form."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def kernels_of(events: list[dict[str, Any]], cuda: bool) -> list[Kernel]:
    """A kernel belongs to the operator whose call, on the thread of the launch, spans the launch;
    launch and kernel share a correlation id."""
    kinds = ("cpu_op", "user_annotation")
    calls = [e for e in events if e.get("cat") in kinds and e["name"].startswith(PREFIX)]
    numbers: dict[str, int] = {}
    owner: dict[int, tuple[str, int]] = {}
    for event in calls:
        op = event["name"].removeprefix(PREFIX)
        owner[id(event)] = op, numbers.get(op, 0)
        numbers[op] = numbers.get(op, 0) + 1
    if not cuda:
        return [Kernel(*owner[id(e)], owner[id(e)][0], float(e["dur"])) for e in calls]

    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    found = []
    for event in device:
        launch = launches.get(event["args"].get("correlation"))
        op, call = "torch", 0
        for other in calls:
            if launch and other["tid"] == launch["tid"] and spans(other, launch):
                op, call = owner[id(other)]
        found.append(Kernel(op, call, event["name"], float(event["dur"])))
    return found


def spans(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    """Whether `inner` began while `outer` ran."""
    start = float(outer["ts"])
    return start <= float(inner["ts"]) <= start + float(outer["dur"])


# Which call of an operator is what, in the order of autograd/fp8.py without recompute.
GEMMS = ("fprop-1", "fprop-2", "dgrad-2", "dgrad-1")
ROLES: dict[str, tuple[str, ...]] = {
    "route": ("route",),
    "quantize": ("quantize x", "quantize dout"),
    "quantize_weight": ("quantize gate_up", "quantize down"),
    "permute_pad": ("permute x", "permute dout"),
    "grouped_gemm": GEMMS,
    "act_quantize": ("swiglu",),
    "unpermute_unpad": ("unpermute",),
    "act_quantize_backward": ("swiglu backward",),
    "permute_pad_backward": ("permute backward",),
    "permute_transpose_fp8": ("transpose x", "transpose dout"),
    "grouped_gemm_wgrad": ("wgrad-1", "wgrad-2"),
}


def roles(kernels: list[Kernel]) -> dict[str, float]:
    """Microseconds of each role of a forward and backward, in the order they ran."""
    total: dict[str, float] = {}
    for kernel in kernels:
        names = ROLES.get(kernel.op, ())
        role = names[kernel.call] if kernel.call < len(names) else kernel.op
        total[role] = total.get(role, 0.0) + kernel.us
    return total
