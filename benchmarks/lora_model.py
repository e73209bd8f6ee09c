"""LoRA on attention and all experts of a whole model, over FP8 or bf16 experts.

Layers of Qwen3-30B's or Qwen3-235B's sizes with random weights, frozen, LoRA r 16 on attention and
experts, each layer checkpointed, AdamW on the adapters. A step is forward, backward and the
optimizer's. One GPU; --ranks N shares FP8 experts by group=, and each rank has tokens of its own.

"turned", "kept": FP8 experts by MoEExperts.add_lora, all else in bf16. "turned" makes dgrad's codes
in each backward, "kept" holds them (reuse_fp8_weights): a byte per parameter more. "bf16, PEFT":
experts in bf16 by torch's grouped_mm, LoRA by PEFT's target_parameters. "bf16, attention": no LoRA
on those experts. What does not fit runs with half the layers, and FP8 beside it once more; "layers"
says how many ran. --layers N runs so many, or fails. --compile compiles each layer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common import OnResult, Record, environment, ignore, parser, show, write
from fp8moe_cutlass.nn import MoE, MoEExperts, Router, reuse_fp8_weights
from launch import processes
from timing import Limits
from torch_experts import TorchExperts

QWEN3_30B = {"layers": 48, "hidden": 2048, "inner": 768, "experts": 128, "top_k": 8}
QWEN3_30B |= {"heads": 32, "kv_heads": 4, "head": 128, "vocabulary": 151_936}
QWEN3_235B = QWEN3_30B | {"layers": 94, "hidden": 4096, "inner": 1536, "heads": 64}
MODELS = {"qwen3-30b": QWEN3_30B, "qwen3-235b": QWEN3_235B}
QUICK = {"layers": 2, "hidden": 256, "inner": 128, "experts": 4, "top_k": 2}
QUICK |= {"heads": 4, "kv_heads": 2, "head": 64, "vocabulary": 512}
LENGTH, RANK = 4096, 16
FP8 = ("turned", "kept")
MODES = (*FP8, "bf16, PEFT", "bf16, attention")


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


class Bf16Experts(nn.Module):
    """torch's experts, with the sizes that MoE asks for: PEFT wraps what they lie in."""

    def __init__(self, layer: MoEExperts) -> None:
        super().__init__()
        self.torch = TorchExperts(layer)
        self.num_experts, self.hidden_size = layer.num_experts, layer.hidden_size

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor, **others: Any) -> Tensor:
        out: Tensor = self.torch(x, topk_idx, probs)
        return out


class Layer(nn.Module):
    def __init__(self, sizes: dict[str, int], device: torch.device, fp8: bool) -> None:
        super().__init__()
        hidden, head = sizes["hidden"], sizes["head"]
        self.shapes = [sizes["heads"], sizes["kv_heads"], sizes["kv_heads"]]
        self.head = head
        made: Any = {"device": device, "dtype": torch.bfloat16}
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, **made) for _ in range(2))
        self.qkv = nn.ModuleList(LoraLinear(hidden, n * head, device) for n in self.shapes)
        self.out = LoraLinear(sizes["heads"] * head, hidden, device)
        how: Any = {"dtype": torch.float8_e4m3fn if fp8 else torch.bfloat16, "device": device}
        if dist.is_initialized():
            how["group"] = dist.group.WORLD
        experts: Any = MoEExperts(sizes["experts"], hidden, sizes["inner"], **how)
        if fp8:
            random_codes(experts)
            experts.add_lora(RANK, alpha=2 * RANK)
        else:
            experts = Bf16Experts(experts.requires_grad_(False))
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
    def __init__(self, sizes: dict[str, int], layers: int, device: torch.device, fp8: bool) -> None:
        super().__init__()
        made: Any = {"device": device, "dtype": torch.bfloat16}
        self.embedding = nn.Embedding(sizes["vocabulary"], sizes["hidden"], **made)
        self.layers = nn.ModuleList(Layer(sizes, device, fp8) for _ in range(layers))
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


def average(model: Model) -> None:
    """Gradients over the ranks: experts' have seen the tokens of all, others' see them here."""
    experts = {p for m in model.modules() if isinstance(m, MoEExperts) for p in m.parameters()}
    found = [(p not in experts, p.grad) for p in model.parameters() if p.grad is not None]
    others = [grad for mine, grad in found if mine]
    flat: Any = torch.cat([grad.flatten() for grad in others])
    dist.all_reduce(flat)
    parts = flat.split([grad.numel() for grad in others])
    torch._foreach_copy_(others, [a.view_as(b) for a, b in zip(parts, others, strict=True)])
    torch._foreach_div_([grad for _, grad in found], dist.get_world_size())


def measure(model: Model, ids: Tensor, steps: int) -> dict[str, float]:
    """Seconds per step, tokens of a rank per second, and the peak of its memory in GiB."""
    cuda = ids.is_cuda
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=cuda)

    def step() -> None:
        loss = model(ids)
        loss.backward()
        if dist.is_initialized():
            average(model)
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


def pefts_lora(model: Model) -> None:
    """LoRA on the experts by PEFT itself, in bf16, as that on attention."""
    import peft  # type: ignore[import-not-found, unused-ignore]

    targets = ["experts.torch.gate_up_proj", "experts.torch.down_proj"]
    given: Any = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": []}
    peft.inject_adapter_in_model(peft.LoraConfig(target_parameters=targets, **given), model)
    for name, p in model.named_parameters():
        if "lora_" in name:  # those on attention, too, which PEFT has frozen
            p.data = p.data.bfloat16()
            p.requires_grad_()


def run_mode(mode: str, tokens: tuple[int, ...], given: Any, device: torch.device) -> list[Record]:
    """A row per number of tokens; raises where the first does not fit."""
    sizes = QUICK if given.quick else MODELS[given.model]
    torch.manual_seed(0)  # the same on all ranks
    model = Model(sizes, given.layers, device, fp8=mode in FP8)
    torch.manual_seed(1 + rank())  # tokens of its own
    if mode == "bf16, PEFT":
        pefts_lora(model)
    if given.compile:
        for layer in model.layers:
            layer.compile()
    rows: list[Record] = []
    for count in tokens:
        ids = torch.randint(sizes["vocabulary"], (1, count), device=device)
        ids = ids.view(-1, 64 if given.quick else LENGTH)
        result: Record = {"op": mode, "shape": {"T": count}, "variant": f"LoRA r {RANK}"}
        result |= {"ms": None, "limit_ms": None, "peers": {}, "bytes": 0, "flops": 0}
        result |= {"layers": given.layers, "compiled": given.compile}
        result["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        try:
            with reuse_fp8_weights(model) if mode == "kept" else contextlib.nullcontext():
                result |= measure(model, ids, 2 if given.quick else given.steps)
            result["ms"] = 1e3 * result["seconds"]
        except torch.OutOfMemoryError as error:
            if not rows:
                raise
            result["error"] = str(error).partition(".")[0]
        model.zero_grad()
        rows.append(result)
    return rows


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    sizes = QUICK if given.quick else MODELS[given.model]
    tokens = (64, 128) if given.quick else tuple(given.tokens)
    record: Record = {"environment": environment(Limits(device)), "sizes": sizes, "results": []}
    record["environment"]["ranks"] = given.ranks
    modes, asked = given.mode or MODES, given.layers
    fewer: set[int] = set()  # layers that bf16 had to run with

    def add(mode: str, layers: int, may_halve: bool) -> None:
        rows: Any = None
        given.layers = layers
        while rows is None:
            try:
                rows = run_mode(mode, tokens, given, device)
            except torch.OutOfMemoryError:
                if not may_halve:
                    raise
                given.layers //= 2
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if given.layers < layers:
            fewer.add(given.layers)
        record["results"] += rows
        for row in rows:
            on_result(row)
        if rank() == 0:
            write(record, given.json)

    for mode in modes:
        add(mode, asked or sizes["layers"], not asked)
    for layers in sorted(fewer):
        for mode in (mode for mode in modes if mode in FP8):
            add(mode, layers, False)
    return record


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--mode", choices=MODES, action="append")
    arguments.add_argument("--model", choices=MODELS, default="qwen3-30b")
    arguments.add_argument("--tokens", type=int, nargs="+", default=[LENGTH, 2 * LENGTH])
    arguments.add_argument("--compile", action="store_true", help="each layer by torch.compile")
    arguments.add_argument("--layers", type=int, help="so many, or fail")
    arguments.add_argument("--ranks", type=int, default=1, help="processes that share the experts")
    given = arguments.parse_args()
    if given.ranks == 1:
        run(torch.device(given.device), given, show)
        return
    if not {*(given.mode or MODES)} <= {*FP8}:
        arguments.error("--ranks shares FP8 experts: --mode turned or kept")
    with processes(given.ranks, torch.device(given.device)) as device:
        run(device, given, ignore if rank() else show)


if __name__ == "__main__":
    main()
