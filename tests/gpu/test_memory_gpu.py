"""Out of memory under each of torch's allocators, and graphs made and dropped.

An allocator is chosen when a process starts: each case runs in one of its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8moe_cutlass import Fp8Tensor, ops
from fp8moe_cutlass.autograd import weight_grad
from moe_problem import problem

MIB = 1 << 20


def fill(leave: int) -> list[torch.Tensor]:
    """Takes the GPU's memory but for `leave` bytes."""
    torch.cuda.empty_cache()
    held, size = [], 8192 * MIB
    while size >= MIB:
        try:
            if torch.cuda.mem_get_info()[0] - leave < size:
                raise torch.OutOfMemoryError
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


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
        torch.cuda.synchronize()
        held = fill(leave * MIB)
        try:
            layer.backward_dw()
        except torch.OutOfMemoryError:
            raised += 1
        del held
        torch.cuda.empty_cache()
        layer.backward_dw()
        assert all(map(torch.equal, (w.main_grad for w in layer.parameters()), want)), leave
    assert raised


def operators() -> None:
    """An operator that finds no memory raises, and the next call has its bits."""
    x = torch.randn(8192, 1024, dtype=torch.bfloat16)
    want, there = ops.quantize(x), x.cuda()
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
    given = Fp8Tensor(codes, torch.empty(8192, 8, device="cuda"))
    torch.cuda.synchronize()
    held = fill(0)
    with pytest.raises(torch.OutOfMemoryError):
        ops.quantize(there)
    with contextlib.suppress(RuntimeError):  # needs none, but for the kernel's own code
        ops.quantize(there, out=given)
    del held
    torch.cuda.empty_cache()
    for got in (ops.quantize(there), ops.quantize(there, out=given)):
        assert torch.equal(got.data.cpu().view(torch.uint8), want.data.view(torch.uint8))


def graphs() -> None:
    """120 captures, made and dropped, keep no memory."""
    p = problem(256, 2, 8, 256, 256).to("cuda")
    layer = p.experts()
    p.run(layer)
    side, free = torch.cuda.Stream(), []
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
            free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[1] <= 2 * MIB


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
