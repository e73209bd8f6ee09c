"""The language models that quality.py trains, and the arms: what FP8 does in them.

Weights are float32, and everything but the experts runs under autocast in bfloat16, as plain
PyTorch training on one GPU does: the optimizer's float32 master weights are the parameters
themselves, and each forward rounds them to bfloat16 or quantizes them. The residual stream, the
norms, the router and the loss are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import MoE, MoEExperts, Router, RoutingRule
from fp8moe_cutlass.nn.moe import SharedExpert
from quality_experts import OtherWgrad, Wgrad

MASTER: Any = {"dtype": torch.float32}
FLOAT32_SCALES = Fp8Recipe(scale="fp32", columns="column")


class Arm(NamedTuple):
    """What an arm's experts do."""

    about: str
    recipe: Fp8Recipe | None = Fp8Recipe()
    wgrad: Wgrad | None = None  # of OtherWgrad
    edges: bool = False  # the first and the last layer's experts in bf16
    nudge: bool = False  # one weight differs by its last bit as bfloat16


ARMS = {
    "bf16": Arm("bfloat16", None),
    "fp8": Arm("FP8 as it ships"),
    "e5m2": Arm("gradients in E5M2", Fp8Recipe(grad_dtype="e5m2")),
    "float32-scales": Arm("float32 scales, 1x128 columns", FLOAT32_SCALES),
    "bf16-wgrad": Arm("weight gradients in bf16 of dequantized rows", wgrad="bf16"),
    "bf16-edges": Arm("experts of the first and last layer in bf16", edges=True),
    "double": Arm("double quantization, float32 scales", FLOAT32_SCALES, "double"),
    "output": Arm("routing weights at the sum over slots", Fp8Recipe(weighting="output")),
    "vllm": Arm("the forward of vLLM", Fp8Recipe.rollout("vllm")),
    "sglang": Arm("the forward of SGLang", Fp8Recipe.rollout("sglang")),
    "noise": Arm("bf16, one weight's last bit changed", None, nudge=True),
}


@dataclass(frozen=True)
class Config:
    """Sizes of a model and how it is trained. hidden and intermediate are multiples of 128."""

    experts: int = 64
    top_k: int = 8
    intermediate: int = 256  # of each expert, and of the shared one
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    context: int = 1024
    batch: int = 32  # sequences per step
    lr: float = 6e-4
    warmup: float = 0.05  # share of the steps in which the learning rate rises linearly
    cooldown: float = 0.25  # share, the last, in which it falls linearly to 0; constant between
    weight_decay: float = 0.1  # of matrices
    bias_rate: float = 1e-3  # of the routers' selection biases, per step
    evaluations: int = 40


MODELS = {
    "fine": Config(),
    "coarse": Config(8, 2, 3072),
    "small": Config(32, 4, 256, 6, 512, 8, 256, evaluations=4),
    "tiny": Config(8, 2, 128, 3, 128, 2, 32, batch=4, evaluations=3),
}


class Norm(nn.RMSNorm):
    """RMSNorm in float32, given out in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).bfloat16()


class Attention(nn.Module):
    """Causal self-attention with rotary positions, [B, S, H] -> [B, S, H]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.hidden, 3 * c.hidden, bias=False)
        self.out = nn.Linear(c.hidden, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, s, h))
        return out


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of [B, heads, S, D]."""
    s, d = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, d, 2, device=x.device) / d)
    angle = torch.arange(s, device=x.device)[:, None] * frequency
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Block(nn.Module):
    """x + attention, then x + experts, each behind a norm."""

    def __init__(self, c: Config, arm: Arm, edge: bool) -> None:
        super().__init__()
        self.attention_norm = Norm(c.hidden)
        self.attention = Attention(c)
        self.moe_norm = Norm(c.hidden)
        rule = RoutingRule(score="sigmoid", selection_bias=True)
        router = Router(c.hidden, c.experts, c.top_k, rule)
        shared = SharedExpert(c.hidden, c.intermediate, dtype=torch.float32)
        sizes, options = (c.experts, c.hidden, c.intermediate), MASTER
        experts: MoEExperts
        if arm.wgrad is None:
            recipe = None if arm.edges and edge else arm.recipe
            experts = MoEExperts(*sizes, recipe=recipe, **options)
        else:
            experts = OtherWgrad(*sizes, wgrad=arm.wgrad, recipe=arm.recipe, **options)
        self.moe = MoE(router, experts, shared)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, H] -> x, the tokens of each expert [E] and the experts of each token [T, k]."""
        x = x + self.attention(self.attention_norm(x))
        out, routing = self.moe(self.moe_norm(x), return_routing=True)
        return x + out, routing.tokens_per_expert, routing.topk_idx


class Decoder(nn.Module):
    """Tokens [B, S] int64 -> hidden states [B, S, H] for `loss_of`, and the layers' routing."""

    def __init__(self, c: Config, arm: Arm, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, c.hidden)
        edges = 0, c.layers - 1
        self.blocks = nn.ModuleList(Block(c, arm, n in edges) for n in range(c.layers))
        self.norm = Norm(c.hidden)
        self.head = nn.Linear(c.hidden, vocabulary, bias=False)
        self._reset(c)

    @torch.no_grad()
    def _reset(self, c: Config) -> None:
        """Normal with deviation 0.02, but for the experts' and routers' own; what adds to the
        residual stream starts small."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.layers():
            for weight in (
                block.attention.out.weight,
                block.moe.shared_expert.down_proj.weight,
                block.moe.experts.down_proj,
            ):
                weight.mul_((2 * c.layers) ** -0.5)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        x = self.embedding(tokens)
        counts, choices = [], []
        for block in self.layers():
            x, count, choice = block(x)
            counts.append(count)
            choices.append(choice)
        return self.norm(x), counts, choices

    def layers(self) -> Iterator[Any]:
        """The blocks: their modules have types of their own."""
        yield from self.blocks

    def nudge(self) -> None:
        """Changes the last bit that bfloat16 has of one weight."""
        weight: Tensor = next(self.layers()).attention.qkv.weight
        weight.detach().view(torch.int32)[0, 0] ^= 1 << 16


def made(c: Config, arm: Arm, vocabulary: int, seed: int, device: torch.device) -> Decoder:
    """The model as it starts: the same weights for every arm of a seed."""
    torch.manual_seed(seed)
    with torch.device(device):
        return Decoder(c, arm, vocabulary)


def loss_of(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token, nats."""
    logits = F.linear(hidden, head)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def groups(model: nn.Module, c: Config) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay, norms do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": c.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


def learning_rate(c: Config, step: int, steps: int) -> float:
    """Linear warm-up, constant, linear cooldown to 0: behind the last step it would be 0."""
    up, down = (step + 1) / (c.warmup * steps), (steps - step) / (c.cooldown * steps)
    return c.lr * min(1.0, up, down)
