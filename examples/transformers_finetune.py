"""Fine-tune a Hugging Face MoE on text files with its experts in FP8, and in bf16 beside it.

    python examples/transformers_finetune.py --data *.txt --model PATH --out runs/finetune
    python examples/transformers_finetune.py --data *.md --out runs/tiny      # from scratch, small
    python examples/transformers_finetune.py --data *.txt --model Qwen/Qwen3-30B-A3B-FP8 --fp8
    python examples/transformers_finetune.py --fast --data *.txt ...          # compiled
    torchrun --nproc-per-node 8 examples/transformers_finetune.py --share-experts --data *.txt ...

On several GPUs --share-experts leaves each expert on one of them, and shards the rest by FSDP2.
Without the flag every rank has the whole model (DistributedDataParallel, as on CPUs).

--fp8 takes an FP8 checkpoint. The experts' codes stay as they lie, frozen, and LoRA adapts the
attention; with --lora all experts, too. The run in bf16 beside it dequantizes the same codes. It
needs peft and one GPU.

Writes a checkpoint every --save-every steps to OUT/fp8moe/checkpoint-N, the losses of both runs to
OUT/loss.json, and a plot to OUT/loss.png. `--resume` goes on from each run's last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FineGrainedFP8Config,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from fp8moe_cutlass.integrations import transformers as fp8moe

BF16 = "grouped_mm"  # transformers' own
BYTES = Qwen3MoeConfig(  # a small model over bytes, for --model not given
    vocab_size=256,
    hidden_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=8,
    num_experts_per_tok=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text files")
    parser.add_argument("--model", help="a path or name; default: a small model from scratch")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per microbatch")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches per step")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--fp8-only", action="store_true", help="no run in bf16 beside it")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--share-experts", action="store_true", help="among torchrun's processes")
    parser.add_argument("--fp8", action="store_true", help="--model is an FP8 checkpoint")
    parser.add_argument("--lora", action="store_true", help="with --fp8: on experts, too")
    parser.add_argument("--fast", action="store_true", help="compile layers, loss and optimizer")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    given = parser.parse_args(arguments)
    if given.lora and not given.fp8:
        parser.error("--lora goes with --fp8")
    if given.fast and given.share_experts:
        parser.error("--fast has not been tried with --share-experts")
    return given


def blocks(given: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """The files' tokens, cut into sequences."""
    text = "\n".join(path.read_text(errors="replace") for path in given.data)
    if given.model:
        ids = AutoTokenizer.from_pretrained(given.model)(text, return_tensors="pt").input_ids[0]
    else:
        ids = torch.tensor(list(text.encode()))
    cut = ids[: len(ids) // given.length * given.length].view(-1, given.length)
    if not len(cut):
        raise SystemExit(f"--data has {len(ids)} tokens, fewer than --length {given.length}")
    return [{"input_ids": row, "labels": row} for row in cut]


def load(given: argparse.Namespace, implementation: str, checkpoint: str | None) -> Any:
    """The model: of the checkpoint, of --model, or new.

    Trainer's own resume leaves experts as they are built. So the checkpoint is loaded here; that of
    shared experts is GroupTrainer's to load.
    """
    if shared(given, implementation):
        if given.model:
            auto = AutoModelForCausalLM
            group = dist.group.WORLD
            return fp8moe.from_pretrained(auto, given.model, group=group, dtype=torch.bfloat16)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(BYTES, dtype=torch.bfloat16)
        fp8moe.swap(model, group=dist.group.WORLD)
        return model
    if given.fp8:
        return adapted(given, implementation)
    options: Any = {"experts_implementation": implementation, "dtype": torch.bfloat16}
    if checkpoint or given.model:
        return AutoModelForCausalLM.from_pretrained(checkpoint or given.model, **options)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(BYTES, **options)


def adapted(given: argparse.Namespace, implementation: str) -> Any:
    """An FP8 checkpoint with LoRA on its attention. Its adapters are Trainer's to load again."""
    import peft

    options: Any = {"dtype": torch.bfloat16, "device_map": "cpu" if given.cpu else "cuda"}
    if implementation == BF16:
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
        options["experts_implementation"] = BF16
    model = AutoModelForCausalLM.from_pretrained(given.model, **options)
    if implementation != BF16:
        fp8moe.swap(model)
        model._hf_peft_config_loaded = True  # or Trainer refuses a quantized model
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=r".*self_attn\.\w*proj\w*")
    if not given.lora:
        return peft.get_peft_model(model, lora)
    lora.target_parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    wrap = peft.get_peft_model if implementation == BF16 else fp8moe.get_peft_model
    return wrap(model, lora)


def shared(given: argparse.Namespace, implementation: str) -> bool:
    return bool(given.share_experts) and implementation != BF16


class CompiledAdamW(torch.optim.AdamW):
    """torch's AdamW in one graph. lr is a tensor, so that a new value compiles nothing."""

    @torch.compile
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def compile_parts(model: Any) -> None:
    """The layers, which share one graph, the norm behind them, and the loss. The mask is made
    outside of all, where transformers sees that a batch needs none."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
    for part in (*causal.model.layers, causal.model.norm):
        part.compile()
    causal.loss_function = torch.compile(causal.loss_function)


class Bar(TrainerCallback):
    """A progress bar with the loss and tokens per second."""

    def __init__(self, name: str, tokens_per_step: int) -> None:
        columns = ("[bold]{task.description}", "loss {task.fields[loss]}")
        self.bar = Progress(
            TextColumn(columns[0]),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f}"),
            TextColumn(columns[1]),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
        )
        self.name, self.tokens = name, tokens_per_step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin, self.first = time.monotonic(), state.global_step
        fields = {"loss": "-", "speed": "-", "completed": state.global_step}
        self.task = self.bar.add_task(self.name, total=state.max_steps, **fields)
        self.bar.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            done = state.global_step - self.first
            speed = done * self.tokens / (time.monotonic() - self.begin)
            fields = {"loss": f"{float(logs['loss']):.3f}", "speed": f"{speed:,.0f}"}
            self.bar.update(self.task, completed=state.global_step, **fields)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.stop()


def train(given: argparse.Namespace, implementation: str, data: Any) -> list[tuple[int, float]]:
    """One run; (step, loss) of every step."""
    folder = given.out / implementation
    checkpoint = get_last_checkpoint(str(folder)) if given.resume and folder.exists() else None
    model = load(given, implementation, checkpoint)
    sharding: dict[str, Any] = {}
    if given.share_experts and not given.cpu:  # accelerate has no FSDP2 on CPUs
        layers = {"transformer_layer_cls_to_wrap": list(model._no_split_modules)}
        sharding = {"fsdp": True, "fsdp_config": layers}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        gradient_accumulation_steps=given.accumulate,
        learning_rate=given.lr,
        save_steps=given.save_every,
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=given.cpu,
        report_to="none",
        seed=0,
        **sharding,
    )
    tokens = given.batch * given.accumulate * given.length * arguments.world_size
    callbacks: list[TrainerCallback] = []
    if arguments.process_index == 0:
        callbacks.append(Bar(implementation, tokens))
    reuse: Any = contextlib.nullcontext()
    if implementation != BF16:
        reuse = fp8moe.ReuseCallback()  # quantizes once per step, not per microbatch
        callbacks.append(reuse)
    more: dict[str, Any] = {}
    if given.fast:
        compile_parts(model)
        lr = torch.tensor(given.lr, device=arguments.device)
        optimizer = {"lr": lr, "capturable": arguments.device.type == "cuda"}
        more["optimizer_cls_and_kwargs"] = CompiledAdamW, optimizer
    of = fp8moe.GroupTrainer if shared(given, implementation) else Trainer
    trainer: Any = of(model, arguments, train_dataset=data, callbacks=callbacks, **more)
    for printing in [c for c in trainer.callback_handler.callbacks if "Printer" in str(type(c))]:
        trainer.remove_callback(printing)
    with reuse:
        trainer.train(resume_from_checkpoint=checkpoint)
    return [(row["step"], float(row["loss"])) for row in trainer.state.log_history if "loss" in row]


def plot(losses: dict[str, list[tuple[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, points in losses.items():
        axes.plot(*zip(*points, strict=True), label="bf16" if name == BF16 else "FP8 experts")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    if given.fp8 and (not given.model or given.share_experts or "RANK" in os.environ):
        raise SystemExit("--fp8: give --model, an FP8 checkpoint, and one process")
    if given.share_experts:
        if "RANK" not in os.environ:
            raise SystemExit("--share-experts: start the script by torchrun")
        if not given.cpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo" if given.cpu else "cpu:gloo,cuda:nccl")
    first = os.environ.get("RANK", "0") == "0"
    fp8moe.register()
    given.out.mkdir(parents=True, exist_ok=True)
    data = blocks(given)
    losses: dict[str, list[tuple[int, float]]] = {}
    for implementation in ["fp8moe"] if given.fp8_only else ["fp8moe", BF16]:
        losses[implementation] = train(given, implementation, data)
        if first:
            (given.out / "loss.json").write_text(json.dumps(losses, indent=1) + "\n")
            plot(losses, given.out / "loss.png")
    if first:
        print(f"wrote {given.out / 'loss.json'} and {given.out / 'loss.png'}")
    if dist.is_initialized():
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # before Python 3.14, gloo's threads abort a process that ends under them


if __name__ == "__main__":
    main()
