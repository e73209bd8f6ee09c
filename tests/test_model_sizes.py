"""benchmarks/layer.py CONFIG: what it reads from the config.json of every model type, and says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import model_layer
from common import parser
from fp8moe_cutlass.nn.published import _REFUSED, _RULES
from model_layer import BF16, QUANTIZING, REUSING, Way
from model_sizes import Sizes, of_config
from test_benchmarks import script
from test_model_types import PAGE
from transformers_models import LATENT, SIZES, E, H, I

pytestmark = pytest.mark.slow

# What else a type's config.json has to say.
MORE: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {
        "architectures": ["DeepseekOcr2ForConditionalGeneration"],
        "text_config": {"mlp_layer_types": ["sparse", "sparse"]},
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "layer_types": ["full_attention"] * 2,
    },
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0},
    "qwen3_omni_moe": {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "enable_audio_output": False,
    },
    "zaya": {"num_experts_per_tok": 1},
}
LATENTS = ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "mistral4")
# Parts of a model, which have no config.json of their own and which AutoModel does not make.
PARTS = {
    *("deepseek_ocr2_text", "diffusion_gemma_text", "ernie4_5_vl_moe_text", "step3p5"),
    *("qwen3_omni_moe_talker_text", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker"),
}
# Refused types whose configs at these sizes transformers 5.17 cannot make, or has no experts in.
NOT_MADE = {"aria", "dbrx", "diffusion_gemma", "gemma4", "glm5_next", "glm5_next_text", "step3p7"}


def rows() -> dict[str, str]:
    """{model type: "yes", "by `swap`" or "no: reason"} of docs/reference/model-types.md."""
    found = {}
    for line in re.findall(r"^\| (`.*) \|$", PAGE.read_text(), re.MULTILINE):
        types, _, runs, _ = line.split(" | ")
        found |= dict.fromkeys(types.replace("`", "").split(", "), runs)
    return found


def config(model_type: str, folder: Path, **more: Any) -> Path:
    """A config.json of the type, of the sizes H, I, E, and 2 of the experts per token."""
    latent = LATENT if model_type in LATENTS else {}
    sizes = {**SIZES, **latent, **more}
    parts = CONFIG_MAPPING[model_type].sub_configs if model_type in CONFIG_MAPPING else {}
    extra = dict(MORE.get(model_type, {}))
    if "thinker_config" in parts:
        given = {"thinker_config": {"text_config": sizes}}
    elif "text_config" in parts:
        given = {"text_config": sizes | extra.pop("text_config", {})}
    else:
        given = sizes
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **given, **extra}))
    return path


@pytest.mark.parametrize("model_type", sorted({*rows()} - PARTS - NOT_MADE - {"ernie4_5_vl_moe"}))
def test_sizes_or_the_reason_of_every_model_type(model_type: str, tmp_path: Path) -> None:
    path = config(model_type, tmp_path)
    runs = rows()[model_type]
    if runs != "yes":
        reason = "swap alone takes it" if runs == "by `swap`" else runs.removeprefix("no: ")
        with pytest.raises(ValueError, match=re.escape(reason)) as raised:
            of_config(path)
        assert str(raised.value).startswith(f"[layer] experts of {model_type} cannot run in FP8: ")
        return
    top_k = MORE.get(model_type, {}).get("num_experts_per_tok", 2)
    found = of_config(path)
    assert found[:4] == (E, H, I, top_k)
    assert found.kind == model_type
    assert found.layers in (1, 2)
    others: tuple[str, ...] = ("deepseek_v4", "gemma4", "hy_v4", "minimax_m3", "nemotron_h")
    others += "gpt_oss", "openai_privacy"
    assert bool(found.note) == model_type.startswith(("inkling", *others))
    assert ("Timed with SwiGLU" in found.note) == model_type.startswith(others)


def test_every_router_is_of_a_type_that_is_read() -> None:
    assert ({*_RULES} | {*_REFUSED}) - {*rows()} == {"kimi_k2"}


def test_a_type_that_transformers_does_not_know(tmp_path: Path) -> None:
    given = {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}
    found = of_config(config("kimi_k2", tmp_path, **given))
    assert found[:5] == (E, H, I, 2, 1)
    assert "not in transformers" in found.note
    with pytest.raises(ValueError, match=r"\[layer\] config must be .* got 'gpt_none' .*--sizes"):
        of_config(config("gpt_none", tmp_path))


def test_what_else_it_says(tmp_path: Path) -> None:
    """Two kinds of layers, a quantized checkpoint, a model without experts, a part of a model."""
    path = tmp_path / "config.json"
    two = {"model_type": "ernie4_5_vl_moe", "quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(two))
    found = of_config(tmp_path)
    assert found[:5] == (64, 2560, 1536, 6, 27)
    assert "Not timed: 27 layers of E, H, I, k = (64, 2560, 512, 6)." in found.note
    assert "quantized" in found.note
    path.write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 1}))
    with pytest.raises(
        ValueError, match=r"\[layer\] config must be of a model with experts; got qwen3"
    ):
        of_config(path)
    with pytest.raises(ValueError, match=r"must build the whole model .*: give --sizes$"):
        of_config(config("qwen3_omni_moe_text", tmp_path))


# ---- measuring ----------------------------------------------------------------------------------


def test_a_table_and_what_to_expect(tmp_path: Path) -> None:
    path = config("qwen3_moe", tmp_path)
    printed = script("layer", path, "--tokens", 64, "--experts", 4, "--device", "cpu")
    head, tokens, _, columns, *table, _, last = printed.splitlines()
    assert head == f"qwen3_moe: 4 experts, hidden size {H}, intermediate size {I}, top-2"
    assert tokens.startswith("64 tokens, 32 per expert; CPU")
    assert columns.startswith("one layer, forward + backward ")
    ways = [re.split(r"  +", line) for line in table]
    assert [way[0] for way in ways] == [BF16, QUANTIZING, REUSING]
    assert all(float(way[1]) > 0 for way in ways)
    assert float(ways[0][2]) == 1
    assert "say nothing about a GPU" in last


def test_refusals_end_with_the_reason(tmp_path: Path) -> None:
    jetmoe = config("jetmoe", tmp_path)
    for args, message in (
        ([jetmoe], "experts of jetmoe cannot run in FP8: JetMoeParallelExperts: its class"),
        (["--sizes", 8, 250, 128, 2], "H and I must be multiples of 16; got 250 and 128"),
        (["--sizes", 8, 256, 128, 9], "need k in [1, E] and tokens; got k 9, E 8"),
        ([tmp_path / "none.json"], "[layer] cannot read "),
    ):
        made = model_layer.with_arguments(parser("", json_required=False))
        with pytest.raises(SystemExit, match=re.escape(message)):
            model_layer.show(made.parse_args(["--device", "cpu", *map(str, args)]))
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="needs a CUDA GPU"):
            model_layer.show(made.parse_args(["--sizes", "8", "256", "128", "2"]))


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (
            (3.0, 2.0, 1.5),
            "Expect experts 1.50 times as fast as in bf16, 2.00 with weights reused over "
            "microbatches: 48 such layers save 48.0 ms of a step",
        ),
        ((3.0, 3.5, 2.5), "Expect a gain only with weights reused over microbatches (1.20 times"),
        ((3.0, 4.0, 3.5), "Expect no gain"),
    ],
)
def test_the_sentence(ms: tuple[float, ...], words: str) -> None:
    found = {n: Way(t, 1.0) for n, t in zip((BF16, QUANTIZING, REUSING), ms, strict=True)}
    sizes = Sizes(128, 2048, 768, 8, 48, "qwen3_moe")
    assert model_layer.expectation(sizes, torch.device("cuda"), found).startswith(words)


@pytest.mark.gpu
def test_peaks_count_what_a_way_holds() -> None:
    sizes = Sizes(8, 1024, 512, 2)
    found = model_layer.measure(sizes, 512, torch.device("cuda"))
    weights = 8 * 3 * 1024 * 512 * 2 / 2**30  # bf16, and as much of gradients
    for way in found.values():
        assert way.ms > 0
        assert way.peak_gib > 2 * weights
    assert found[REUSING].peak_gib > found[QUANTIZING].peak_gib - weights / 2
