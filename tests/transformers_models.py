"""Tiny transformers models with random weights, and errors between what they compute."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fp8moe_cutlass.autograd import fp8
from fp8moe_cutlass.nn import expert_block

H, I, E = 128, 96, 8
# Each config class has its own names for the same sizes: extra ones are kept and unused.
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": H,
    "intermediate_size": I,
    "moe_intermediate_size": I,
    "shared_expert_intermediate_size": I,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {  # of multi-head latent attention
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {},
    "Mixtral": {},
    "DeepseekV3": LATENT,
    "Glm4Moe": {},
    "MiniMaxM2": {},
    "Olmoe": {},
    "DeepseekV2": LATENT,
    "Qwen2Moe": {},
    "GraniteMoe": {},
    "Dots1": {},
}


def model_of(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> Any:
    """A CausalLM of the kind, in training mode."""
    of: Any = getattr(transformers, f"{kind}Config")
    torch.manual_seed(seed)
    built = of(**SIZES | KINDS.get(kind, {}) | config)
    built._experts_implementation = "eager"
    return getattr(transformers, f"{kind}ForCausalLM")(built).to(dtype).train()


def tokens(rows: int = 2, length: int = 32, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (rows, length), generator=g)


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Every module with a gate_up_proj, by its name."""
    return {n: m for n, m in model.named_modules() if hasattr(m, "gate_up_proj")}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of every experts' parameter after one backward of the loss; the model's are cleared."""
    model.zero_grad()
    ids = tokens().to(next(model.parameters()).device)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    made = {
        f"{name}.{w}": getattr(m, w).grad
        for name, m in experts_of(model).items()
        for w in ("gate_up_proj", "down_proj")
    }
    model.zero_grad()
    return made


@torch.no_grad()
def exchange_gate_and_up(model: nn.Module) -> None:
    """The wrong function that losses do not show."""
    for m in experts_of(model).values():
        m.gate_up_proj.copy_(m.gate_up_proj.roll(m.gate_up_proj.shape[1] // 2, dims=1))


def error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def experts_classes() -> dict[str, Any]:
    """Every class of the installed transformers that an experts implementation can compute, by its
    name: a module that its own configuration's defaults make, on the meta device."""
    found = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "@use_experts_implementation" not in file.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        configs = [c for c in vars(module).values() if _is(c, transformers.PreTrainedConfig)]
        for cls in [c for c in vars(module).values() if _is(c, nn.Module)]:
            if cls.__module__ == module.__name__ and hasattr(cls, "_apply_gate"):
                found[cls.__name__] = _module(cls, configs)
    return found


def _is(thing: Any, base: type) -> bool:
    return isinstance(thing, type) and issubclass(thing, base)


def _module(cls: type, configs: list[Any]) -> Any:
    sizes = {"num_experts": 8, "n_routed_experts": 8, "moe_intermediate_size": 64}
    ways = (lambda of: of(), lambda of: of().get_text_config(), lambda of: of(**sizes))
    more: tuple[Any, ...] = ((), (64,))  # Ernie's takes an intermediate size
    for make, given, of in itertools.product(ways, more, configs):
        try:
            with torch.device("meta"):
                made = cls(make(of), *given)
        except Exception:  # the configuration of another module, or a size is None
            continue
        return made
    raise AssertionError(f"no configuration makes {cls.__name__}")


def count_quantizations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[how many layers' weights have been quantized], which goes on counting."""
    count = [0]
    of_a_forward, by_request = fp8.weights, expert_block.quantize_weights

    def in_a_forward(gate_up: Any, down: Any, given: Any, *how: Any) -> Any:
        count[0] += given is None
        return of_a_forward(gate_up, down, given, *how)

    def requested(*given: Any, **how: Any) -> Any:
        count[0] += 1
        return by_request(*given, **how)

    monkeypatch.setattr(fp8, "weights", in_a_forward)
    monkeypatch.setattr(expert_block, "quantize_weights", requested)
    return count
