"""A byte-level decoder: attention from torch, experts from fp8moe_cutlass.nn.MoE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import LossCoefficients, MoE, MoEExperts, Router

BYTES = 256
NEIGHBOURS = 3


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder; hidden and intermediate are multiples of 128."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    intermediate: int = 128
    context: int = 128


def rotary(context: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [context, width / 2] of rotary position embeddings."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angle = torch.arange(context, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last dimension, [..., context, width], in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Linear(nn.Linear):
    """Without a bias. On the CPU in float32 whatever autocast says: where there is no AVX-512,
    torch's bfloat16 takes ten times as long."""

    def __init__(self, inner: int, outer: int, device: torch.device) -> None:
        super().__init__(inner, outer, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


class Attention(nn.Module):
    """Causal self-attention with rotary positions, [B, S, H] -> [B, S, H]."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.hidden, 3 * config.hidden, device)
        self.out = Linear(config.hidden, config.hidden, device)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        cos, sin = rotary(s, h // self.heads, x.device)
        # On the CPU torch's attention is over twice as fast in float32.
        dtype = torch.bfloat16 if x.device.type == "cuda" else torch.float32
        q, k, v = (t.to(dtype) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        with torch.autocast(x.device.type, enabled=False):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, s, h))
        return out


class Block(nn.Module):
    """x + attention, then x + experts, each behind an RMSNorm."""

    def __init__(
        self, config: ModelConfig, recipe: Fp8Recipe | None, device: torch.device, group: Any
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, device=device)
        self.attention = Attention(config, device)
        self.moe_norm = nn.RMSNorm(config.hidden, device=device)
        router = Router(config.hidden, config.experts, config.top_k, group=group, device=device)
        experts = MoEExperts(
            *(config.experts, config.hidden, config.intermediate),
            recipe=recipe,
            group=group,
            dtype=torch.float32,
            device=device,
        )
        self.moe = MoE(router, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.moe(self.moe_norm(x))
        return out


class Decoder(nn.Module):
    """Bytes [B, S] int64 -> logits [B, S, 256]. The ranks of `group` share the experts, and start
    from the same weights if from the same random state."""

    def __init__(
        self,
        config: ModelConfig,
        recipe: Fp8Recipe | None,
        device: torch.device,
        group: Any = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.ModuleList(
            nn.Embedding(BYTES, config.hidden, device=device) for _ in range(NEIGHBOURS)
        )
        self.blocks = nn.ModuleList(
            Block(config, recipe, device, group) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.hidden, device=device)
        self.head = Linear(config.hidden, BYTES, device)
        # What adds to the residual stream starts small, so that depth does not amplify it.
        with torch.no_grad():
            for block in self.layers():
                for weight in (block.attention.out.weight, block.moe.experts.down_proj):
                    weight.mul_((2 * config.layers) ** -0.5)

    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, S, H]: a byte and those before it.

        So attention need not first learn to look one back; training is faster and smoother for it.
        """
        x: Tensor = self.bytes[0](tokens)
        for back in range(1, NEIGHBOURS):
            x = x + self.bytes[back](F.pad(tokens, (back, 0))[:, :-back])
        return x

    def balance(self, coefficient: float) -> None:
        """From now on, backward adds this times the mean of the routers' balancing losses."""
        coefficients = LossCoefficients(balancing=coefficient / len(self.blocks))
        for block in self.layers():
            block.moe.router.coefficients = coefficients

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, seed: int, temperature: float = 0.7) -> bytes:
        """`count` bytes after the prompt, sampled."""
        device = self.head.weight.device
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(count):
            window = torch.tensor([tokens[-self.config.context :]], device=device)
            with torch.autocast(device.type, torch.bfloat16):
                logits = self(window)[0, -1].float().cpu()
            p = torch.softmax(logits / temperature, dim=0)
            tokens.append(int(torch.multinomial(p, 1, generator=generator)))
        return bytes(tokens[len(prompt) :])
