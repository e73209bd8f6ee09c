"""Threads: Python's run calls at the same time, with the bits of one; OpenMP's change no bit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from fp8moe_cutlass import ops
from fp8moe_cutlass.nn import MoEExperts

THREADS, ROUNDS = 4, 5


def block(seed: int) -> list[torch.Tensor]:
    """The operators of a layer, on torch tensors and NumPy arrays of this seed."""
    rng = np.random.default_rng(seed)
    tokens, experts, width = 100 + 30 * seed, 3, 128
    x = rng.standard_normal((tokens, width), dtype=np.float32)
    idx = rng.integers(-1, experts, (tokens, 2))
    w = torch.from_numpy(rng.standard_normal((experts, 2 * width, width), dtype=np.float32))
    plan = ops.route(experts, topk_idx=torch.from_numpy(idx))
    q = ops.quantize(torch.from_numpy(x))
    assert np.array_equal(q.data.view(torch.uint8).numpy(), ops.quantize(x).data)
    rows, _ = ops.permute_pad(q, plan)
    y = ops.grouped_gemm(rows, ops.quantize_weight(w)[0], plan)
    h = ops.act_quantize(y, plan)
    kept = int(plan.row_offsets[-1])
    end = int(plan.col_offsets[-1])
    columns = ops.permute_transpose_fp8(q, plan)
    dw = ops.grouped_gemm_wgrad(columns, ops.transpose_fp8(h, plan), plan)
    results = [q.data, rows.data[:kept], y[:kept], h.data[:kept], columns.data[:, :end], dw]
    return [t.contiguous().view(torch.uint8) for t in results]


def step(seed: int) -> list[torch.Tensor]:
    """Forward and backward of a layer of its own."""
    generator = torch.Generator().manual_seed(seed)
    layer = MoEExperts(3, 64, 48)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=generator)
    x = torch.randn(90, 64, generator=generator, requires_grad=True)
    idx = torch.randint(3, (90, 2), generator=generator)
    layer(x, idx, torch.rand(90, 2, generator=generator)).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(w.grad for w in layer.parameters() if w.grad is not None)]


@pytest.mark.parametrize("work", [block, step], ids=["ops", "layer"])
def test_threads_do_not_disturb_each_other(work: Any) -> None:
    alone = [work(seed) for seed in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        for results in (list(pool.map(work, range(THREADS))) for _ in range(ROUNDS)):
            for got, expected in zip(results, alone, strict=True):
                assert len(got) == len(expected) >= 3
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.fixture
def threads_switch_only_when_they_let_go() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("threads_switch_only_when_they_let_go")
def test_the_gil_is_free_during_a_call() -> None:
    """This thread wakes while the other is inside an op: the op let the GIL go."""
    plan = ops.route(1, topk_idx=torch.zeros(2048, 1, dtype=torch.int64))
    a = ops.quantize(torch.ones(2048, 1024), scale_layout="gemm")
    w, _ = ops.quantize_weight(torch.ones(1, 2048, 1024))
    out = ops.grouped_gemm(a, w, plan)
    started, done = threading.Event(), []

    def call() -> None:
        started.set()
        for _ in range(10):  # each some 50 ms
            ops.grouped_gemm(a, w, plan, out=out)
        done.append(True)

    worker = threading.Thread(target=call)
    worker.start()
    started.wait()
    assert not done
    worker.join()
    assert done


def test_any_number_of_openmp_threads_gives_the_same_bits() -> None:
    found = []
    for threads in ("1", "1", "2", "7"):
        env = {**os.environ, "OMP_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, __file__], capture_output=True, check=True, env=env)
        found.append(done.stdout)
    assert len(found[0].split()) == 15
    assert len(set(found)) == 1


if __name__ == "__main__":
    for made in (*block(0), *block(200), *step(0)):
        print(hashlib.sha256(made.view(torch.uint8).numpy().tobytes()).hexdigest())
