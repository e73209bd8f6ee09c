"""The models of transformers_recipe.py, and one step of theirs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A model's configuration and its optimizer."""

    name: str
    model: str
    config: dict[str, Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    lora: bool = False  # on the attention, everything else frozen
    kind: str = "Qwen3Moe"
    attention: str = "sdpa"
    rows: int = 4  # sequences


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def sizes(layers: int, hidden: int, intermediate: int, experts: int) -> dict[str, Any]:
    return {
        "vocab_size": 32000,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "norm_topk_prob": True,
    }


QWEN = Case("qwen3-30b", "six layers of Qwen3-30B", sizes(6, 2048, 768, 128), adamw)
V3 = Case(
    "deepseek-v3-sizes",
    "two layers of DeepSeek-V3's sizes, 64 experts, in Qwen3-MoE",
    sizes(2, 7168, 2048, 64),
    sgd,
)
GPT_OSS = Case(
    "gpt-oss",
    "four layers of GPT-OSS-20B, vocabulary 32,000",
    sizes(4, 2880, 2880, 32)
    | {"num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8}
    | {"head_dim": 64},
    adamw,
    kind="GptOss",
    attention="eager",  # sdpa has no sinks, and flex_attention compiles for a minute
    rows=16,
)
TINY = sizes(2, 128, 64, 8) | {"vocab_size": 256, "num_experts_per_tok": 2}
TINY |= {"num_attention_heads": 4, "head_dim": 32}


@torch.no_grad()
def initialize(model: torch.nn.Module) -> None:
    """Random weights by which tokens spread over the experts, as they do in a trained model.

    Were all of deviation 0.02, attention's mean over the tokens would outgrow the tokens' own part,
    and nearly all would choose the same experts from the second layer on.
    """
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    for name, p in model.named_parameters():
        deviation = 1.0 if p is embeddings.weight else 0.005 if "o_proj" in name else 0.02
        p.fill_(1.0) if p.ndim == 1 else p.normal_(0.0, deviation)


class Bench:
    """A model with its optimizer and tokens [rows, T / rows]."""

    def __init__(
        self, case: Case, tokens: int, device: torch.device, done: Callable[[Any], None]
    ) -> None:
        self.case, self.device, self.done = case, device, done
        config = getattr(transformers, f"{case.kind}Config")(**case.config)
        self.shape = {"T": tokens, "H": config.hidden_size, "layers": config.num_hidden_layers}
        of: Any = getattr(transformers, f"{case.kind}ForCausalLM")
        with torch.device(device):
            self.model: Any = of._from_config(config, dtype=torch.bfloat16).train()
        self.ids = torch.randint(config.vocab_size, (case.rows, tokens // case.rows), device=device)
        self.start()

    def start(self) -> None:
        """The same parameters and a new optimizer each time."""
        self.optimizer: Any = None
        self.tidy()
        torch.manual_seed(0)
        self.model.zero_grad()
        initialize(self.model)
        self.optimizer = self.case.optimizer(self.model.parameters())

    def step(self) -> Tensor:
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        detached: Tensor = loss.detach()
        return detached

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def peak(self, run: Callable[[], Any]) -> float:
        """GiB at the most during a call, parameters and optimizer included."""
        if self.device.type != "cuda":
            return 0.0
        self.tidy()
        torch.cuda.reset_peak_memory_stats()
        run()
        self.wait()
        return torch.cuda.max_memory_allocated() / 2**30
