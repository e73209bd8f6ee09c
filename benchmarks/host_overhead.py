"""What a call costs the host: grouped_gemm over zero rows, six tensors in, all checks, no work."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fp8moe_cutlass import _C, Fp8Tensor, ops

CALLS = 20000
ROUTES: dict[str, Callable[..., object]] = {"_C": _C.grouped_gemm}


def arguments(route: str) -> tuple[Any, ...]:
    """grouped_gemm's arguments for no tokens, one expert, N = K = 128."""
    data = torch.empty(0, 128, dtype=torch.float8_e4m3fn)
    weight = torch.zeros(1, 128, 128).to(torch.float8_e4m3fn)
    plan = ops.plan_from_counts(torch.zeros(1, dtype=torch.int32), capacity=0)
    d = torch.empty(0, 128, dtype=torch.bfloat16)
    a, w = (data, torch.empty(1, 0), "gemm"), (weight, torch.ones(1, 1, 1), "block")
    if route == "_C":
        return Fp8Tensor(*a), Fp8Tensor(*w), plan, d
    return (*a, *w, plan.buffer, *plan.sizes, d)


def host_overhead() -> list[dict[str, Any]]:
    """A result row for each route; host_us is the best of seven rounds."""
    rows: list[dict[str, Any]] = []
    for name, call in ROUTES.items():
        args = arguments(name)
        call(*args)
        times = timeit.repeat(partial(call, *args), number=CALLS, repeat=7)
        rounds = sorted(1e3 * t / CALLS for t in times)  # ms a call
        rows.append(
            {
                "op": "host overhead",
                "shape": {"tensors": 6},
                "variant": f"{name}, grouped_gemm",
                "ms": rounds[0],
                "host_us": 1e3 * rounds[0],
                "bytes": 0,
                "flops": 0,
                "limit_ms": None,
                "peers": {},
                "repeat": {"min": rounds[0], "median": rounds[3], "max": rounds[-1]},
            }
        )
    return rows
