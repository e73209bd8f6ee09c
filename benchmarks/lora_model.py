"""LoRA on attention and all experts of a whole model, over FP8 experts, on one GPU.

48 layers of Qwen3-30B's sizes with random codes: the experts in FP8 by MoEExperts.add_lora, the
rest frozen in bf16, LoRA r 16 on attention and experts, each layer checkpointed, AdamW on the
adapters. A step is forward, backward and the optimizer's. "turned" makes dgrad's codes in each
backward, "kept" holds them (reuse_fp8_weights): a byte per parameter more. A mode that does not fit
is left out, and its row says so.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common import OnResult, Record, environment, main, parser
from fp8moe_cutlass.nn import MoE, MoEExperts, Router, reuse_fp8_weights
from timing import Limits

QWEN3_30B = {"layers": 48, "hidden": 2048, "inner": 768, "experts": 128, "top_k": 8}
QWEN3_30B |= {"heads": 32, "kv_heads": 4, "head": 128, "vocabulary": 151_936}
QUICK = {"layers": 2, "hidden": 256, "inner": 128, "experts": 4, "top_k": 2}
QUICK |= {"heads": 4, "kv_heads": 2, "head": 64, "vocabulary": 512}
LENGTH, RANK = 4096, 16


class LoraLinear(nn.Module):
    """A frozen bf16 weight, and a low-rank term of alpha / r = 2."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        made: Any = {"device": device, "dtype": torch.bfloat16}
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **made), False)
        self.lora_A = nn.Parameter(torch.empty(RANK, inputs, **made))
        self.lora_B = nn.Parameter(torch.zeros(outputs, RANK, **made))
        for p in (self.weight, self.lora_A):
            nn.init.uniform_(p, -(inputs**-0.5), inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = F.linear(F.linear(x, self.lora_A), self.lora_B)
        return F.linear(x, self.weight) + 2 * low


class Layer(nn.Module):
    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        super().__init__()
        hidden, head = sizes["hidden"], sizes["head"]
        self.shapes = [sizes["heads"], sizes["kv_heads"], sizes["kv_heads"]]
        self.head = head
        made: Any = {"device": device, "dtype": torch.bfloat16}
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, **made) for _ in range(2))
        self.qkv = nn.ModuleList(LoraLinear(hidden, n * head, device) for n in self.shapes)
        self.out = LoraLinear(sizes["heads"] * head, hidden, device)
        experts = MoEExperts(
            *(sizes["experts"], hidden, sizes["inner"]), dtype=torch.float8_e4m3fn, device=device
        )
        random_codes(experts)
        experts.add_lora(RANK, alpha=2 * RANK)
        router = Router(hidden, sizes["experts"], sizes["top_k"], device=device)
        self.moe = MoE(router, experts)
        for part in (self.norms, router):
            part.requires_grad_(False)

    def attention(self, x: Tensor) -> Tensor:
        def heads(part: Any, n: int) -> Tensor:
            y: Tensor = part(x)
            return y.view(*y.shape[:2], n, self.head).transpose(1, 2)

        q, k, v = (heads(part, n) for part, n in zip(self.qkv, self.shapes, strict=True))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        added: Tensor = self.moe(self.norms[1](x))
        return x + added


class Model(nn.Module):
    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        super().__init__()
        made: Any = {"device": device, "dtype": torch.bfloat16}
        self.embedding = nn.Embedding(sizes["vocabulary"], sizes["hidden"], **made)
        self.layers = nn.ModuleList(Layer(sizes, device) for _ in range(sizes["layers"]))
        self.norm = nn.RMSNorm(sizes["hidden"], **made)
        self.head = nn.Linear(sizes["hidden"], sizes["vocabulary"], bias=False, **made)
        for part in (self.embedding, self.norm, self.head):
            part.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss, its logits made for 1,024 tokens at a time."""
        x = self.embedding(ids).requires_grad_()  # checkpoints pass gradients through what has one
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x, labels = self.norm(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        total = x.new_zeros((), dtype=torch.float32)
        for at in range(0, len(labels), 1024):
            some, right = x[at : at + 1024], labels[at : at + 1024]
            total = total + checkpoint(self.loss, some, right, use_reentrant=False)
        mean: Tensor = total / len(labels)
        return mean

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), labels, reduction="sum")


@torch.no_grad()
def random_codes(experts: MoEExperts) -> None:
    """Codes of a uniform distribution up to 448, scaled to 1/sqrt(fan in)."""
    for name in ("gate_up_proj", "down_proj"):
        w, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        for expert in w:
            values = torch.rand(expert.shape, device=w.device) * 896 - 448
            expert.view(torch.uint8).copy_(values.to(w.dtype).view(torch.uint8))
        scale.fill_(w.shape[-1] ** -0.5 / 448)


def measure(model: Model, ids: Tensor, steps: int) -> dict[str, float]:
    """Seconds per step, tokens per second, and the peak of memory in GiB."""
    cuda = ids.is_cuda
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=cuda)

    def step() -> None:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return {"seconds": seconds, "tokens_per_s": ids.numel() / seconds, "peak_gib": peak}


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    sizes, length = (QUICK, 64) if given.quick else (QWEN3_30B, LENGTH)
    record: Record = {"environment": environment(Limits(device)), "sizes": sizes, "results": []}
    torch.manual_seed(0)
    model = Model(sizes, device)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    record["trained"], record["all"] = trained, sum(p.numel() for p in model.parameters())
    for mode in ("turned", "kept"):
        scope: Any = contextlib.nullcontext()
        for sequences in (1, 2):
            ids = torch.randint(sizes["vocabulary"], (sequences, length), device=device)
            result: Record = {"op": mode, "shape": {"T": ids.numel()}, "variant": "LoRA r 16"}
            result |= {"ms": None, "limit_ms": None, "peers": {}, "bytes": 0, "flops": 0}
            scope = reuse_fp8_weights(model) if mode == "kept" else contextlib.nullcontext()
            try:
                with scope:
                    result |= measure(model, ids, 2 if given.quick else given.steps)
                result["ms"] = 1e3 * result["seconds"]
            except torch.OutOfMemoryError as error:
                result["error"] = str(error).partition(".")[0]
            model.zero_grad()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            record["results"].append(result)
            on_result(result)
    return record


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=5)
    main(arguments, run)
