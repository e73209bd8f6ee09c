"""How long calls take, and the machine's two limits: a copy, and dense arithmetic.

Calls to compare take turns.
`CudaTimer.measure`: CUDA events around one call, after a read of twice the L2's size (a flush that
writes leaves dirty lines). The median counts. Each call follows every other equally often: one that
draws much power leaves the next a lower clock.
`CpuTimer.measure`: wall clock; the best counts, because other processes only ever add time.
`burst`: whole steps back to back, with a warm cache, as in training.
`CudaTimer.sustained`: the mean of one second of calls back to back.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

Run = Callable[[], object]
Runs = dict[str, Run]


@dataclass(frozen=True)
class Sample:
    """Milliseconds of one call, those of every repetition, and the host's microseconds per call."""

    ms: float
    times: list[float]
    host_us: float | None = None

    @property
    def repeat(self) -> dict[str, float]:
        ordered = sorted(self.times)
        return {"min": ordered[0], "median": statistics.median(ordered), "max": ordered[-1]}


class CpuTimer:
    """Repeats the calls in turn for about `seconds` each, at least five times."""

    def __init__(self, seconds: float = 0.3) -> None:
        self.seconds = seconds

    def measure(self, *runs: Run) -> list[Sample]:
        times: list[list[float]] = [[] for _ in runs]
        for run in runs:
            run()
        end = time.perf_counter() + self.seconds * len(runs)
        while len(times[0]) < 5 or (time.perf_counter() < end and len(times[0]) < 1000):
            for run, taken in zip(runs, times, strict=True):
                taken.append(1e3 * seconds(run))
        return [Sample(min(taken), taken) for taken in times]

    def sustained(self, run: Run) -> float | None:
        return None  # the CPU has no burst to tell it from


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def balanced_orders(count: int) -> list[list[int]]:
    """Orders of `count` calls in which each one follows every other equally often: a Williams
    design (E. J. Williams, 1949), of `count` orders, or twice as many if `count` is odd."""
    first = [(i + 1) // 2 if i % 2 else -i // 2 for i in range(count)]  # 0, 1, -1, 2, -2, ...
    orders = [[(call + shift) % count for call in first] for shift in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


class CudaTimer:
    """Cold-L2 repetitions by events; `sustained` is the mean of a second of calls back to back."""

    repeats = 30

    def __init__(self) -> None:
        self._random = random.Random(0)  # of all cases: none begins as the one before it

    @cached_property
    def cache(self) -> torch.Tensor:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return torch.zeros(2 * properties.L2_cache_size // 4, device="cuda")

    def measure(self, *runs: Run) -> list[Sample]:
        host = [self._host_us(run) for run in runs]  # turns
        events = [[(event(), event()) for _ in runs] for _ in range(self.repeats)]
        # The host gets ahead, so that no event waits for an enqueue: 50 us are a flush and events.
        ahead_us = self.repeats * sum(50.0 + max(turns) for turns in host)
        torch.cuda._sleep(int(2000.0 * ahead_us))  # type: ignore[no-untyped-call]
        orders = balanced_orders(len(runs))
        self._random.shuffle(orders)
        for repeat, order in zip(events, itertools.cycle(orders), strict=False):
            for call in order:
                before, after = repeat[call]
                self.cache.sum()
                before.record()
                runs[call]()
                after.record()
        torch.cuda.synchronize()
        samples = []
        for index, turns in enumerate(host):
            times = [repeat[index][0].elapsed_time(repeat[index][1]) for repeat in events]
            samples.append(Sample(statistics.median(times), times, min(turns)))
        return samples

    def _host_us(self, run: Run) -> list[float]:
        """Microseconds the host needs to enqueue the call, in 5 to 20 turns, as many as begin in 50
        ms; warms it up as well."""
        for _ in range(3):
            run()
        turns: list[float] = []
        calls = 10
        end = time.perf_counter() + 0.05
        while len(turns) < 5 or (len(turns) < 20 and time.perf_counter() < end):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            turns.append(1e6 * (time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
        return turns

    def sustained(self, run: Run) -> float:
        """Milliseconds per call over about a second of calls back to back."""
        count = 1
        while True:
            before, after = event(), event()
            before.record()
            for _ in range(count):
                run()
            after.record()
            torch.cuda.synchronize()
            taken = float(before.elapsed_time(after))
            if taken >= 500.0 or count >= 100_000:
                return taken / count
            count = int(count * min(1e3 / max(taken, 1e-3), 1000.0)) + 1


def burst(runs: Runs, device: torch.device, count: int = 12, rounds: int = 2) -> dict[str, Sample]:
    """`count` calls of each run back to back, in turn with the other runs, `rounds` times in
    balanced orders; the median of all. The CPU has no clock to settle: three calls, one round."""
    cuda = device.type == "cuda"
    count, rounds = (count, rounds) if cuda else (3, 1)
    times: dict[str, list[float]] = {name: [] for name in runs}
    host: dict[str, float] = {}
    names, orders = [*runs], itertools.cycle(balanced_orders(len(runs)))
    for turn in range(rounds):
        for name in (names[call] for call in next(orders)):
            run = runs[name]
            for _ in range(4 if turn == 0 and cuda else 1):
                run()
            taken, host_us = back_to_back(run, count, cuda)
            times[name] += taken
            host[name] = min(host_us, host.get(name, host_us))
    return {name: Sample(statistics.median(t), t, host[name]) for name, t in times.items()}


def back_to_back(run: Run, count: int, cuda: bool) -> tuple[list[float], float]:
    """Milliseconds of each call, and microseconds the host spends on one."""
    if not cuda:
        taken = [1e3 * seconds(run) for _ in range(count)]
        return taken, 1e3 * min(taken)
    torch.cuda.synchronize()
    events = [event() for _ in range(count + 1)]
    start = time.perf_counter()
    events[0].record()
    for after in events[1:]:
        run()
        after.record()
    host_us = 1e6 * (time.perf_counter() - start) / count
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)], host_us


def seconds(run: Run) -> float:
    """Wall clock of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def warm_up(run: Run, times: int = 1) -> None:
    """Runs it on a stream of its own, as torch wants it before a capture."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            run()
    torch.cuda.current_stream().wait_stream(stream)


def capture(run: Run, **how: Any) -> Run:
    """A replay of `run`, which is warm; what it keeps lives as long as the replay. how: of
    torch.cuda.graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **how):
        run()
    return graph.replay


def captured(run: Run) -> Run:
    """`capture` after two runs to warm up."""
    warm_up(run, 2)
    return capture(run)


class Limits:
    """What the machine can do, measured in the same run: copies and dense GEMMs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timer = CudaTimer() if device.type == "cuda" else CpuTimer()

    def wake(self) -> None:
        """Bring the clocks of an idle GPU up, before the first case. By copies: behind GEMMs the
        first case would meet the lower clocks of the power limit."""
        if self.device.type == "cuda":
            self.timer.measure(self.copy(2**31))

    def copy(self, moved: int) -> Run:
        """A copy_ that reads and writes `moved` bytes in all."""
        source = torch.ones(max(1, moved // 2), dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    def matmul(self, m: int, n: int, k: int) -> Run:
        """A float32 matmul [m, k] x [n, k]^T."""
        a, b = torch.randn(m, k, device=self.device), torch.randn(n, k, device=self.device)
        out = torch.empty(m, n, device=self.device)
        return lambda: torch.mm(a, b.t(), out=out)

    @cached_property
    def launch(self) -> Sample | None:
        """A kernel of torch's that does next to nothing, cold as the others are; None: CPU."""
        if self.device.type == "cpu":
            return None
        one = torch.zeros(1, device=self.device)
        return self.timer.measure(lambda: one.add_(1.0))[0]

    @cached_property
    def copy_tb_s(self) -> float:
        """Bytes read and written a second by a large copy, TB/s."""
        moved = 2**31 if self.device.type == "cuda" else 2**27
        return moved / self.timer.measure(self.copy(moved))[0].ms / 1e9

    @cached_property
    def tensor_tflops(self) -> float:
        """CUDA: dense 8192^3 in FP8, per-tensor scales, fast accumulation. CPU: 2048^3 float32."""
        if self.device.type == "cpu":
            return 2.0 * 2048**3 / self.timer.measure(self.matmul(2048, 2048, 2048))[0].ms / 1e9
        n, dtype = 8192, torch.bfloat16
        a, b = (torch.randn(n, n, device=self.device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=self.device)
        run = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=dtype, use_fast_accum=True)  # noqa: E731
        return 2.0 * n**3 / self.timer.measure(run)[0].ms / 1e9
