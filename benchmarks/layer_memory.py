"""The memory of one expert layer, by arithmetic and by the CUDA allocator. Letters as in
docs/reference/layouts.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8moe_cutlass import nn
from fp8moe_cutlass.routing import RoutingPlan

TILE = 128
LAYERS = 4
STACKS: dict[str, dict[str, Any]] = {
    "save": {"transposed_weights": "save"},
    "recompute": {"transposed_weights": "recompute"},
    "recipe=None": {"recipe": None},
}


def fp8_bytes(rows: int, columns: int) -> int:
    """Codes and the float32 scales of 1x128 tiles."""
    return rows * columns + 4 * rows * -(-columns // TILE)


def saved_bytes(
    tokens: int, slots: int, experts: int, hidden: int, intermediate: int, keep: str = "bf16"
) -> int:
    """Bytes the FP8 block keeps from forward to backward: x [T, H] in FP8, probs of rows [R], the
    plan, and the pre-activation [R, 2I] in "bf16", in "fp8" or not at all ("none")."""
    rows = tokens * slots
    plan = RoutingPlan(None, tokens, slots, experts, 1, rows)
    z = {
        "bf16": 2 * rows * 2 * intermediate,
        "fp8": fp8_bytes(rows, 2 * intermediate),
        "none": 0,
    }
    return fp8_bytes(tokens, hidden) + 4 * rows + 4 * plan.buffer_size + z[keep]


def bf16_saved_bytes(tokens: int, slots: int, hidden: int, intermediate: int) -> int:
    """The least an autograd of separate bf16 operators keeps: the permuted x [R, H], the
    pre-activation [R, 2I] and the activation [R, I]."""
    return 2 * tokens * slots * (hidden + 3 * intermediate)


def measure(
    forward: Callable[[], Any], backward: Callable[[Any], None], clear: Callable[[], None]
) -> dict[str, int]:
    """By the CUDA allocator, in bytes above what is resident: what a forward leaves for backward
    (its output apart), and the peak of forward and backward, weight gradients included.

    clear: drops gradients. The caller has warmed up.
    """
    clear()
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = forward()
    saved = torch.cuda.memory_allocated() - resident - out.numel() * out.element_size()
    backward(out)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - resident
    clear()
    return {"saved": saved, "peak": peak}


def stack(shape: dict[str, int]) -> dict[str, dict[str, int]]:
    """Of four layers, one after the other, by STACKS: the bytes that they hold between steps, and
    the peak of a forward and backward."""
    t, s, e, h, i = (shape[name] for name in "TSEHI")
    found = {}
    for name, options in STACKS.items():
        before = torch.cuda.memory_allocated()
        layers = [nn.MoEExperts(e, h, i, device="cuda", **options) for _ in range(LAYERS)]
        x = torch.randn(t, h, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(t, e, device="cuda").topk(s).indices
        probs = torch.rand(t, s, device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            out = x
            for layer in layers:
                out = out + layer(out, ids, probs)
            out.float().square().mean().backward()  # type: ignore[no-untyped-call]
            del out
            for layer in layers:
                layer.zero_grad()
        held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        found[name] = {"held": held - before, "peak": peak - before}
        del layers, layer, x, ids, probs
        torch.cuda.empty_cache()
    return found
