"""A torchtitan model's training step: its own grouped experts in bf16 beside ours.

    python benchmarks/torchtitan_step.py --json FILE [--compiled] [--rowwise]

Four layers of Qwen3-30B-A3B by torchtitan's own model code, without its Trainer: forward, backward
and AdamW on 8192 tokens in bf16. Both models are in one process and take turns. Attention is
torch's own in the place of FlexAttention, which is tuned for minutes. Everything is eager, or each
block compiled (--compiled). --rowwise: torchao's rowwise FP8 experts, by torchtitan's converter, in
the place of ours.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import common
from common import environment
from timing import Limits

OWN, OURS, ROWWISE = "torchtitan bf16", "fp8moe", "torchao rowwise FP8"
ROUNDS, COUNT = 5, 4


class Bench:
    def __init__(self, device: torch.device, quick: bool, compiled: bool) -> None:
        self.device, self.quick, self.compiled = device, quick, compiled
        self.batch, self.length = (1, 64) if quick else (2, 4096)
        from torch.nn.attention.flex_attention import create_block_mask

        sizes = (None, None, self.length, self.length)  # of any batch and head
        self.mask = create_block_mask(lambda b, h, q, k: q >= k, *sizes, str(device))
        plain_attention()

    def build(self, who: str) -> tuple[Any, Any]:
        """The model, every time with the same weights, and its optimizer."""
        from torchtitan.components.quantization import Float8GroupedExpertsConverter
        from torchtitan.models.common.moe import GroupedExperts
        from torchtitan.models.qwen3 import model_registry

        from fp8moe_cutlass.integrations.torchtitan import fp8moe_experts

        rowwise: list[Any] = []
        if who == ROWWISE:
            rowwise.append(Float8GroupedExpertsConverter.Config(model_compile_enabled=True))
        flavor = "debugmodel_moe" if self.quick else "30B-A3B"
        config = model_registry(flavor, converters=rowwise or None).model
        config.layers = config.layers[: 2 if self.quick else 4]
        if who == OURS:
            for _, cfg, parent, name in list(config.traverse(GroupedExperts.Config)):
                setattr(parent, name, fp8moe_experts(cfg))
        with torch.device("meta"):
            model = config.build().bfloat16()
        model.to_empty(device=self.device)
        torch.manual_seed(1)
        with torch.no_grad():
            model.init_weights(buffer_device=self.device)
        if self.compiled:
            for layer in model.layers.values():
                layer.compile(fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.device.type == "cuda")
        return model, optimizer

    def step(self, made: tuple[Any, Any], ids: Tensor) -> float | Tensor:
        model, optimizer = made
        tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        positions = torch.arange(self.length, device=self.device).expand(self.batch, -1)
        out = model(tokens, positions=positions, attention_masks=self.mask)
        loss = F.cross_entropy(out.flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def ids(self, step: int) -> Tensor:
        """What follows a token depends on it."""
        draw = torch.Generator().manual_seed(step)
        noise = torch.randint(4, (self.batch, self.length + 1), generator=draw)
        made = noise.clone()
        for s in range(1, self.length + 1):
            made[:, s] = (5 * made[:, s - 1] + noise[:, s]) % 512
        return made.to(self.device)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def together(self, *who: str) -> list[dict[str, Any]]:
        """A row for each: seconds of a step in turn, after some to warm up; 10 losses before."""
        ids = [self.ids(step) for step in range(10)]
        models = {name: self.build(name) for name in who}
        losses = {
            name: [float(self.step(made, batch)) for batch in ids[: 3 if self.quick else 10]]
            for name, made in models.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in who}
        for _ in range(1 if self.quick else ROUNDS):
            for name, made in models.items():
                self.step(made, ids[0])
                self.sync()
                start = time.perf_counter()
                for batch in ids[:COUNT]:
                    self.step(made, batch)
                self.sync()
                taken[name].append(1e3 * (time.perf_counter() - start) / COUNT)
        tokens = self.batch * self.length
        return [
            {
                "op": "torchtitan step",
                "shape": {"layers": len(models[name][0].layers), "tokens": tokens},
                "variant": "compiled" if self.compiled else "eager",
                "who": name,
                "ms": statistics.median(times),
                "tokens_per_s": 1e3 * tokens / statistics.median(times),
                "limit_ms": None,
                "peers": {},
                "times_own": statistics.median(taken[who[0]]) / statistics.median(times),
                "repeat": {"min": min(times), "max": max(times)},
                "losses": losses[name],
            }
            for name, times in taken.items()
        ]


def plain_attention() -> None:
    from torchtitan.models.common.attention import FlexAttention

    def plain(q: Tensor, k: Tensor, v: Tensor, *, scale: Any, enable_gqa: bool, **_: Any) -> Any:
        how: Any = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(q, k, v, **how), None

    FlexAttention._compiled_flex_attn = staticmethod(plain)


def run(device: torch.device, given: argparse.Namespace, on_result: common.OnResult) -> Any:
    bench = Bench(device, given.quick, given.compiled)
    beside = ROWWISE if given.rowwise else OURS
    rows = bench.together(OWN, beside)
    for row in rows:
        on_result(row)
        print(f"  {row['tokens_per_s']:.0f} tokens/s, {row['times_own']:.3f} times {OWN}")
    gc.collect()
    return {"environment": environment(Limits(device)), "results": rows}


if __name__ == "__main__":
    arguments = common.parser(__doc__)
    arguments.add_argument("--compiled", action="store_true", help="each block by torch.compile")
    arguments.add_argument("--rowwise", action="store_true", help="torchao's in the place of ours")
    common.main(arguments, run)
