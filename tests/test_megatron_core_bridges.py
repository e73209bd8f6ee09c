"""mbridge, by which RL stacks load a Megatron model from Hugging Face and write it back, with ours.

Skipped without megatron-core and mbridge; .ci/run has a step for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")
pytest.importorskip("mbridge")

import megatron_cpu as mc
import ranks

pytestmark = pytest.mark.slow

pool = ranks.pool(2, preload=("megatron_cpu",))

SIZES = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 256, "intermediate_size": 256}
SIZES |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


def _there_and_back(ep: int, source: str, target: str) -> None:
    from mbridge import AutoBridge
    from mbridge.models.qwen3moe import Qwen3MoEBridge
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from fp8moe_cutlass.integrations.megatron import swap

    class Bridge(Qwen3MoEBridge):  # type: ignore[misc]
        """With the norm's name of a spec without TransformerEngine."""

        def _weight_name_mapping_mcore_to_hf(self, name: str) -> Any:
            if name.endswith(".input_layernorm.weight"):
                return [f"model.{name.removeprefix('decoder.')}"]
            return super()._weight_name_mapping_mcore_to_hf(name)

    mc.parallel(ep)
    hf = AutoBridge.from_pretrained(source).hf_config
    config = mc.config(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        moe_ffn_hidden_size=hf.moe_intermediate_size,
        num_moe_experts=hf.num_experts,
        normalization="RMSNorm",
        qk_layernorm=True,
        expert_model_parallel_size=ep,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=hf.num_experts, qk_layernorm=True, normalization="RMSNorm"
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=swap(spec),
        vocab_size=hf.vocab_size,
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).bfloat16()
    bridge = Bridge(hf)
    bridge.load_weights([model], source)
    bridge.save_weights([model], target)


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


@pytest.mark.parametrize("ep", [1, 2])
def test_there_and_back(pool: ranks.Pool, ep: int, tmp_path: Path) -> None:
    """Byte for byte."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, tie_word_embeddings=False))
    model.bfloat16().save_pretrained(tmp_path / "hf")
    mc.on_two(pool, _there_and_back, ep, str(tmp_path / "hf"), str(tmp_path / "back"))
    want, got = _tensors(tmp_path / "hf"), _tensors(tmp_path / "back")
    assert len(want) == 69
    assert got.keys() == want.keys()
    assert all(torch.equal(got[k].view(torch.int16), t.view(torch.int16)) for k, t in want.items())
