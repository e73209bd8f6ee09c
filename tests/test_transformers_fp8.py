"""An FP8 checkpoint in DeepSeek-V3's format, written by transformers' own quantizer."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file
from transformers import FineGrainedFP8Config
from transformers.integrations import finegrained_fp8
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from fp8moe_cutlass.integrations import transformers as fp8moe
from fp8moe_cutlass.nn import MoEExperts, reuse_fp8_weights

E, H, I = 4, 256, 256
NAME = "model.layers.1.mlp.experts"
pytestmark = pytest.mark.slow

CONFIG = transformers.DeepseekV3Config(
    vocab_size=256, hidden_size=H, intermediate_size=I, moe_intermediate_size=I,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=E,
    num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
    q_lora_rank=128, kv_lora_rank=128, qk_rope_head_dim=128, qk_nope_head_dim=128, v_head_dim=64,
    max_position_embeddings=128, pad_token_id=0,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _on_a_cpu() -> Iterator[None]:
    """transformers would dequantize where there is no GPU."""
    fp8moe.register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *a, **k: None)
        yield


def read(path: Path, **how: Any) -> Any:
    return transformers.DeepseekV3ForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **how)


def written(path: Path, **sizes: Any) -> Path:
    """A checkpoint of random weights."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**{**CONFIG.to_dict(), **sizes})
    transformers.DeepseekV3ForCausalLM(config).bfloat16().save_pretrained(path / "bf16")
    read(path / "bf16", quantization_config=FineGrainedFP8Config()).save_pretrained(path / "fp8")
    return path / "fp8"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("checkpoint"))


IDS = torch.randint(3, 256, (2, 16), generator=torch.Generator().manual_seed(0))


def error(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def same_experts(a: Path, b: Path) -> bool:
    one, other = (load_file(path / "model.safetensors") for path in (a, b))
    keys = [key for key in one if ".experts." in key]
    assert len(keys) == E * 3 * 2
    return all(
        one[key].dtype == other[key].dtype
        and torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8))
        for key in keys
    )


def test_it_runs_trains_and_is_written_again(path: Path, tmp_path: Path) -> None:
    model = read(path)
    module = model.get_submodule(NAME)
    own = [module.gate_up_proj, module.down_proj_scale_inv]
    assert [(e.kind, e.reason) for e in fp8moe.check(model)] == [("FP8Experts", None)]
    assert fp8moe.swap(model) == [NAME]
    layer = model.get_submodule(NAME)
    assert own[0] is layer.gate_up_proj  # nothing is allocated
    assert own[1] is layer.down_proj_scale_inv
    assert not any(isinstance(m, finegrained_fp8.FP8Linear) for m in model.modules())

    plain = read(path, quantization_config=FineGrainedFP8Config(dequantize=True))
    want, got = (m(input_ids=IDS, labels=IDS) for m in (plain, model))
    assert 1e-4 < error(got.logits, want.logits) < 0.04
    for out in (want, got):
        out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert not any(name.startswith(NAME) for name in grads)
    for name, p in plain.named_parameters():
        if not name.startswith(NAME):
            assert error(grads[name], p.grad) < 0.15, name

    before = model(input_ids=IDS).logits
    with reuse_fp8_weights(model):
        assert torch.equal(model(input_ids=IDS).logits, before)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    optimizer.step()
    model.save_pretrained(tmp_path)
    assert same_experts(path, tmp_path)
    again = read(tmp_path)
    assert fp8moe.swap(again) == [NAME]
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_its_file_is_read_by_from_fp8(path: Path) -> None:
    model = read(path)
    fp8moe.swap(model)
    layer = model.get_submodule(NAME)
    tensors = load_file(path / "model.safetensors")
    mine = MoEExperts.from_fp8(tensors, NAME + ".", num_experts=E)
    x, ids = torch.randn(8, H).bfloat16(), torch.randint(E, (8, 2))
    assert torch.equal(mine(x, ids, torch.ones(8, 2)), layer(x, ids, torch.ones(8, 2)))
    for name, t in layer.fp8_tensors(NAME + "."):
        assert torch.equal(t.view(torch.uint8), tensors[name].view(torch.uint8))


def test_registered_it_runs_and_does_not_train(path: Path) -> None:
    model = read(path)
    model.set_experts_implementation("fp8moe")
    module = model.get_submodule(NAME)
    x, ids, probs = torch.randn(8, H).bfloat16(), torch.randint(E, (8, 2)), torch.rand(8, 2)
    with torch.no_grad():
        got = module(x, ids, probs)
    with pytest.raises(NotImplementedError, match=r"FP8Experts cannot run in FP8: to train, swap"):
        module(x.requires_grad_(), ids, probs)
    fp8moe.swap(model)
    assert torch.equal(model.get_submodule(NAME)(x, ids, probs), got)


def test_peft_on_attention(path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = read(path)
    fp8moe.swap(model)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_a_proj", "o_proj"], r=4))
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 8
    assert all(p.grad is not None for p in trained)


def test_trainer_with_adapters(path: Path, tmp_path: Path) -> None:
    """It refuses quantized models, but for the attribute that docs/how-to names."""
    peft = pytest.importorskip("peft")
    model: Any = read(path)
    fp8moe.swap(model)
    layer = model.get_submodule(NAME)
    codes = {name: t.clone() for name, t in layer.fp8_tensors()}
    model._hf_peft_config_loaded = True
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"], r=4))
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    data = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2,
        save_steps=2, gradient_checkpointing=True, use_cpu=True, report_to="none",
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=data).train()
    now = dict(model.named_parameters())
    assert not any(torch.equal(now[name], p) for name, p in trained.items())
    for name, t in layer.fp8_tensors():
        assert torch.equal(t.view(torch.uint8), codes[name].view(torch.uint8)), name


@pytest.mark.parametrize("more", ["", "--fast", "--lora", "--fast --lora"])
def test_the_example(
    path: Path, tmp_path: Path, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of LoRA beside those over the same codes dequantized; and the run goes on. The same
    with --fast, without inductor's C++, and with --lora on the experts."""
    pytest.importorskip("peft")
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    root = Path(__file__).parent.parent / "examples/transformers_finetune.py"
    spec: Any = importlib.util.spec_from_file_location("example", root)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    given = example.parse(
        f"--data - --model {path} --fp8 --cpu --out {tmp_path} --steps 4 --batch 1 --accumulate 2 "
        f"--save-every 2 {more}".split()
    )
    data = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1)]
    losses = {name: dict(example.train(given, name, data)) for name in ("fp8moe", "grouped_mm")}
    assert list(losses["fp8moe"]) == [1, 2, 3, 4]
    assert losses["fp8moe"] == pytest.approx(losses["grouped_mm"], abs=0.03)
    shutil.rmtree(tmp_path / "fp8moe/checkpoint-4")
    given.resume = True
    assert dict(example.train(given, "fp8moe", data)) == losses["fp8moe"]


def test_peft_on_codes_is_refused(path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = read(path)
    fp8moe.swap(model)
    config = peft.LoraConfig(target_parameters=["mlp.experts.down_proj"], target_modules=[], r=4)
    model = peft.get_peft_model(model, config)
    with pytest.raises(RuntimeError, match=r"down_proj holds FP8 codes .* got a computed one"):
        model(input_ids=IDS)


def of_experts(**values: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        vars(model.get_submodule(NAME)).update(values)

    return change


def squeezed(model: Any) -> None:
    module = model.get_submodule(NAME)
    module.down_proj_scale_inv = nn.Parameter(module.down_proj_scale_inv[:, :1])


def grouped(model: Any) -> None:
    of = finegrained_fp8.FP8GroupedLinear
    model.model.layers[0].self_attn.o_proj = of(128, 256, 2, block_size=(128, 128))


def whole_tensors(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.block_size = None


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "blocks": (
        of_experts(block_size=(64, 128)),
        {},
        r"scales of \(64, 128\), not of blocks",
    ),
    "static": (of_experts(activation_scheme="static"), {}, "static scales of activations"),
    "a limit": (of_experts(limit=7.0), {}, "a gate of its own"),
    "GELU": (of_experts(act_fn=nn.GELU()), {}, "its activation is GELU, not SiLU"),
    "a grid": (squeezed, {}, r"down_proj_scale_inv is \(4, 1, 2\), not \(4, 2, 2\)"),
    "no recipe": (lambda model: None, {"recipe": None}, "FP8 codes, which need an FP8 recipe"),
    "another kind": (grouped, {}, "o_proj is FP8GroupedLinear, through which transformers"),
    "a linear": (whole_tensors, {}, "o_proj: scales of whole tensors, not of blocks of 128x128"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_changes(name: str, path: Path) -> None:
    change, options, said = REFUSED[name]
    model = read(path)
    change(model)
    before = [type(m) for m in model.modules()]
    with pytest.raises(NotImplementedError, match=said):
        fp8moe.swap(model, **options)
    assert [type(m) for m in model.modules()] == before


def test_grids_that_transformers_squeezes_are_refused(tmp_path: Path) -> None:
    """A dimension of 1 of a grid of scales is lost where transformers saves it."""
    model = read(written(tmp_path, moe_intermediate_size=128))
    with pytest.raises(NotImplementedError, match=r"scale_inv is \(4, 4\), not \(4, 2, 2\)"):
        fp8moe.swap(model)


def test_a_group_shares_the_experts(path: Path, tmp_path: Path) -> None:
    dist = torch.distributed
    model, alone = read(path), read(path)
    fp8moe.swap(alone)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert fp8moe.swap(model, group=dist.group.WORLD) == [NAME]
        got, want = (m(input_ids=IDS, labels=IDS) for m in (model, alone))
        assert torch.equal(got.logits, want.logits)
        got.loss.backward()
        assert f"{NAME}.down_proj_scale_inv" in model._ddp_params_and_buffers_to_ignore
        for refused in (
            lambda: fp8moe.save_pretrained(model, tmp_path),
            lambda: fp8moe.GroupTrainer(model, transformers.TrainingArguments(str(tmp_path))),
        ):
            with pytest.raises((NotImplementedError, ValueError), match=r"FP8|quantized"):
                refused()
    finally:
        dist.destroy_process_group()


def test_from_pretrained_of_a_group_is_refused(path: Path) -> None:
    of = transformers.DeepseekV3ForCausalLM
    with pytest.raises(NotImplementedError, match="must have no quantization_config"):
        fp8moe.from_pretrained(of, path, group=object())
