"""A training step of the expert block in JAX (examples/jax_moe) beside torch's captured step and
beside bf16 by jax.lax.ragged_dot.

    cmake -S examples/jax_moe -B build/jax -Dfp8moe_ROOT="$(python -m fp8moe_cutlass --cmake-dir)"
    cmake --build build/jax
    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/jax_layer.py --build build/jax --json X

A step is forward and backward, and quantizes the weights. All run in one process, in turn, on the
same tensors: calls back to back, timed by the host from the first to the end of the last, the
median of the rounds. `bit_equal`: output and gradients in JAX against torch's. ragged_dot runs
afterwards, in turn with the step in JAX. XLA for CUDA makes of it a dense product with a copy of
the rows for every expert: at 4096 tokens 80 GB do not hold it, at `--tokens 512` they do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import torch

from common import OnResult, Record, environment, main, parser, row, write
from contender import Contender, Inputs, Shape, block
from fp8moe_cutlass.nn import MoEExperts
from jax_ragged import ragged_experts, step_of
from layer import graph, limit
from timing import Limits, Sample

Step = Callable[[], Any]
Wait = Callable[[Any], None]
SHAPES = {  # but for tokens
    "DeepSeek-V3, 32 experts": block(0, 32, 8, 7168, 2048),
    "Qwen3-30B, 128 experts": block(0, 128, 8, 2048, 768),
}
QUICK = {"tiny": block(64, 4, 2, 256, 128)}
NAMES = ("out", "dx", "dprobs", "dgate_up", "ddown")
SECONDS = 0.3  # of a contender in a round


def to_jax(t: torch.Tensor) -> jax.Array:
    """The same memory."""
    return jax.dlpack.from_dlpack(t.detach())


def to_torch(a: jax.Array) -> torch.Tensor:
    return torch.from_dlpack(jax.block_until_ready(a))  # type: ignore[attr-defined]


def calls(step: Step, wait: Wait, count: int) -> float:
    """Milliseconds per call of so many back to back."""
    start = time.perf_counter()
    for _ in range(count - 1):
        step()
    wait(step())
    return 1e3 * (time.perf_counter() - start) / count


def timed(steps: dict[str, tuple[Step, Wait]], rounds: int) -> dict[str, Sample]:
    """Each in turn, `rounds` times; what takes more than half a second, once."""
    counts: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for name, (step, wait) in steps.items():
        calls(step, wait, 1)  # compiles
        ms = calls(step, wait, 2)
        if ms > 500.0:
            times[name].append(ms)
        else:
            counts[name] = max(2, min(200, int(1e3 * SECONDS / ms)))
    for _ in range(rounds):
        for name, count in counts.items():
            times[name].append(calls(*steps[name], count))
    return {name: Sample(statistics.median(t), t) for name, t in times.items()}


class Case:
    """One shape: the block in JAX and in torch, on the same tensors."""

    def __init__(self, shape: Shape, device: torch.device, block: Any) -> None:
        self.cuda = device.type == "cuda"
        self.layer = MoEExperts(shape["E"], shape["H"], shape["I"], device=device)
        self.inputs = inputs = Inputs.random(shape, device)
        inputs.topk_idx = inputs.topk_idx.int()
        weights = self.layer.gate_up_proj, self.layer.down_proj
        self.operands = tuple(
            to_jax(t) for t in (inputs.x, inputs.topk_idx, inputs.probs, *weights, inputs.dout)
        )
        self.step = step_of(block)

    def beside_torch(self) -> tuple[dict[str, bool], dict[str, Sample]]:
        """Which results are bit-equal, and both times."""
        ours = Contender(self.layer, self.inputs, reuse=False)
        out = ours.forward()
        ours.backward(out)
        gradients = self.inputs.x.grad, self.inputs.probs.grad, *(w.grad for w in self.weights)
        want: list[Any] = [out.detach(), *gradients]
        got = self.step(*self.operands)
        equal = {n: torch.equal(to_torch(a), b) for n, a, b in zip(NAMES, got, want, strict=True)}
        del got, want, gradients, out
        ours.clear()
        replay: Step = ours.step
        if self.cuda:  # threads of XLA do not end such a capture
            replay = graph(ours, ours.step, capture_error_mode="thread_local")
        wait = lambda _: torch.cuda.synchronize() if self.cuda else None  # noqa: E731
        return equal, timed({"jax": self.timed_step, "torch, captured": (replay, wait)}, 5)

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.layer.parameters())

    @property
    def timed_step(self) -> tuple[Step, Wait]:
        return lambda: self.step(*self.operands), jax.block_until_ready

    def beside_ragged(self) -> tuple[float, dict[str, Sample]]:
        """How far ragged_dot's output is from this one, and both times."""
        x, ids, probs, gate_up, down, dout = self.operands
        turned = [jax.block_until_ready(w.transpose(0, 2, 1).copy()) for w in (gate_up, down)]
        other = step_of(ragged_experts)
        bf16 = other(x, ids, probs, *turned, dout)[0].astype("float32")
        difference = bf16 - self.step(*self.operands)[0].astype("float32")
        relative = float((difference**2).mean() / (bf16**2).mean()) ** 0.5
        del bf16, difference
        run = lambda: other(x, ids, probs, *turned, dout)  # noqa: E731
        both = {"jax": self.timed_step, "ragged_dot": (run, jax.block_until_ready)}
        return relative, timed(both, 3)


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    sys.path.insert(0, str(given.build.resolve()))
    from fp8moe_jax import moe_experts

    torch.manual_seed(0)
    limits = Limits(device)
    limits.wake()
    about = environment(limits) | {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    about["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    record: Record = {"environment": about, "results": []}
    shapes = {model: shape | {"T": given.tokens} for model, shape in SHAPES.items()}
    for model, shape in (QUICK if given.quick else shapes).items():
        case = Case(shape, device, moe_experts)
        equal, samples = case.beside_torch()
        ours, torch_ = samples["jax"], samples["torch, captured"]
        found = row(
            "layer",
            shape,
            "forward+backward in JAX",
            ours,
            peers={"torch, captured": torch_.ms},
            model=model,
            bit_equal=equal,
            rounds={"jax": ours.times, "torch, captured": torch_.times},
            **limit(shape, limits, 3, shape["E"]),
        )
        record["results"].append(found)
        on_result(found)
        del case
        if device.type == "cuda":
            torch.cuda.empty_cache()
    write(record, given.json)  # to compile the rest takes longer, and may fail
    for found in record["results"]:
        try:
            relative, samples = Case(found["shape"], device, moe_experts).beside_ragged()
            found["peers"]["ragged_dot"] = samples["ragged_dot"].ms
            found["beside_ragged_dot_ms"] = samples["jax"].ms
            found["rounds"]["ragged_dot"] = samples["ragged_dot"].times
            found["ragged_dot_differs_by"] = relative
        except Exception as error:
            found["errors"] = {"ragged_dot": f"{type(error).__name__}: {error}"[:300]}
        write(record, given.json)
    return record


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=4096)
    made.add_argument("--build", type=Path, required=True, help="where examples/jax_moe was built")
    main(made, run)
