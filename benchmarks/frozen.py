"""Frozen FP8 experts beside the layer that quantizes in each forward; turn_weight beside a copy.

Whole steps, forward and backward, captured in CUDA graphs. "frozen, kept" reads transposed codes
that were made once (weights=), "frozen, turned" makes them in each backward. "LoRA r 16" is the
same with low-rank terms on all experts, which train. "copy" moves the codes of both weights as
turn_weight does, byte for byte, in order.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from common import OnResult, Record, environment, main, parser, row
from fp8moe_cutlass import ops
from fp8moe_cutlass.nn import MoEExperts
from timing import Limits, Run, burst, captured

MODELS = {  # E, H, I
    "Qwen3-30B, 128 experts": (128, 2048, 768),
    "Qwen3-235B, 16 experts": (16, 4096, 1536),
    "DeepSeek-V3, 32 experts": (32, 7168, 2048),
}
QUICK = {"quick": (4, 256, 128)}
TOKENS, TOP_K = 4096, 8


def steps_of(sizes: tuple[int, int, int], tokens: int, device: torch.device) -> dict[str, Run]:
    """What is timed, by name."""
    experts, hidden, _ = sizes
    x = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
    dout = torch.randn_like(x)
    ids = torch.rand(tokens, experts, device=device).topk(min(TOP_K, experts)).indices
    probs = torch.rand(ids.shape, device=device).requires_grad_()
    layer = MoEExperts(*sizes, device=device)
    tensors = dict(layer.fp8_tensors(fused=True))
    frozen = MoEExperts.from_fp8(tensors, num_experts=experts, device=device)
    kept = frozen.quantize_weights()
    lora = {rank: low_rank(tensors, experts, rank, device) for rank in (16, 64)}

    def step(of: MoEExperts, **how: Any) -> Run:
        wanted = [x, probs, *(p for p in of.parameters() if p.requires_grad)]
        return lambda: torch.autograd.grad(of(x, ids, probs, **how), wanted, dout)

    pairs: Any = [(kept.gate_up, kept.gate_up_t), (kept.down, kept.down_t)]
    return {
        "quantized in each step": step(layer),
        "frozen, turned": step(frozen),
        "frozen, kept": step(frozen, weights=kept),
        **{f"LoRA r {rank}, turned": step(layer) for rank, layer in lora.items()},
        **{f"LoRA r {rank}, kept": step(layer, weights=kept) for rank, layer in lora.items()},
        "turn_weight": lambda: [ops.turn_weight(q, out=t) for q, t in pairs],
        "copy": lambda: [
            t.data.view(torch.uint8).view(-1).copy_(q.data.view(torch.uint8).view(-1))
            for q, t in pairs
        ],
    }


def low_rank(tensors: Any, experts: int, rank: int, device: torch.device) -> MoEExperts:
    """The frozen layer with LoRA, whose B is not zero."""
    layer = MoEExperts.from_fp8(tensors, num_experts=experts, device=device)
    layer.add_lora(rank, alpha=2 * rank)
    for name, p in layer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.02)
    return layer


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    limits = Limits(device)
    limits.wake()
    record: Record = {"environment": environment(limits), "results": []}
    for model, sizes in (QUICK if given.quick else MODELS).items():
        tokens = 64 if given.quick else TOKENS
        runs = steps_of(sizes, tokens, device)
        if device.type == "cuda":
            runs = {name: captured(step) for name, step in runs.items()}
        shape = {"T": tokens, "E": sizes[0], "H": sizes[1], "I": sizes[2]}
        moved = 2 * 3 * sizes[0] * sizes[1] * sizes[2]
        for name, sample in burst(runs, device).items():
            bytes = moved if name in ("turn_weight", "copy") else 0
            result = row(name, shape, "", sample, peers={}, limit_ms=None, bytes=bytes)
            result["model"] = model
            record["results"].append(result)
            on_result(result)
        del runs
    return record


if __name__ == "__main__":
    main(parser(__doc__), run)
