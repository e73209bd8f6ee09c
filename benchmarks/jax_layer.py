"""A training step of the expert block in JAX (examples/jax_moe) beside torch's captured step and
beside bf16 by jax.lax.ragged_dot.

    cmake -S examples/jax_moe -B build/jax -Dfp8moe_ROOT="$(python -m fp8moe_cutlass --cmake-dir)"
    cmake --build build/jax
    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/jax_layer.py --build build/jax --json X

A step is forward and backward, and quantizes the weights. All run in one process, in turn, on the
same tensors: calls back to back, timed by the host from the first to the end of the last, the
median of the rounds. `bit_equal`: of output and gradients in JAX and in torch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import torch

from common import OnResult, Record, environment, main, parser, row
from contender import Contender, Inputs, Shape
from fp8moe_cutlass.nn import MoEExperts
from jax_ragged import QUICK, SHAPES, ragged_experts, step_of
from layer import limit
from timing import Limits, Sample

Step = Callable[[], Any]
NAMES = ("out", "dx", "dprobs", "dgate_up", "ddown")
SECONDS = 0.4  # of a contender in a round


def to_jax(t: torch.Tensor) -> jax.Array:
    """The same memory."""
    return jax.dlpack.from_dlpack(t.detach())


def to_torch(a: jax.Array) -> torch.Tensor:
    return torch.from_dlpack(jax.block_until_ready(a))  # type: ignore[attr-defined]


def calls(step: Step, wait: Callable[[Any], None], count: int) -> float:
    """Milliseconds per call of so many back to back."""
    start = time.perf_counter()
    for _ in range(count - 1):
        step()
    wait(step())
    return 1e3 * (time.perf_counter() - start) / count


def timed(steps: dict[str, tuple[Step, Callable[[Any], None]]], rounds: int) -> dict[str, Sample]:
    """Each in turn, `rounds` times."""
    counts, times = {}, {name: list[float]() for name in steps}
    for name, (step, wait) in steps.items():
        calls(step, wait, 2)  # compiles, warms up
        counts[name] = max(2, min(200, int(1e3 * SECONDS / calls(step, wait, 2))))
    for _ in range(rounds):
        for name, (step, wait) in steps.items():
            times[name].append(calls(step, wait, counts[name]))
    return {name: Sample(statistics.median(t), t) for name, t in times.items()}


def captured(ours: Contender) -> Step:
    """A graph of the step. Threads of XLA do not end its capture."""
    ours.clear()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours.step()
    torch.cuda.current_stream().wait_stream(stream)
    ours.clear()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made, capture_error_mode="thread_local"):
        ours.step()
    return made.replay


def rows_of(
    model: str, shape: Shape, device: torch.device, block: Any, limits: Limits, ragged: bool
) -> Record:
    cuda = device.type == "cuda"
    layer = MoEExperts(shape["E"], shape["H"], shape["I"], device=device)
    inputs = Inputs.random(shape, device)
    ours = Contender(layer, inputs, reuse=False)
    inputs.topk_idx = inputs.topk_idx.int()
    out = ours.forward().detach()
    ours.backward(ours.forward())
    want: list[Any] = [out, inputs.x.grad, inputs.probs.grad, *(w.grad for w in layer.parameters())]
    ours.clear()

    weights = layer.gate_up_proj, layer.down_proj
    x, ids, probs, gate_up, down, dout = (
        to_jax(t) for t in (inputs.x, inputs.topk_idx, inputs.probs, *weights, inputs.dout)
    )
    step = step_of(block)
    got = step(x, ids, probs, gate_up, down, dout)
    equal = {n: torch.equal(to_torch(a), b) for n, a, b in zip(NAMES, got, want, strict=True)}
    del got, want, out

    replay = captured(ours) if cuda else ours.step
    steps: dict[str, tuple[Step, Callable[[Any], None]]] = {
        "jax": (lambda: step(x, ids, probs, gate_up, down, dout), jax.block_until_ready),
        "torch, captured": (replay, lambda _: torch.cuda.synchronize() if cuda else None),
    }
    samples = timed(steps, 5)
    errors, error = {}, None
    try:
        if not ragged:
            raise RuntimeError("not compiled in time")
        turned = [jax.block_until_ready(w.transpose(0, 2, 1).copy()) for w in (gate_up, down)]
        other = step_of(ragged_experts)
        bf16 = other(x, ids, probs, *turned, dout)
        difference = bf16[0].astype("float32") - step(x, ids, probs, gate_up, down, dout)[0]
        error = float((difference**2).mean() / (bf16[0].astype("float32") ** 2).mean()) ** 0.5
        del bf16, difference
        run = lambda: other(x, ids, probs, *turned, dout)  # noqa: E731
        samples |= timed({"ragged_dot": (run, jax.block_until_ready)}, 3)
    except Exception as failed:
        errors["ragged_dot"] = f"{type(failed).__name__}: {failed}"[:300]
    found = samples.pop("jax")
    return row(
        "layer",
        shape,
        "forward+backward in JAX",
        found,
        peers={name: sample.ms for name, sample in samples.items()},
        model=model,
        bit_equal=equal,
        ragged_dot_difference=error,
        rounds={"jax": found.times, **{name: sample.times for name, sample in samples.items()}},
        errors=errors,
        **limit(shape, limits, 3, shape["E"]),
    )


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    sys.path.insert(0, str(given.build.resolve()))
    from fp8moe_jax import moe_experts

    torch.manual_seed(0)
    limits = Limits(device)
    limits.wake()
    about = environment(limits) | {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    about["command"] = "XLA_PYTHON_CLIENT_PREALLOCATE=false python " + " ".join(sys.argv)
    record: Record = {"environment": about, "results": []}
    for model, shape in (QUICK if given.quick else SHAPES).items():
        found = rows_of(model, shape, device, moe_experts, limits, given.ragged)
        record["results"].append(found)
        on_result(found)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return record


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--build", type=Path, required=True, help="where examples/jax_moe was built")
    made.add_argument("--no-ragged", dest="ragged", action="store_false", help="without ragged_dot")
    main(made, run)
