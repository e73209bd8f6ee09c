"""transformers models whose experts ranks share, against one process: their files, fully_shard by
torch and by accelerate, Trainer with DistributedDataParallel. Trainer with FSDP2 needs GPUs:
tests/gpu/test_transformers_group_gpu.py."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="no accelerate is installed")

import accelerate
import safetensors.torch
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from fp8moe_cutlass.integrations import transformers as fp8moe
from fp8moe_cutlass.nn import clip_grad_norm_
from ranks import Pool, results
from transformers_models import E, error, experts_of, model_of, tokens

pytestmark = pytest.mark.slow

BOUND = 0.03  # of what training changed: roundings of partial sums, and FP8 codes next to them
KINDS = ["Qwen3Moe", "Mixtral", "DeepseekV3", "GraniteMoe"]  # three layouts of experts in files


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(request.param, {request.param: list(range(request.param))})
    yield made
    made.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    made = Pool(2, {2: [0, 1]})
    yield made
    made.close()


def run(pool: Pool, function: Any, *args: Any) -> list[Any]:
    (size,) = pool.members
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return results(pool.run(size, as_torchrun, port, function, *args))


def as_torchrun(group: Any, port: int, function: Any, *args: Any) -> Any:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return function(*args)


def whole(t: Any) -> Tensor:
    found: Tensor = t.full_tensor() if isinstance(t, DTensor) else t
    return found.detach().clone()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


# ---- files --------------------------------------------------------------------------------------


def read_and_written(folder: str, kind: str) -> tuple[int, dict[str, Tensor]]:
    """How many experts' numbers have been read, and the whole weights."""
    read = []
    original = safetensors.safe_open

    class Counting:
        def __init__(self, *args: Any) -> None:
            self.opened = original(*args)

        def __enter__(self) -> Any:
            self.file = self.opened.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.opened.__exit__(*args)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> Tensor:
            found: Tensor = self.file.get_tensor(name)
            if ".experts." in name:
                read.append(found.numel())
            return found

        def get_slice(self, name: str) -> Any:
            part = self.file.get_slice(name)

            class Slice:
                def get_shape(self) -> Any:
                    return part.get_shape()

                def __getitem__(self, at: Any) -> Tensor:
                    found: Tensor = part[at]
                    read.append(found.numel())
                    return found

            return Slice()

    safetensors.safe_open = Counting
    try:
        model = fp8moe.from_pretrained(
            transformers.AutoModelForCausalLM,
            folder,
            group=dist.group.WORLD,
            options={"preactivation": "recompute"},
            dtype=torch.float32,
        )
    finally:
        safetensors.safe_open = original
    assert type(model).__name__ == f"{kind}ForCausalLM"
    assert type(model).__module__.startswith("transformers.")
    for m in experts_of(model).values():
        assert m.preactivation == "recompute"
        assert isinstance(m.down_proj, DTensor)
        assert m.down_proj.to_local().shape[0] == E // dist.get_world_size()
    fp8moe.save_pretrained(model, f"{folder}-again")
    ids = tokens()
    model.train()(input_ids=ids, labels=ids).loss.backward()
    return sum(read), whole_weights(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reads_its_own_experts_and_whole_files_are_written(
    two: Pool, kind: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "model")
    model = model_of(kind)
    model.save_pretrained(folder)
    numbers = sum(p.numel() for m in experts_of(model).values() for p in m.parameters())
    again = None
    for read, weights in run(two, read_and_written, folder, kind):
        assert read == numbers // 2
        again = again or transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-again")
        for (name, its), back in zip(model.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(weights[name], its), name
            assert torch.equal(back, its), name
    files = [
        {p.name: p.stat().st_size for p in Path(f).glob("*.safe*")}
        for f in (folder, folder + "-again")
    ]
    assert files[0] == files[1]


# ---- fully_shard --------------------------------------------------------------------------------


def prepared_by_accelerate(model: nn.Module, names: list[str], mixed: str) -> None:
    """As by accelerate's FSDP2 on GPUs; on CPUs Accelerator itself turns to DDP."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
    )
    plugin.ignored_modules = [model.get_submodule(name) for name in names]
    if mixed == "bf16":
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    stand_in = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        device=torch.device("cpu"),
        mixed_precision=mixed,
        is_main_process=dist.get_rank() == 0,
    )
    accelerate.PartialState(cpu=True)
    fsdp2_prepare_model(stand_in, model)


def step_of_fully_shard(by: str, shared: bool) -> tuple[float, dict[str, Tensor]]:
    """A clipped SGD step of rate 1 on this rank's rows, the experts shared or gathered in FP8."""
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    names = fp8moe.swap(model, **({"group": dist.group.WORLD} if shared else {}))
    layers = [model.get_submodule(name) for name in names]
    ignored = {p for layer in layers for p in layer.parameters()} if shared else set()
    if by == "torch":
        fully_shard(model, ignored_params=ignored)
    else:
        prepared_by_accelerate(model, names if shared else [], by.removeprefix("accelerate "))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for p in (p for layer in layers for p in layer.parameters()):
        assert p.to_local().shape[0] == E // dist.get_world_size()
        assert (type(p._local_tensor) is Tensor) == shared
    ids = tokens(4).chunk(dist.get_world_size())[dist.get_rank()]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.SGD(model.parameters(), lr=1.0, foreach=True).step()
    return float(whole(norm)), whole_weights(model)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("by", ["torch", "accelerate no", "accelerate bf16"])
def test_swap_and_fully_shard(pool: Pool, by: str, shared: bool) -> None:
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    fp8moe.swap(model)
    start, ids = whole_weights(model), tokens(4)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    bound = 0.15 if "bf16" in by else BOUND  # the others compute in float32 outside the experts
    for got, weights in run(pool, step_of_fully_shard, by, shared):
        assert abs(got - norm) < bound * norm
        for name, w in model.named_parameters():
            assert error(weights[name] - start[name], w.detach() - start[name]) < bound, name


# ---- Trainer and DistributedDataParallel --------------------------------------------------------

ARGUMENTS: dict[str, Any] = {
    "max_steps": 3,
    "optim": "sgd",
    "learning_rate": 1.0,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 0.1,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "seed": 3,
}
BATCH = 8


def train(
    folder: str, arguments: dict[str, Any], resume: str | None = None, adapters: bool = False
) -> tuple[list[float], list[float], dict[str, Tensor], Any]:
    """Losses, norms and weights after Trainer's run, on the same batches by any number of ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    fp8moe.swap(model, group=dist.group.WORLD if ranks > 1 else None)
    if adapters:
        import peft

        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
        model = peft.get_peft_model(model, config)
    options = ARGUMENTS | arguments
    options["per_device_train_batch_size"] = (
        BATCH // ranks // options.get("gradient_accumulation_steps", 1)
    )
    of = fp8moe.GroupTrainer if ranks > 1 else transformers.Trainer
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(32)]
    with fp8moe.ReuseCallback() as reuse:
        callbacks = [reuse] if "gradient_accumulation_steps" in options else []
        trainer = of(
            model, TrainingArguments(folder, **options), train_dataset=data, callbacks=callbacks
        )
        trainer.train(resume_from_checkpoint=resume)
    if ranks > 1:
        assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    found = [[float(row[key]) for row in rows] for key in ("loss", "grad_norm")]
    return found[0], found[1], whole_weights(model), trainer


def trained(*args: Any) -> tuple[list[float], list[float], dict[str, Tensor]]:
    return train(*args)[:3]


TRAINER: dict[str, dict[str, Any]] = {
    "clipped": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "autocast": {"bf16": True},
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
}


@pytest.mark.parametrize("name", TRAINER)
def test_trainer_equals_one_process(pool: Pool, name: str, tmp_path: Path) -> None:
    start = whole_weights(model_of("Qwen3Moe", num_hidden_layers=1))
    losses, norms, want, _ = train(str(tmp_path / "one"), TRAINER[name])
    bound = 0.15 if name == "autocast" else BOUND
    for got in run(pool, trained, str(tmp_path / "ranks"), TRAINER[name]):
        torch.testing.assert_close(got[0], losses, rtol=2e-3, atol=0)
        torch.testing.assert_close(got[1], norms, rtol=BOUND, atol=0)
        for weight, w in want.items():
            assert error(got[2][weight] - start[weight], w - start[weight]) < bound, weight


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "optim": "adamw_torch"}
SAVING |= {"learning_rate": 1e-3}


def test_resume_on_any_number_of_ranks(two: Pool, tmp_path: Path) -> None:
    """The same number: the same bits. Another: as near as another number of ranks is anyway. And
    the folder has the weights of one process."""
    folder = str(tmp_path / "run")
    through = run(two, trained, folder, SAVING)[0]
    checkpoint = f"{folder}/checkpoint-2"
    again = run(two, trained, str(tmp_path / "again"), SAVING, checkpoint)[0]
    for name, w in through[2].items():
        assert torch.equal(again[2][name], w), name
    four = Pool(4, {4: [0, 1, 2, 3]})
    try:
        on_four = run(four, trained, str(tmp_path / "four"), SAVING, checkpoint)[0]
    finally:
        four.close()
    torch.testing.assert_close(on_four[0][2:], through[0][2:], rtol=2e-3, atol=0)
    start = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name, w in start.named_parameters():
        made, want = on_four[2][name] - w, through[2][name] - w
        assert error(made, want) < 0.2, name  # AdamW divides small gradients by themselves
        assert want.any()
    last = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-4")
    for name, w in last.named_parameters():
        assert torch.equal(w, through[2][name]), name


def best(folder: str, adapters: bool) -> tuple[str, dict[str, Tensor]]:
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    fp8moe.swap(model, group=dist.group.WORLD)
    if adapters:
        import peft

        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(model, config)
    options = ARGUMENTS | {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps"}
    options |= {"eval_steps": 1, "load_best_model_at_end": True, "greater_is_better": True}
    options |= {"metric_for_best_model": "eval_loss", "max_grad_norm": 1.0}
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(16)]
    trainer = fp8moe.GroupTrainer(
        model, TrainingArguments(folder, **options), train_dataset=data, eval_dataset=data
    )
    trainer.train()
    return Path(trainer.state.best_model_checkpoint).name, whole_weights(model)


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_the_best_model_is_loaded_with_its_experts(
    two: Pool, adapters: bool, tmp_path: Path
) -> None:
    """The metric falls, and the best is the greatest: the first step's."""
    for name, weights in run(two, best, str(tmp_path), adapters):
        assert name == "checkpoint-1"
        if adapters:
            saved = safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors")
            for key, w in saved.items():
                assert torch.equal(weights[key.replace(".weight", ".default.weight")], w), key
            continue
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for key, w in saved.named_parameters():
            assert torch.equal(weights[key], w), key


def test_adapters_on_attention_with_frozen_experts(two: Pool, tmp_path: Path) -> None:
    arguments = {**SAVING, "optim": "sgd", "learning_rate": 1.0, "max_steps": 2}
    folder = str(tmp_path / "ranks")
    losses, norms, want, _ = train(str(tmp_path / "one"), arguments, None, True)
    for got in run(two, trained, folder, arguments, None, True):
        torch.testing.assert_close(got[0], losses, rtol=2e-3, atol=0)
        torch.testing.assert_close(got[1], norms, rtol=BOUND, atol=0)
        for name, w in want.items():
            if "lora_B" in name:
                assert w.any()
                assert error(got[2][name], w) < BOUND, name
    saved = safetensors.torch.load_file(f"{folder}/checkpoint-2/adapter_model.safetensors")
    assert saved
    assert all("lora" in name for name in saved)


def adapted_experts(ranks: int) -> dict[str, Tensor]:
    """Gradients of adapters on the experts, of this rank's."""
    peft = pytest.importorskip("peft")
    model = model_of("Qwen3Moe", num_hidden_layers=2)
    names = fp8moe.swap(model, group=dist.group.WORLD if ranks > 1 else None)
    of_experts = {p for name in names for p in model.get_submodule(name).parameters()}
    torch.manual_seed(1)
    parameters = ["layers.1.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    config = peft.LoraConfig(target_modules=[], target_parameters=parameters, lora_dropout=0.0)
    model = fp8moe.get_peft_model(model, config)
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    if ranks > 1:
        ignored = set(model._ddp_params_and_buffers_to_ignore)
        assert ignored == {n for n, p in model.named_parameters() if p in of_experts} | {*adapters}
        with pytest.raises(NotImplementedError, match=r"\[GroupMixin\] model must have no LoRA"):
            fp8moe.GroupTrainer(model, TrainingArguments("unused", use_cpu=True, report_to="none"))
        with pytest.raises(NotImplementedError, match=r"\[get_peft_model\] save_pretrained writes"):
            model.save_pretrained("unused")
    ids = tokens(4).chunk(ranks)[dist.get_rank() if ranks > 1 else 0]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in adapters.values())
    return {name: p.grad for name, p in adapters.items() if "lora_B" in name and p.grad is not None}


def test_adapters_on_experts_of_one_process() -> None:
    assert all(grad.any() for grad in adapted_experts(1).values())


def test_adapters_on_shared_experts(two: Pool) -> None:
    want = adapted_experts(1)
    for rank, found in enumerate(run(two, adapted_experts, 2)):
        for name, grad in want.items():
            assert error(found[name], grad.chunk(2)[rank]) < BOUND, name


def by_transport(transport: str) -> list[Tensor]:
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    (name,) = fp8moe.swap(model, group=dist.group.WORLD, transport=transport)
    assert f"transport='{transport}'" in repr(model.get_submodule(name))
    ids = tokens(4).chunk(dist.get_world_size())[dist.get_rank()]
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return [out.logits.detach(), *(whole(p.grad) for p in model.parameters())]


def test_swap_takes_a_transport(two: Pool) -> None:
    for want, got in zip(*(run(two, by_transport, t) for t in ("nccl", "peer")), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def refused() -> None:
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    with pytest.raises(ValueError, match="must have experts with a group; got none"):
        fp8moe.GroupTrainer(model, TrainingArguments("unused", use_cpu=True, report_to="none"))
    fp8moe.swap(model, group=dist.group.WORLD)
    saving: dict[str, Any] = {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 500}
    arguments = TrainingArguments(
        "unused",
        use_cpu=True,
        report_to="none",
        save_only_model=True,
        load_best_model_at_end=True,
        **saving,
    )
    with pytest.raises(ValueError, match="save_only_model must be False with load_best_model"):
        fp8moe.GroupTrainer(model, arguments, eval_dataset=[{}])
    arguments = TrainingArguments("unused", use_cpu=True, report_to="none", optim="adafactor")
    with pytest.raises(ValueError, match=r"optim must take DTensors, .*; got adafactor"):
        fp8moe.GroupTrainer(model, arguments)


def test_a_model_without_a_group_is_refused(two: Pool) -> None:
    run(two, refused)


def unknown_to_accelerate(group: Any) -> None:
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    fp8moe.swap(model, group=group)
    with pytest.raises(ValueError, match=r"\[GroupMixin\] accelerate must know .*; got 1"):
        fp8moe.GroupTrainer(model, TrainingArguments("unused", use_cpu=True, report_to="none"))


def test_processes_without_torchruns_environment_are_refused() -> None:
    own = Pool(2, {2: [0, 1]})
    results(own.run(2, unknown_to_accelerate))
    own.close()


def test_the_example_shares_experts_under_torchrun(tmp_path: Path) -> None:
    """Losses of a run that stopped and went on are those of one that did not."""
    root = Path(__file__).parent.parent

    def run(*more: str) -> Any:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        example = ["examples/transformers_finetune.py", "--share-experts", "--cpu"]
        sizes = ["--batch", "1", "--length", "32", "--save-every", "2"]
        command = [*torchrun, *example, *sizes, "--data", "CHANGELOG.md", "--out", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, *command, *more],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "loss.json").read_text())

    losses = run("--steps", "4")
    bf16 = [loss for _, loss in losses["grouped_mm"]]
    assert [step for step, _ in losses["fp8moe"]] == [1, 2, 3, 4]
    assert [loss for _, loss in losses["fp8moe"]] == pytest.approx(bf16, abs=0.02)
    shutil.rmtree(tmp_path / "fp8moe/checkpoint-4")
    again = run("--steps", "4", "--resume", "--fp8-only")
    assert again["fp8moe"] == losses["fp8moe"]
