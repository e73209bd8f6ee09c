"""What transformers_recipe.py compares: the pieces of a faster step, and which go together."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import transformers_step as steps

BF16, OURS = "grouped_mm", "fp8moe"
# What a variant has over Hugging Face's default.
LAYERS, LOSS, GRAPH = "layers", "loss", "graph"
HEAD, DENSE = "head FP8", "dense FP8"  # torchao's linears
ADAMW, STATES, BACKWARD = "AdamW compiled", "AdamW FP8", "SGD in backward"  # optimizers
QWEN, V3 = steps.QWEN, steps.V3
LARGE = replace(
    QWEN,
    name="qwen3-30b-vocabulary",
    model=QWEN.model + ", vocabulary 151,936",
    config=QWEN.config | {"vocab_size": 151936},
)
LORA = replace(QWEN, name="qwen3-30b-lora", model=QWEN.model + ", LoRA on the attention", lora=True)
CASES = [QWEN, LARGE, V3, LORA, steps.GPT_OSS]
Pieces = tuple[str, ...]


def variants_of(case: steps.Case) -> list[Pieces]:
    compiled, adamw = (LAYERS, LOSS), (LAYERS, LOSS, ADAMW)
    if case.lora:
        found = [(), compiled]
    elif case.kind == "GptOss":
        found = advised(case)
    elif case is V3:
        sgd, fp8 = (*compiled, BACKWARD), (*compiled, BACKWARD, HEAD, DENSE)
        found = [(), compiled, sgd, (*sgd, GRAPH), (*sgd, HEAD), fp8, (*fp8, GRAPH)]
    elif case is LARGE:
        found = [(), compiled, adamw, (*adamw, GRAPH), (*adamw, HEAD), (*adamw, HEAD, GRAPH)]
    else:
        found = [(), (LAYERS,), (LOSS,), (ADAMW,), compiled, adamw, (*adamw, GRAPH)]
        found += [(*adamw, HEAD), (*adamw, DENSE), (*compiled, STATES)]
    if importlib.util.find_spec("torchao") is None:
        found = [pieces for pieces in found if not {HEAD, DENSE, STATES} & {*pieces}]
    return found


def advised(case: steps.Case) -> list[Pieces]:
    """What docs/how-to/hugging-face.md has of a case."""
    if case.lora:
        return [(), (LAYERS, LOSS)]
    if case.kind == "GptOss":
        return [(), (LAYERS, LOSS, ADAMW)]
    fast = (LAYERS, LOSS, BACKWARD if case is V3 else ADAMW)
    found: list[Pieces] = [(), (LAYERS, LOSS), fast, (*fast, GRAPH)]
    return [found[0], *found[2:]] if case is LARGE else found


def name_of(experts: str, pieces: Pieces) -> str:
    return f"{experts}: {' + '.join(pieces) or 'default'}"


def no_mask(
    *, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **_: Any
) -> None:
    """transformers' own would read whether the batch needs a mask, which a capture forbids, and
    makes one then. So a captured step takes full sequences; others are refused while it warms up.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if attention_mask is not None or not (allow_is_causal_skip or capturing):
        raise ValueError(f"[{FULL}] batches must be full sequences; got padded or packed ones")


FULL = "full batches"
AttentionInterface.register(FULL, sdpa_attention_forward)
AttentionMaskInterface.register(FULL, no_mask)


def fp8_linear(module: torch.nn.Linear, device: torch.device) -> torch.nn.Module:
    """torchao's, over the same weight."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    if device.type == "cpu":
        config = replace(config, emulate=True)
    made: torch.nn.Module = Float8Linear.from_float(module, config)
    return made


class CompiledAdamW(torch.optim.AdamW):
    @torch.compile
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def compiled_adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    device = parameters[0].device
    lr = torch.tensor(1e-4, device=device)
    return CompiledAdamW(parameters, lr=lr, capturable=device.type == "cuda")


def fp8_states(parameters: list[Any]) -> torch.optim.Optimizer:
    from torchao.optim import AdamWFp8

    made: torch.optim.Optimizer = AdamWFp8(parameters, lr=1e-4)
    return made


class SgdInBackward:
    """Updates a weight as soon as its gradient is there, and frees the gradient."""

    def __init__(self, parameters: list[Any]) -> None:
        self.hooks = [p.register_post_accumulate_grad_hook(self.update) for p in parameters]

    @torch.no_grad()
    def update(self, p: Any) -> None:
        p.add_(p.grad, alpha=-1e-3)
        p.grad = None

    def step(self) -> None:
        """Done already."""

    zero_grad = step

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()


OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    ADAMW: compiled_adamw,
    STATES: fp8_states,
    BACKWARD: SgdInBackward,
}


def tokens(count: int, shape: torch.Size, vocabulary: int) -> Tensor:
    """[count, *shape]: each token follows from the one before it, or in one of four is random."""
    chosen = torch.Generator().manual_seed(1)
    following = torch.randperm(vocabulary, generator=chosen)
    # Of few tokens, so that some hundred steps learn what follows.
    random = torch.randint(vocabulary // 16, (count, *shape), generator=chosen)
    free = torch.rand(count, *shape, generator=chosen) < 0.25
    made = random.clone()
    for at in range(1, shape[1]):
        follows = following[made[..., at - 1]] % (vocabulary // 16)
        made[..., at] = torch.where(free[..., at], random[..., at], follows)
    return made
