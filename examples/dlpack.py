"""The operators on arrays of other frameworks, which cross through DLPack without a copy.

    python examples/dlpack.py numpy|jax|cupy

Outputs are given by the caller: NumPy arrays for JAX on the CPU (a JAX array is immutable, and is
refused as an output), CuPy arrays on the GPU. NumPy alone may leave `out=` away. FP8 codes travel
as uint8, with the format named. The tests run `numpy` always and `jax` where it is installed;
`cupy` needs a Hopper GPU and is not run by them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from typing import Any

import numpy as np

from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops, use_stream

EXPERTS, TOKENS, N, K = 3, 90, 160, 320


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def main(framework: str) -> float:
    """Quantizes, multiplies by expert, compares with float32; returns the relative error."""
    xp: Any = importlib.import_module("jax.numpy" if framework == "jax" else framework)
    outputs: Any = xp if framework == "cupy" else np
    stream: Any = contextlib.nullcontext()
    if framework == "cupy":
        stream = use_stream(xp.cuda.get_current_stream().ptr)

    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((TOKENS, K)), rng.standard_normal((EXPERTS, N, K))
    counts = np.array([41, 0, 49])
    d = outputs.empty((TOKENS, N), "float32")
    a = Fp8Tensor(
        outputs.empty((TOKENS, K), "uint8"),
        outputs.empty((cdiv(K, 128), 4 * cdiv(TOKENS, 4)), "float32"),
        scale_layout="gemm",
        fp8_dtype="e4m3",
    )
    b, b_t = (
        Fp8Tensor(
            outputs.empty((EXPERTS, rows, columns), "uint8"),
            outputs.empty((EXPERTS, cdiv(rows, 128), cdiv(columns, 128)), "float32"),
            scale_layout="block",
            fp8_dtype="e4m3",
        )
        for rows, columns in ((N, K), (K, N))
    )
    sizes = (TOKENS, 1, EXPERTS, 1, TOKENS)
    plan = RoutingPlan(None, *sizes)
    plan = RoutingPlan(outputs.empty(plan.buffer_size, "int32"), *sizes)
    with stream:
        ops.plan_from_counts(xp.asarray(counts, dtype="int32"), capacity=TOKENS, out=plan)
        ops.quantize(xp.asarray(x, dtype="float32"), scale_layout="gemm", out=a)
        ops.quantize_weight(xp.asarray(w, dtype="float32"), out=(b, b_t))
        ops.grouped_gemm(a, b, plan, out_dtype="float32", out=d)

    got = d.get() if framework == "cupy" else np.asarray(xp.asarray(d))
    expert = np.repeat(np.arange(EXPERTS), counts)
    want = np.einsum("tk,tnk->tn", x, w[expert])
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("framework", nargs="?", choices=("numpy", "jax", "cupy"), default="numpy")
    error = main(parser.parse_args().framework)
    print(f"relative error {error:.4f}")
    sys.exit(error > 0.05)
