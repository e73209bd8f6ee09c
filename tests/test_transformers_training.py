"""Hugging Face's training code over experts in FP8: Trainer, PEFT, TRL, compile, generate, save."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytest.importorskip("trl", reason="no trl is installed")

import datasets
import peft
import transformers
import trl
from transformers import Trainer, TrainingArguments

from fp8moe_cutlass import telemetry
from fp8moe_cutlass.integrations import transformers as fp8moe
from fp8moe_cutlass.nn import reuse_fp8_weights
from fp8moe_cutlass.nn.expert_block import blocks_of
from transformers_models import (
    count_quantizations,
    error,
    exchange_gate_and_up,
    experts_of,
    gradients,
    model_of,
    tokens,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent

# One layer, from N(0, 0.02): FP8 gives at most 0.11 to any experts' gradient, bf16 autocast 0.03,
# and gate and up exchanged at least 0.26.
BOUND = 0.15
HOW: dict[str, Callable[[Any], Any]] = {
    "register": lambda model: model.set_experts_implementation("fp8moe"),
    "swap": fp8moe.swap,
}
ONE_STEP: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 1,
    "optim": "sgd",
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    fp8moe.register()


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_quantizations(monkeypatch)


def examples() -> list[dict[str, Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in tokens(8)]


def reuse(check: bool | None) -> Any:
    """No reuse where check is None."""
    none: Any = contextlib.nullcontext()
    return none if check is None else fp8moe.ReuseCallback(check=check)


def trainer(model: Any, folder: Path, callbacks: Any = (), **arguments: Any) -> Any:
    return Trainer(
        model,
        TrainingArguments(str(folder), **ONE_STEP | arguments),
        train_dataset=examples(),
        callbacks=list(callbacks),
    )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The experts' parameters by their names."""
    return {
        f"{name}.{w}": getattr(m, w).detach().clone()
        for name, m in experts_of(model).items()
        for w in ("gate_up_proj", "down_proj")
    }


def step(model: Any, folder: Path, **arguments: Any) -> dict[str, Tensor]:
    """What one SGD step of rate 1 changed the experts by: their gradients."""
    before = weights_of(model)
    trainer(model, folder, **arguments).train()
    return {name: before[name] - w for name, w in weights_of(model).items()}


TRAINER: dict[str, dict[str, Any]] = {
    "plain": {},
    "autocast": {"bf16": True},
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "accumulation": {"gradient_accumulation_steps": 4},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", TRAINER)
def test_trainer(name: str, how: str, tmp_path: Path) -> None:
    arguments = TRAINER[name]
    want = step(model_of("Qwen3Moe", num_hidden_layers=1), tmp_path, **arguments)
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    HOW[how](model)
    for weight, got in step(model, tmp_path, **arguments).items():
        assert error(got, want[weight]) < BOUND


def test_the_bound_is_below_a_wrong_function(tmp_path: Path) -> None:
    want = step(model_of("Qwen3Moe", num_hidden_layers=1), tmp_path)
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    exchange_gate_and_up(model)
    for weight, got in step(model, tmp_path).items():
        back = got.roll(got.shape[1] // 2, dims=1) if "gate_up" in weight else got
        assert error(back, want[weight]) > 1.5 * BOUND


FOUR: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_steps": 2}


@pytest.mark.parametrize("how", HOW)
def test_accumulation_with_reuse_is_bit_equal(
    how: str, tmp_path: Path, quantized: list[int]
) -> None:
    """Two optimizer steps of four microbatches over two layers."""
    found, counted = [], []
    for check in (None, False, True):
        model = model_of("Qwen3Moe")
        HOW[how](model)
        quantized[0] = 0
        with reuse(check) as callback:
            trainer(model, tmp_path, [callback] if callback else [], **FOUR).train()
        found.append(weights_of(model))
        counted.append(quantized[0])
        assert all(block._reused is None for block in blocks_of(model).values())
    for name, want in found[0].items():
        assert torch.equal(found[1][name], want)
        assert torch.equal(found[2][name], want)
    assert counted[:2] == [16, 4]


class Interrupt(transformers.TrainerCallback):  # type: ignore[misc]
    """Raises behind the first microbatch of the second step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_reuse_ends_with_an_exception(where: str, how: str, tmp_path: Path) -> None:
    """Then all is as without it: loaded weights, and a Trainer whose fused optimizer counts no
    version. The interrupted Trainer is still a name. inside: where the exception is caught."""
    arguments: dict[str, Any] = FOUR | {"optim": "adamw_torch_fused", "learning_rate": 1e-2}
    found = []
    for check in (None, False):
        model = model_of("Qwen3Moe", num_hidden_layers=1)
        HOW[how](model)
        start = copy.deepcopy(model.state_dict())
        caught = contextlib.suppress(KeyboardInterrupt)
        with caught, reuse(check) as callback:
            callbacks = [callback] if callback else []
            old = trainer(model, tmp_path, [*callbacks, Interrupt()], **arguments)
            with caught if where == "inside" else contextlib.nullcontext():
                old.train()
            model.load_state_dict(start)
            trainer(model, tmp_path, callbacks, **arguments).train()
        if where == "outside":
            model.load_state_dict(start)
            trainer(model, tmp_path, **arguments).train()
        found.append(weights_of(model))
    for name, want in found[0].items():
        assert torch.equal(found[1][name], want)


def test_what_reuse_refuses(tmp_path: Path) -> None:
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    callback = fp8moe.ReuseCallback()
    with pytest.raises(RuntimeError, match=r"must run inside `with ReuseCallback\(\) as reuse:`"):
        trainer(model, tmp_path, [callback]).train()
    message = r"must have experts in FP8: .*got Qwen3MoeForCausalLM, which runs \['eager'\]"
    with pytest.raises(ValueError, match=message), callback:
        trainer(model, tmp_path, [callback]).train()


# ---- PEFT ----------------------------------------------------------------------------------------

PEFT: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


def adapted(how: str | None, targets: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """A model with random LoRA adapters, and their gradients."""
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    if how is not None:
        HOW[how](model)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_dropout=0.0, init_lora_weights=False, task_type="CAUSAL_LM", **targets
    )
    model = peft.get_peft_model(model, config)
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    return model, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", PEFT)
def test_peft(name: str, how: str) -> None:
    """With reuse, too: it leaves alone what PEFT computes for the time of a forward."""
    _, want = adapted(None, PEFT[name])
    model, got = adapted(how, PEFT[name])
    assert got.keys() == want.keys()
    for adapter, its in want.items():
        assert error(got[adapter], its) < BOUND
    model.zero_grad()
    ids = tokens()
    with reuse_fp8_weights(model):
        model(input_ids=ids, labels=ids).loss.backward()
    for adapter, p in model.named_parameters():
        if p.requires_grad:
            assert torch.equal(p.grad, got[adapter])
        assert "lora" in adapter or p.grad is None


@pytest.mark.parametrize("how", HOW)
def test_merging_inside_a_reuse_scope_counts(how: str) -> None:
    """PEFT merges by writes to `.data`, which count no version."""
    model, _ = adapted(how, PEFT["experts"])
    ids = tokens()
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with reuse_fp8_weights(model):
            model.merge_adapter()
            got = model(input_ids=ids).logits
            model.unmerge_adapter()
            with model.disable_adapter():
                without = model(input_ids=ids).logits
            model = model.merge_and_unload()
            unloaded = model(input_ids=ids).logits
        assert error(got, plain) < 0.05
        assert error(without, plain) > 0.1
        assert torch.equal(unloaded, model(input_ids=ids).logits)
        assert error(unloaded, plain) < 0.05


def test_other_tuners_of_peft_leave_swapped_experts_alone() -> None:
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    fp8moe.swap(model)
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    with torch.no_grad():
        want = model(input_ids=tokens()).logits
        model = peft.get_peft_model(model, config).unload()
        assert torch.equal(model(input_ids=tokens()).logits, want)
        model = peft.get_peft_model(model, config).merge_and_unload()
        assert error(model(input_ids=tokens()).logits, want) < 0.05


# ---- TRL -----------------------------------------------------------------------------------------


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, 256)}
    of = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    of.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=of, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def words(count: int, seed: int) -> str:
    return " ".join(f"w{n}" for n in tokens(1, count, seed)[0].tolist())


def reinforcement(name: str, model: Any, folder: Path, callbacks: Any = ()) -> Any:
    """One step of TRL's SFT, DPO or GRPO trainer."""
    common = {"bf16": False, "gradient_checkpointing": False, "output_dir": str(folder)} | ONE_STEP
    rows: list[dict[str, str]] = []
    more: dict[str, Any] = {}
    if name == "SFT":
        rows = [{"text": words(24, n)} for n in range(4)]
        of, arguments = trl.SFTTrainer, trl.SFTConfig(**common)
    elif name == "DPO":
        keys = ("prompt", "chosen", "rejected")
        rows = [{k: words(12, 3 * n + i) + " " for i, k in enumerate(keys)} for n in range(4)]
        of, arguments = trl.DPOTrainer, trl.DPOConfig(**common)
        more["ref_model"] = copy.deepcopy(model)
    else:
        rows = [{"prompt": words(8, n)} for n in range(4)]
        of = trl.GRPOTrainer
        arguments = trl.GRPOConfig(num_generations=2, max_completion_length=6, **common)
        more["reward_funcs"] = lambda completions, **_: [float(len(c) % 7) for c in completions]
    made = of(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        **more,
    )
    made.train()
    return made


@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_trl(name: str, tmp_path: Path) -> None:
    found = []
    for how in (None, "register"):
        model = model_of("Qwen3Moe", num_hidden_layers=1)
        if how is not None:
            HOW[how](model)
        before = weights_of(model)
        reinforcement(name, model, tmp_path)
        found.append({n: before[n] - w for n, w in weights_of(model).items()})
    want, got = found
    for weight, its in want.items():
        assert error(got[weight], its) < BOUND


def test_grpo_reuses_in_generation(tmp_path: Path, quantized: list[int]) -> None:
    """ReuseCallback's scope covers the generation that GRPO does within a step."""
    found, counted = [], []
    for check in (None, False):
        model = model_of("Qwen3Moe", num_hidden_layers=1)
        HOW["register"](model)
        quantized[0] = 0
        torch.manual_seed(0)
        with reuse(check) as callback:
            reinforcement("GRPO", model, tmp_path, [callback] if callback else [])
        counted.append(quantized[0])
        found.append(weights_of(model))
    assert counted[0] > 6
    assert counted[1] == 1
    for weight, its in found[0].items():
        assert torch.equal(found[1][weight], its)


# ---- compile, generate, save ---------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "how"), [("aot_eager", "swap"), ("inductor", "register")])
def test_compiles_without_a_graph_break(backend: str, how: str) -> None:
    """And follows what is written to the weights."""
    torch._dynamo.reset()
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    HOW[how](model)
    want = gradients(model)
    plain, model.forward = (
        model.forward,
        torch.compile(model.forward, fullgraph=True, backend=backend),
    )
    limit = 0.0 if backend == "aot_eager" else 0.05  # inductor fuses attention and norms
    for _ in range(2):
        for name, got in gradients(model).items():
            assert error(got, want[name]) <= limit
        with torch.no_grad():
            for w in model.parameters():
                w.mul_(1.25)
        compiled, model.forward = model.forward, plain
        want = gradients(model)
        model.forward = compiled


@pytest.mark.parametrize("how", HOW)
def test_generate_reuses(how: str, quantized: list[int]) -> None:
    model = model_of("Qwen3Moe").eval()
    HOW[how](model)
    arguments: Any = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    want = model.generate(tokens(2, 8), **arguments)
    assert want.shape == (2, 14)
    assert quantized[0] == 12
    with torch.no_grad(), reuse_fp8_weights(model):
        got = model.generate(tokens(2, 8), **arguments)
    assert quantized[0] == 14
    assert torch.equal(got, want)


@pytest.mark.parametrize("how", HOW)
def test_save_and_load(how: str, tmp_path: Path) -> None:
    """The implementation's name is not saved with a model: it is named again."""
    model = model_of("Qwen3Moe").eval()
    HOW[how](model)
    model.save_pretrained(tmp_path)
    want = model(input_ids=tokens()).logits
    of = transformers.AutoModelForCausalLM
    plain = of.from_pretrained(tmp_path)
    assert {e.runs for e in fp8moe.check(plain)} == {"grouped_mm"}
    for name, w in weights_of(model).items():
        assert torch.equal(weights_of(plain)[name], w)
    named = of.from_pretrained(tmp_path, experts_implementation="fp8moe")
    assert torch.equal(named(input_ids=tokens()).logits, want)


def test_train_and_eval() -> None:
    model = model_of("Qwen3Moe")
    fp8moe.swap(model)
    ids = tokens()
    losses = []
    for mode in (True, False, True):
        model.train(mode)
        assert all(m.training is mode for m in experts_of(model).values())
        losses.append(float(model(input_ids=ids, labels=ids).loss))
    assert losses[0] == losses[1] == losses[2]  # no dropout


def test_resume_from_a_checkpoint(tmp_path: Path) -> None:
    """Trainer alone would leave the experts as they were built: their saved keys are per expert,
    and it loads with strict=False. So the model comes from the checkpoint itself."""
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    arguments |= {"learning_rate": 1e-3}
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    HOW["register"](model)
    trainer(model, tmp_path, **arguments).train()
    checkpoint = tmp_path / "checkpoint-2"
    of = transformers.AutoModelForCausalLM
    resumed = of.from_pretrained(checkpoint, experts_implementation="fp8moe")
    assert not torch.equal(next(resumed.parameters()), next(model.parameters()))
    trainer(resumed.train(), tmp_path, **arguments).train(resume_from_checkpoint=str(checkpoint))
    for name, w in weights_of(model).items():
        assert torch.equal(weights_of(resumed)[name], w)
    alone = model_of("Qwen3Moe", num_hidden_layers=1, seed=1)
    trainer(alone, tmp_path, **arguments).train(resume_from_checkpoint=str(checkpoint))
    for name, w in weights_of(alone).items():
        assert error(w, weights_of(model)[name]) > 1


def test_an_infinity_saturates_and_telemetry_shows_it() -> None:
    """bf16 gives NaN. In FP8 the infinity's tile has the scale 1, far above its neighbours'."""
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    fp8moe.swap(model)
    [layer] = experts_of(model).values()
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    ids, probs = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    shifted = []
    for value in (1.0, torch.inf):
        x[0, 0] = value
        with telemetry.watch(model, every=1) as seen:
            out = layer(x, ids, probs)
            out.sum().backward()
        assert out.isfinite().all()
        [report] = seen.report().values()
        shifted.append(sum(report["transposes"]["x columns"]["shifts"][5:]))
    assert shifted == [0, 3]  # the other rows' tiles


def example_script() -> Any:
    spec = importlib.util.spec_from_file_location(
        "example", ROOT / "examples/transformers_finetune.py"
    )
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_the_example_trains_and_resumes(tmp_path: Path) -> None:
    """Weights and losses of a run that stopped are those of one that did not."""
    example = example_script()
    data = ["--data", str(ROOT / "CHANGELOG.md"), "--cpu", "--batch", "1", "--length", "32"]

    def run(name: str, *more: str) -> tuple[Any, dict[str, Any]]:
        example.main([*data, "--save-every", "2", "--out", str(tmp_path / name), *more])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name / "fp8moe/checkpoint-4"
        )
        assert (tmp_path / name / "loss.png").stat().st_size > 1000
        return model, json.loads((tmp_path / name / "loss.json").read_text())

    model, losses = run("whole", "--steps", "4")
    assert losses.keys() == {"fp8moe", "grouped_mm"}
    assert [step for step, _ in losses["fp8moe"]] == [1, 2, 3, 4]
    bf16 = [loss for _, loss in losses["grouped_mm"]]
    assert [loss for _, loss in losses["fp8moe"]] == pytest.approx(bf16, abs=0.02)
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped/fp8moe/checkpoint-4")
    resumed, again = run("stopped", "--steps", "4", "--resume", "--fp8-only")
    assert again["fp8moe"] == losses["fp8moe"]
    for name, w in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], w)


def test_the_fast_example_trains_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers, loss and optimizer are compiled, each in one graph, and the losses are those of the
    eager run. Inductor's C++ is left out, for its time."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    example = example_script()
    counters.clear()
    data = ["--data", str(ROOT / "CHANGELOG.md"), "--cpu", "--batch", "1", "--length", "32"]
    data += ["--steps", "4", "--save-every", "2"]

    def run(name: str, *more: str) -> dict[str, list[tuple[int, float]]]:
        example.main([*data, "--out", str(tmp_path / name), *more])
        found: dict[str, Any] = json.loads((tmp_path / name / "loss.json").read_text())
        return {name: [loss for _, loss in losses] for name, losses in found.items()}

    eager, fast = run("eager"), run("fast", "--fast")
    # Two implementations' layers, two losses, two optimizers; layers share a graph.
    assert counters["stats"]["unique_graphs"] <= 6
    for name, losses in eager.items():
        assert fast[name] == pytest.approx(losses, abs=0.01), name
    shutil.copytree(tmp_path / "fast", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped/fp8moe/checkpoint-4")
    assert run("stopped", "--fast", "--fp8-only", "--resume")["fp8moe"] == fast["fp8moe"]
    with pytest.raises(SystemExit):
        example.main([*data, "--fast", "--share-experts"])
