"""What bench --layer runs and how it is timed: inputs, contenders, rounds of back-to-back runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from .timing import CudaTimer, Sample, event

Shape = dict[str, int]


# ---- inputs -------------------------------------------------------------------------------------


def routing(kind: str, tokens: int, experts: int, slots: int, device: torch.device) -> Tensor:
    """topk_idx [T, S] int64: "random" distinct experts; "zipf": distinct, expert e drawn with a
    weight of 1 / (e + 1); "one-hot": every assignment to expert 0."""
    if kind == "one-hot":
        return torch.zeros(tokens, slots, dtype=torch.int64, device=device)
    weights = torch.ones(experts, device=device)
    if kind == "zipf":
        weights /= torch.arange(1, experts + 1, device=device)
    return torch.multinomial(weights.expand(tokens, -1), slots)


@dataclass
class Inputs:
    """Leaves that take gradients, the routing, and the gradient of the output."""

    x: Tensor  # [T, H] bf16
    topk_idx: Tensor  # [T, S] i64
    probs: Tensor  # [T, S] f32
    dout: Tensor  # [T, H] bf16

    @classmethod
    def random(cls, shape: Shape, device: torch.device, kind: str = "random") -> Inputs:
        t, s, h = shape["T"], shape["S"], shape["H"]
        return cls(
            torch.randn(t, h, device=device).bfloat16().requires_grad_(),
            routing(kind, t, shape["E"], s, device),
            torch.rand(t, s, device=device).softmax(dim=-1).requires_grad_(),
            torch.randn(t, h, device=device).bfloat16(),
        )


@dataclass
class Contender:
    """A module over inputs, and what one run of it does."""

    module: nn.Module
    inputs: Inputs

    def clear(self) -> None:
        for leaf in (self.inputs.x, self.inputs.probs, *self.module.parameters()):
            leaf.grad = None

    def forward(self) -> Tensor:
        out: Tensor = self.module(self.inputs.x, self.inputs.topk_idx, self.inputs.probs)
        return out

    def backward(self, out: Tensor) -> None:
        torch.autograd.backward(out, self.inputs.dout)

    def step(self) -> None:
        """Forward and backward."""
        self.clear()
        self.backward(self.forward())

    def step_into_main_grad(self) -> None:
        """Forward and backward, the weights' gradients added to float32 main_grad: by the layer
        itself, by torch afterwards."""
        self.step()
        for weight in self.module.parameters():
            if weight.grad is not None:
                weight.main_grad.add_(weight.grad)  # type: ignore[attr-defined]

    def step_with_weights(self) -> None:
        """Forward and backward, which quantizes the weights."""
        self.step()

    def infer(self) -> None:
        with torch.no_grad():
            self.forward()

    def graph(self, run: Callable[[], object]) -> Callable[[], object]:
        """A replay of `run`, captured; what it keeps lives as long as the replay."""
        self.clear()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        self.clear()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        return captured.replay


# ---- timing -------------------------------------------------------------------------------------

Runs = dict[str, Callable[[], object]]


class Burst:
    """`count` runs back to back of each contender in turn, `rounds` times over."""

    def __init__(self, device: torch.device, count: int = 12, rounds: int = 2) -> None:
        self.cuda = device.type == "cuda"
        self.count = count if self.cuda else 3
        self.rounds = rounds if self.cuda else 1
        self.clock = CudaTimer()

    def __call__(self, runs: Runs) -> dict[str, Sample]:
        times: dict[str, list[float]] = {name: [] for name in runs}
        host: dict[str, float] = {}
        for turn in range(self.rounds):
            for name, run in runs.items():
                for _ in range(4 if turn == 0 and self.cuda else 1):
                    run()
                taken, host_us = self._times(run)
                times[name] += taken
                host[name] = min(host_us, host.get(name, host_us))
        return {n: Sample(statistics.median(t), t, host[n]) for n, t in times.items()}

    def sustained(self, runs: Runs) -> dict[str, float]:
        return {name: self.clock.sustained(run) for name, run in runs.items()} if self.cuda else {}

    def _times(self, run: Callable[[], object]) -> tuple[list[float], float]:
        """Milliseconds of each run, and microseconds the host spends on one."""
        if not self.cuda:
            taken = []
            for _ in range(self.count):
                start = time.perf_counter()
                run()
                taken.append(1e3 * (time.perf_counter() - start))
            return taken, 1e3 * min(taken)
        torch.cuda.synchronize()
        events = [event() for _ in range(self.count + 1)]
        start = time.perf_counter()
        events[0].record()
        for after in events[1:]:
            run()
            after.record()
        host_us = 1e6 * (time.perf_counter() - start) / self.count
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)], host_us
