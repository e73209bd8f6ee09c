"""How benchmarks take their times, as far as a machine without a GPU goes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch

import timing
from timing import CpuTimer, Limits, balanced_orders, burst

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", range(1, 9))
def test_each_call_follows_every_other_equally_often(count: int) -> None:
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert len(pairs) == count * (count - 1)
    assert len(set(pairs.values())) <= 1


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still but for what a call adds to it."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_calls_take_turns_and_the_best_counts(ticks: list[float]) -> None:
    order: list[str] = []
    taken = iter([9.0, 0.004, 0.002, 0.003, 0.002, 0.005])  # seconds; the first warms up

    def slow() -> None:
        order.append("slow")
        ticks[0] += next(taken)

    samples = CpuTimer(seconds=0.0).measure(slow, lambda: order.append("none"))
    assert order == ["slow", "none"] * 6
    assert samples[0].ms == pytest.approx(2.0)
    assert samples[0].repeat == pytest.approx({"min": 2.0, "median": 3.0, "max": 5.0})
    assert samples[1].ms == 0.0


def test_a_burst_warms_up_and_takes_the_median(ticks: list[float]) -> None:
    taken = iter([9.0, 0.002, 0.007, 0.003])

    def step() -> None:
        ticks[0] += next(taken)

    sample = burst({"step": step}, CPU)["step"]
    assert sample.ms == pytest.approx(3.0)
    assert sample.host_us == pytest.approx(2000.0)
    assert sorted(sample.times) == pytest.approx([2.0, 3.0, 7.0])


def test_a_copy_reads_and_writes_the_bytes_it_is_asked_for() -> None:
    copied = Limits(CPU).copy(4096)()
    assert isinstance(copied, torch.Tensor)
    assert copied.numel() == 2048
    assert copied.eq(1).all()
