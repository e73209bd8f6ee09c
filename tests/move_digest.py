"""Prints a digest of what routing, movement and SwiGLU give on fixed inputs; without torch, to
start quickly. Run by test_permute.py with several OMP_NUM_THREADS.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np

sys.modules["torch"] = None  # type: ignore[assignment]

from fp8moe_cutlass import Fp8Tensor, ops  # noqa: E402


def digest() -> str:
    rng = np.random.default_rng(5)
    tokens, slots, experts, width = 3000, 4, 13, 144
    idx = rng.integers(-1, experts, (tokens, slots), np.int32)
    x = rng.standard_normal((tokens, width), np.float32).astype(np.float16)
    probs = rng.random((tokens, slots), np.float32)
    plan = ops.route(experts, topk_idx=idx, align=16)
    q, row_probs = ops.permute_pad(ops.quantize(x), plan, probs)
    y, _ = ops.permute_pad(x, plan)
    out = ops.unpermute_unpad(y, plan, probs)
    dy, dprobs = ops.unpermute_unpad_backward(x, plan, y, probs)
    dx, _ = ops.permute_pad_backward(dy, plan)
    z = rng.standard_normal((plan.rows, 2 * width), np.float32)
    h = ops.swiglu_quantize(z, plan, row_probs)
    grads = ops.swiglu_quantize_backward(dy, z, plan, row_probs, columns="column")
    of_blocks = ops.swiglu_quantize_backward(dy, z, plan, row_probs, columns="block")

    sha = hashlib.sha256()
    rows, columns = int(plan.row_offsets[-1]), int(plan.col_offsets[-1])
    for whole in (plan.row_of, out, dprobs, dx):
        sha.update(whole.tobytes())
    for by_row in (plan.token_of_row, row_probs, y, dy, grads[-1]):
        sha.update(by_row[:rows].tobytes())
    for fp8 in (q, h, grads[0]):
        assert isinstance(fp8, Fp8Tensor)
        sha.update(fp8.data[:rows].tobytes() + fp8.scale_inv[:, :rows].tobytes())
    for fp8 in (*grads[1:3], *of_blocks[1:3]):
        sha.update(fp8.data[:, :columns].tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    print(digest())
