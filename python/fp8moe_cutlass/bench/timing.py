"""How long a call takes, and the two limits it is held against: a copy, and dense arithmetic.

CUDA: the L2 is made cold by READING twice its size (a flush that writes leaves dirty lines),
events around the call alone, median; sustained is back to back for a second. CPU: wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

Run = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """Milliseconds of one call over the repetitions, and what the host spends on it."""

    median: float
    min: float
    max: float
    host_us: float | None = None


def sample_of(times_ms: list[float], host_us: float | None = None) -> Sample:
    return Sample(statistics.median(times_ms), min(times_ms), max(times_ms), host_us)


class CpuTimer:
    """Repeats a call for about `seconds`, at least five times."""

    def __init__(self, seconds: float = 0.4) -> None:
        self.seconds = seconds

    def measure(self, run: Run) -> Sample:
        run()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 5 or (time.perf_counter() - began < self.seconds and len(times) < 1000):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        return sample_of(times)

    def sustained(self, run: Run) -> float | None:
        return None  # the CPU has no burst to tell it from


class CudaTimer:
    """Cold-L2 repetitions by events; `sustained` is the mean of a second of calls back to back."""

    def __init__(self, repeats: int = 30) -> None:
        self.repeats = repeats

    @cached_property
    def cache(self) -> torch.Tensor:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return torch.zeros(2 * properties.L2_cache_size // 4, device="cuda")

    def measure(self, run: Run) -> Sample:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            run()
        host_us = 1e6 * (time.perf_counter() - start) / 20
        torch.cuda.synchronize()
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(self.repeats)
        ]
        torch.cuda._sleep(4_000_000)  # the host gets ahead, so that no event waits for an enqueue
        for before, after in events:
            self.cache.sum()
            before.record()
            run()
            after.record()
        torch.cuda.synchronize()
        return sample_of([before.elapsed_time(after) for before, after in events], host_us)

    def sustained(self, run: Run, seconds: float = 1.0) -> float:
        """Milliseconds a call over about a second of calls back to back."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        torch.cuda.synchronize()
        before.record()
        run()
        after.record()
        torch.cuda.synchronize()
        count = max(10, int(1e3 * seconds / max(before.elapsed_time(after), 1e-3)))
        before.record()
        for _ in range(count):
            run()
        after.record()
        torch.cuda.synchronize()
        return float(before.elapsed_time(after)) / count


def timer_for(device: torch.device) -> CpuTimer | CudaTimer:
    return CudaTimer() if device.type == "cuda" else CpuTimer()


class Limits:
    """What the machine allows, measured in the same run: copies, and dense GEMMs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timer = timer_for(device)
        self.copy_ms = lru_cache(maxsize=None)(self._copy_ms)
        self.matmul_ms = lru_cache(maxsize=None)(self._matmul_ms)

    def _copy_ms(self, moved: int) -> float:
        """A copy_ that reads and writes `moved` bytes in all."""
        source = torch.ones(max(1, moved // 2), dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        return self.timer.measure(lambda: target.copy_(source)).median

    @cached_property
    def copy_tb_s(self) -> float:
        """Bytes read and written a second by a large copy, TB/s."""
        moved = 2**31 if self.device.type == "cuda" else 2**27
        return moved / self.copy_ms(moved) / 1e9

    def _matmul_ms(self, m: int, n: int, k: int) -> float:
        """CPU: float32 matmul of this size. CUDA: its arithmetic at the FP8 tensor peak."""
        if self.device.type == "cuda":
            return 2.0 * m * n * k / self.tensor_tflops / 1e9
        a, b, out = torch.randn(m, k), torch.randn(n, k), torch.empty(m, n)
        return self.timer.measure(lambda: torch.mm(a, b.t(), out=out)).median

    @cached_property
    def tensor_tflops(self) -> float:
        """Dense 8192^3 in FP8, per-tensor scales and fast accumulation (CPU: 2048^3 float32)."""
        if self.device.type == "cpu":
            return 2.0 * 2048**3 / self.matmul_ms(2048, 2048, 2048) / 1e9
        n = 8192
        a = torch.randn(n, n, device=self.device).to(torch.float8_e4m3fn)
        b = torch.randn(n, n, device=self.device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=self.device)
        ms = self.timer.measure(
            lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        ).median
        return 2.0 * n**3 / ms / 1e9

    @cached_property
    def bf16_tflops(self) -> float:
        """Dense bf16: 8192^3 on CUDA, 2048^3 on the CPU."""
        n = 8192 if self.device.type == "cuda" else 2048
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2.0 * n**3 / self.timer.measure(lambda: a @ b).median / 1e9
