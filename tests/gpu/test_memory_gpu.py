"""Out of memory under each of torch's allocators, and graphs made and dropped.

An allocator is chosen when a process starts: each case runs in one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8moe_cutlass import Fp8Tensor, ops
from fp8moe_cutlass.autograd import weight_grad
from moe_problem import problem

MIB = 1 << 20


@contextmanager
def memory_left(size: int) -> Iterator[None]:
    """This process may take `size` bytes more. Others keep the GPU's memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    native = torch.cuda.get_allocator_backend() == "native"
    held = torch.cuda.memory_reserved() if native else torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((held + size) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def delayed_weight_gradients() -> None:
    """backward_dw without memory raises and stays pending; then the gradients are added once."""
    p = problem(1024, 2, 8, 1024, 1024).to("cuda")
    layer = p.experts(delay_wgrad=True)
    for w in layer.parameters():
        w.main_grad, w.grad_added_to_main_grad = torch.zeros(w.shape, device="cuda"), False

    def forward_and_backward() -> None:
        for w in layer.parameters():
            w.main_grad.zero_()
            w.grad = None
        layer(p.x, p.topk_idx, p.probs).backward(p.dout)

    forward_and_backward()
    layer.backward_dw()
    want = [w.main_grad.clone() for w in layer.parameters()]
    raised = 0
    for leave in (0, 4, 8, 16, 32, 64):
        weight_grad._placeholders.clear()
        forward_and_backward()
        try:
            with memory_left(leave * MIB):
                layer.backward_dw()
        except torch.OutOfMemoryError:
            raised += 1
        layer.backward_dw()
        assert all(map(torch.equal, (w.main_grad for w in layer.parameters()), want)), leave
    assert raised


def operators() -> None:
    """An operator that finds no memory raises, and the next call has its bits."""
    x = torch.randn(8192, 4096, dtype=torch.bfloat16)
    want, there = ops.quantize(x), x.cuda()
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
    given = Fp8Tensor(codes, torch.empty(8192, 32, device="cuda"))
    with memory_left(0), pytest.raises(torch.OutOfMemoryError):
        ops.quantize(there)
    with memory_left(0):
        ops.quantize(there, out=given)
    for got in (given, ops.quantize(there)):
        assert torch.equal(got.data.cpu().view(torch.uint8), want.data.view(torch.uint8))


def graphs() -> None:
    """120 captures, made and dropped, keep no memory. (Others use the GPU: torch's own count.)"""
    p = problem(256, 2, 8, 256, 256).to("cuda")
    layer = p.experts()
    p.run(layer)
    side, held = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        p.run(layer)
    torch.cuda.synchronize()
    for n in range(120):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(p.x, p.topk_idx, p.probs).backward(p.dout)
        graph.replay()
        torch.cuda.synchronize()
        del graph
        if n in (19, 119):
            torch.cuda.empty_cache()
            held.append(torch.cuda.memory_reserved())
    assert held[0] == held[1]


CASES: dict[str, Any] = {f.__name__: f for f in (delayed_weight_gradients, operators, graphs)}


@pytest.mark.parametrize("allocator", ["native", "cudaMallocAsync"])
@pytest.mark.parametrize("case", CASES)
def test_memory(case: str, allocator: str) -> None:
    paths = [*sys.path, str(Path(__file__).parents[1])]
    env = {
        **os.environ,
        "PYTORCH_CUDA_ALLOC_CONF": f"backend:{allocator}",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(
        [sys.executable, __file__, case], env=env, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    CASES[sys.argv[1]]()
