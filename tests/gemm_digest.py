"""Prints a digest of both GEMMs' bits on fixed operands; without torch, to start quickly."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

sys.modules["torch"] = None  # type: ignore[assignment]

from fp8moe_cutlass import Fp8Tensor, ops  # noqa: E402
from fp8moe_cutlass.tensor import scale_shape  # noqa: E402


def digest() -> str:
    rng = np.random.default_rng(0)
    counts = np.array([301, 0, 77], np.int32)
    plan = ops.plan_from_counts(counts, capacity=int(counts.sum()))

    def random(shape: tuple[int, ...], layout: str) -> Fp8Tensor:
        scale = rng.random(scale_shape(shape, layout), dtype=np.float32)
        codes = rng.integers(0, 0x7F, shape, np.uint8)
        return Fp8Tensor(codes, scale, layout, pow2=False, fp8_dtype="e4m3")

    a, w = random((378, 272), "gemm"), random((3, 528, 272), "block")
    dy, x = random((272, plan.columns), "gemm"), random((144, plan.columns), "gemm")
    d = ops.grouped_gemm(a, w, plan, out_dtype="float32")
    dw = ops.grouped_gemm_wgrad(dy, x, plan)
    return hashlib.sha256(d.tobytes() + dw.tobytes()).hexdigest()


if __name__ == "__main__":
    print(digest())
