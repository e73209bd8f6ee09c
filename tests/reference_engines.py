"""What SGLang and vLLM compute in a block-FP8 MoE layer on Hopper, step by step in plain torch.

Rules, read from sglang 0.5.23 and vllm 0.33.0 (docs/reference/numerics.md names the files); no code
of theirs. Nothing here uses the library.
"""

from __future__ import annotations

import torch
from torch import Tensor

F32 = torch.float32


# ---- the routers --------------------------------------------------------------------------------


def best(values: Tensor, count: int) -> Tensor:
    """Indices [T, count] of the largest of values [T, E]; of equal ones the lower comes first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def route_deepseek_v3(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, open_groups: int, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Ids and weights of logits [T, E] f32 and bias [E] f32, as FlashInfer's and vLLM's kernels
    choose; where theirs approximates tanh, torch's is exact."""
    scores = 0.5 * torch.tanh(0.5 * logits) + 0.5
    compared = scores + bias
    by_group = compared.view(len(logits), groups, -1)
    two = by_group.gather(2, torch.sort(by_group, dim=2, descending=True).indices[..., :2])
    is_open = torch.zeros(len(logits), groups, dtype=torch.bool)
    is_open.scatter_(1, best(two.sum(2), open_groups), True)
    ids = best(by_group.masked_fill(~is_open[..., None], -torch.inf).flatten(1), top_k)
    chosen = scores.gather(1, ids)
    scaled = (chosen * factor).double()
    return ids, (scaled / (chosen.double().sum(1, keepdim=True) + 1e-20)).float()


def route_qwen3(logits: Tensor, top_k: int, engine: str) -> tuple[Tensor, Tensor]:
    """Ids and weights of logits [T, E] f32: SGLang divides, vLLM multiplies by reciprocals."""
    e = torch.exp(logits - logits.max(1, keepdim=True).values)
    total = e.sum(1, keepdim=True)
    p = e / total if engine == "sglang" else e * (1 / total)
    ids = best(p, top_k)
    chosen = p.gather(1, ids)
    total = torch.zeros_like(chosen[:, 0])
    for s in range(top_k):
        total = total + chosen[:, s]
    return ids, (chosen / total[:, None] if engine == "sglang" else chosen * (1 / total)[:, None])
