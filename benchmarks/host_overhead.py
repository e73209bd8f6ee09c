"""What a call costs the host: grouped_gemm over zero rows, six tensors in, all checks, no work."""

from __future__ import annotations

import timeit
from functools import partial
from typing import Any

import torch

from fp8moe_cutlass import _C, Fp8Tensor, ops

CALLS = 20000


def arguments() -> tuple[Any, ...]:
    """_C.grouped_gemm's for no tokens, one expert, N = K = 128, without a low-rank term."""
    data = torch.empty(0, 128, dtype=torch.float8_e4m3fn)
    weight = torch.zeros(1, 128, 128).to(torch.float8_e4m3fn)
    plan = ops.plan_from_counts(torch.zeros(1, dtype=torch.int32), capacity=0)
    d = torch.empty(0, 128, dtype=torch.bfloat16)
    a = Fp8Tensor(data, torch.empty(1, 0), "gemm")
    w = Fp8Tensor(weight, torch.ones(1, 1, 1), "block")
    return a, w, plan, d, None, None


def host_overhead(calls: int = CALLS) -> list[dict[str, Any]]:
    """One result row; host_us is the best of seven rounds."""
    call = partial(_C.grouped_gemm, *arguments())
    call()
    times = timeit.repeat(call, number=calls, repeat=7)
    rounds = sorted(1e3 * t / calls for t in times)  # ms per call
    return [
        {
            "op": "host overhead",
            "shape": {"tensors": 6},
            "variant": "_C, grouped_gemm",
            "ms": rounds[0],
            "host_us": 1e3 * rounds[0],
            "bytes": 0,
            "flops": 0,
            "limit_ms": None,
            "peers": {},
            "repeat": {"min": rounds[0], "median": rounds[3], "max": rounds[-1]},
        }
    ]
