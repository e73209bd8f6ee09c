"""LoRA on the experts of transformers' models, by PEFT's own configuration and files."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Trainer, TrainingArguments
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from fp8moe_cutlass.integrations import transformers as fp8moe
from fp8moe_cutlass.nn.lora import factors
from transformers_models import model_of, tokens

pytestmark = pytest.mark.slow

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "v_proj"]
IDS = tokens()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def config(**changed: Any) -> Any:
    given = {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION, "target_parameters": EXPERTS}
    return peft.LoraConfig(**given | changed)


def fill(model: Any) -> None:
    """Adapters that matter: the same on the same names."""
    torch.manual_seed(3)
    for name, p in sorted(model.named_parameters()):
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)


def error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An FP8 checkpoint by transformers' quantizer, which would dequantize without a GPU."""
    path = tmp_path_factory.mktemp("fp8")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    model_of("Qwen3Moe", torch.bfloat16, **sizes).save_pretrained(path / "bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *a, **k: None)
        quantized = read(path / "bf16", quantization_config=FineGrainedFP8Config())
        quantized.save_pretrained(path / "fp8")
        yield path / "fp8"


def read(path: Path, **how: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **how)


def swapped(path: Path) -> Any:
    model = read(path)
    fp8moe.swap(model)
    return model


def ours_of(path: Path, on: Any = "cpu") -> Any:
    made = fp8moe.get_peft_model(swapped(path), config())
    fill(made)
    return made.to(on)


def test_adapters_go_to_peft_and_back(checkpoint: Path, tmp_path: Path, on: torch.device) -> None:
    """PEFT, over the dequantized model, reads ours and computes the same; and the reverse."""
    ours, ids = ours_of(checkpoint, on), IDS.to(on)
    ours.save_pretrained(tmp_path / "ours")
    plain = read(checkpoint, quantization_config=FineGrainedFP8Config(dequantize=True))
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "ours", is_trainable=True).to(on)
    with ours.disable_adapter():
        alone = ours(input_ids=ids).logits
    got, want = ours(input_ids=ids).logits, theirs(input_ids=ids).logits
    assert error(got, want) < 0.05
    assert error(alone, want) > 0.2
    theirs.save_pretrained(tmp_path / "theirs")
    one, other = (
        load_file(tmp_path / by / "adapter_model.safetensors") for by in ("ours", "theirs")
    )
    assert set(one) == set(other)
    assert any(".experts.base_layer.lora_B" in key for key in one)
    for key, t in one.items():
        assert torch.equal(t, other[key]), key

    its = peft.PeftConfig.from_pretrained(tmp_path / "theirs")
    again = fp8moe.get_peft_model(swapped(checkpoint).to(on), its)
    assert not any(p.requires_grad for p in again.parameters())  # inference_mode, as PEFT writes it
    its.inference_mode = False
    again = fp8moe.get_peft_model(swapped(checkpoint).to(on), its)
    again.load_adapter(tmp_path / "theirs", "default", is_trainable=True)
    assert all(p.requires_grad == ("lora_" in name) for name, p in again.named_parameters())
    assert torch.equal(again(input_ids=ids).logits, got)

    low = fp8moe.get_peft_model(swapped(checkpoint).to(on), its)
    low.load_adapter(tmp_path / "theirs", "default", low_cpu_mem_usage=True)
    want = dict(again.named_parameters())  # PEFT rounds those of the attention in between
    for name, p in low.named_parameters():
        assert p.device.type == on.type
        assert ".experts." not in name or torch.equal(p.float(), want[name].float())


def test_gradients_are_pefts(checkpoint: Path, tmp_path: Path, on: torch.device) -> None:
    ours, ids = ours_of(checkpoint, on), IDS.to(on)
    ours.save_pretrained(tmp_path)
    plain = read(checkpoint, quantization_config=FineGrainedFP8Config(dequantize=True))
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path, is_trainable=True).to(on)
    for model in (ours, theirs):
        model(input_ids=ids, labels=ids).loss.backward()
    mine = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    its = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
    assert set(mine) == set(its)
    for name, p in its.items():
        grad = mine[name].grad
        assert grad is not None
        assert grad.dtype == torch.float32
        if ".experts." in name:
            is_a = "lora_A" in name
            grad = grad.flatten(0, 1) if is_a else grad.permute(1, 2, 0).flatten(1)
        assert error(grad, p.grad) < 0.2, name


def test_switches_of_peft(checkpoint: Path) -> None:
    ours = ours_of(checkpoint)
    base = swapped(checkpoint)(input_ids=IDS).logits
    adapted = ours(input_ids=IDS).logits
    with ours.disable_adapter():
        assert torch.equal(ours(input_ids=IDS).logits, base)
    assert torch.equal(ours(input_ids=IDS).logits, adapted)
    trained, _ = ours.get_nb_trainable_parameters()
    assert trained == sum(p.numel() for n, p in ours.named_parameters() if "lora_" in n)
    for copies in (copy.deepcopy(ours), saved_and_loaded(ours)):
        assert copies(input_ids=IDS).logits.equal(adapted)
        with copies.disable_adapter():
            assert torch.equal(copies(input_ids=IDS).logits, base)
            assert torch.equal(ours(input_ids=IDS).logits, adapted)


def test_frozen_adapters_are_those_of_experts_too() -> None:
    model = model_of("Qwen3Moe", torch.bfloat16)
    fp8moe.swap(model)
    ours = fp8moe.get_peft_model(model, config())
    trained = {n for n, p in ours.named_parameters() if p.requires_grad}
    for freeze in (
        lambda: ours.base_model.set_adapter("default", inference_mode=True),
        lambda: ours.set_requires_grad("default", False),
        lambda: ours.set_requires_grad(["default"], False),
    ):
        freeze()
        assert not any(p.requires_grad for p in ours.parameters())
        ours.set_adapter("default")
        assert trained == {n for n, p in ours.named_parameters() if p.requires_grad}


def test_one_adapter_for_a_whole_batch() -> None:
    model = model_of("Qwen3Moe", torch.bfloat16).eval()
    fp8moe.swap(model)
    ours = fp8moe.get_peft_model(model, config())
    names = ["default", "__base__"]
    for run in (ours, ours.generate):
        with pytest.raises(NotImplementedError, match=r"adapter_names must be None .*__base__"):
            run(input_ids=IDS, adapter_names=names)


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_merge_and_unload(checkpoint: Path) -> None:
    ours = ours_of(checkpoint)
    want = ours(input_ids=IDS).logits
    merged = ours.merge_and_unload()
    assert not [n for n, _ in merged.named_parameters() if "lora_" in n]
    assert error(merged(input_ids=IDS).logits, want) < 0.1


def test_safe_merge_looks_at_experts_too() -> None:
    model = model_of("Qwen3Moe", torch.bfloat16)
    fp8moe.swap(model)
    ours = fp8moe.get_peft_model(model, config())
    layer = model.model.layers[1].mlp.experts
    before = layer.down_proj.clone()
    with torch.no_grad():
        factors(layer)[3][2] = torch.nan
    with pytest.raises(ValueError, match=r"safe_merge: down_proj must be finite .* expert 2"):
        ours.merge_and_unload(safe_merge=True)
    assert torch.equal(layer.down_proj, before)
    with torch.no_grad():
        factors(layer)[3].zero_()
    ours.merge_and_unload(safe_merge=True)


def test_trainer_trains_and_resumes(checkpoint: Path, tmp_path: Path) -> None:
    data = [{"input_ids": row, "labels": row} for row in tokens(8)]
    losses = []
    for last in (3, 5):
        model = swapped(checkpoint)
        model._hf_peft_config_loaded = True
        torch.manual_seed(0)
        model = fp8moe.get_peft_model(model, config())
        arguments = TrainingArguments(
            str(tmp_path), max_steps=last, save_steps=3, learning_rate=1e-2, use_cpu=True,
            logging_steps=1, report_to="none", disable_tqdm=True, seed=0,
            gradient_checkpointing=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=last > 3)
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        saved = load_file(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
        key = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"
        assert saved[key].any()
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_values_are_adapted_too() -> None:
    model = model_of("Qwen3Moe", torch.bfloat16)
    fp8moe.swap(model)
    ours = fp8moe.get_peft_model(model, config(target_modules=[]))
    ours(input_ids=IDS, labels=IDS).loss.backward()
    for name, p in ours.named_parameters():
        assert p.requires_grad == ("lora_" in name)
        assert (p.grad is not None) == ("lora_" in name)
    layer = model.model.layers[0].mlp.experts
    assert factors(layer)[1].grad.any()


def test_one_adapter(checkpoint: Path) -> None:
    """Of the attention alone, too: switching between them would leave the experts' first one on."""
    model = ours_of(checkpoint)
    for call in (
        lambda: model.add_adapter("b", config()),
        lambda: model.add_adapter("b", peft.LoraConfig(target_modules=["q_proj"])),
        lambda: model.delete_adapter("default"),
        model.merge_adapter,
        model.unmerge_adapter,
    ):
        with pytest.raises(
            NotImplementedError, match=r"\[get_peft_model\] .* one adapter; instead"
        ):
            call()
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout must be 0.0 for LoRA on experts; got 0.1"),
        ({"use_dora": True}, "use_dora must be False for LoRA on experts; got True"),
        ({"bias": "all"}, "bias must be 'none' for LoRA on experts; got 'all'"),
        ({"lora_bias": True}, "lora_bias must be False for LoRA on experts; got True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out must be False for LoRA on experts; got True"),
        ({"use_qalora": True}, "use_qalora must be False for LoRA on experts; got True"),
        ({"layer_replication": [(0, 1)]}, "layer_replication must be None for LoRA on experts"),
        (
            {"target_parameters": EXPERTS[:1]},
            "target_parameters must name both .* one of them",
        ),
        ({"target_parameters": ["nothing"]}, "target_parameters must name both"),
        ({"target_parameters": None}, "target_parameters must name both"),
        ({"rank_pattern": {"down_proj": 16}}, "rank_pattern and alpha_pattern must say the same"),
        ({"target_modules": "all-linear"}, "target_modules must be names"),
        ({"modules_to_save": ["mlp"]}, r"modules_to_save must hold no .* model.layers.0.mlp$"),
        ({"modules_to_save": ["experts"]}, r"modules_to_save must hold no .*mlp.experts$"),
        ({"r": 12}, "rank must be a multiple of 8, 8 to 64; got 12"),
        ({"r": 16, "lora_alpha": 0}, "alpha must be more than 0; got 0"),
    ],
)
def test_refused(changed: dict[str, Any], rule: str) -> None:
    """By an error that leaves the model as it was, and so takes the next call."""
    model = model_of("Qwen3Moe", torch.bfloat16, num_hidden_layers=1)
    fp8moe.swap(model)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=rf"\[(get_peft_model|add_lora)\] {rule}"):
        fp8moe.get_peft_model(model, config(**changed))
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    fp8moe.get_peft_model(model, config())


def test_a_model_that_is_not_swapped() -> None:
    model = model_of("Qwen3Moe", torch.bfloat16, num_hidden_layers=1)
    with pytest.raises(ValueError, match="model has none: swap it first"):
        fp8moe.get_peft_model(model, config())


def test_peft_alone_is_refused_on_codes(checkpoint: Path) -> None:
    model = peft.get_peft_model(swapped(checkpoint), config())
    with pytest.raises(RuntimeError, match=r"gate_up_proj holds FP8 codes .*get_peft_model"):
        model(input_ids=IDS)
