"""Losses of LoRA on attention and experts: FP8 experts beside the same codes dequantized to bf16.

A small Qwen3-MoE over bytes learns one text, is written as an FP8 checkpoint by transformers' own
quantizer, and is then adapted to another text by both, from the same adapters and on the same
batches. On a CPU; needs transformers and peft.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3MoeConfig
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from common import Record, commit, write
from fp8moe_cutlass.integrations import transformers as fp8moe

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
MEAN_OF = 20  # steps
LORA: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def batches(text: bytes, steps: int, seed: int) -> torch.Tensor:
    """[steps, 8, 64] of the text's bytes, from random places."""
    g = torch.Generator().manual_seed(seed)
    at = torch.randint(len(text) - 64, (steps, 8, 1), generator=g) + torch.arange(64)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[at].long()


def train(model: Any, ids: torch.Tensor, lr: float) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=lr), []
    for batch in ids:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def checkpoint(folder: Path, text: bytes, steps: int) -> Path:
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(Qwen3MoeConfig(**SIZES), dtype=torch.float32)
    train(model, batches(text, steps, seed=0), 1e-3)
    model.bfloat16().save_pretrained(folder / "bf16")
    quantized = auto.from_pretrained(
        folder / "bf16", dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config()
    )
    quantized.save_pretrained(folder / "fp8")
    return folder / "fp8"


def adapted(path: Path, fp8: bool, seed: int) -> Any:
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if not fp8:
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(path, **options)
    if fp8:
        fp8moe.swap(model)
    wrap: Any = fp8moe.get_peft_model if fp8 else peft.get_peft_model
    model = wrap(model, peft.LoraConfig(**LORA))
    for name, p in sorted(model.named_parameters()):  # the same in both, whatever its shape
        if "lora_A" in name:
            g = torch.Generator().manual_seed(seed + len(name))
            bound = p.shape[-1] ** -0.5
            drawn = torch.rand(p.numel(), generator=g).mul_(2 * bound).sub_(bound)
            p.data.copy_(drawn.view(p.shape))
    return model.train()


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--first", type=Path, nargs="+", required=True, help="text to learn")
    arguments.add_argument("--then", type=Path, nargs="+", required=True, help="to adapt to")
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--json", type=Path, required=True)
    arguments.add_argument("--png", type=Path, help="the curves")
    given = arguments.parse_args()
    quantizer: Any = FineGrainedFP8HfQuantizer
    quantizer.validate_environment = lambda *a, **k: None  # it wants a GPU
    first, then = (b"\n".join(p.read_bytes() for p in paths) for paths in (given.first, given.then))
    record: Record = {"commit": commit(), "torch": torch.__version__, "results": [], "losses": {}}
    record["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint(Path(folder), first, 2 * given.steps)
        for seed in range(given.seeds):
            ids = batches(then, given.steps, seed=100 + seed)
            for kind in ("FP8", "bf16"):
                losses = train(adapted(path, kind == "FP8", seed), ids, 1e-3)
                record["losses"][f"{kind} {seed}"] = [round(loss, 4) for loss in losses]
                ends = range(given.steps // 5, given.steps + 1, given.steps // 5)
                means = {f"to {end}": sum(losses[end - MEAN_OF : end]) / MEAN_OF for end in ends}
                record["results"].append({"experts": kind, "seed": seed, **means})
                print(kind, seed, f"{losses[0]:.3f} to {sum(losses[-20:]) / 20:.3f}", flush=True)
    write(record, given.json)
    if given.png:
        draw(record, given.png)


def draw(record: Record, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, losses in record["losses"].items():
        kind, seed = name.split()
        line = "-" if kind == "FP8" else ":"
        means = [sum(losses[n - 10 : n]) / 10 for n in range(10, len(losses) + 1, 5)]
        at = [*range(10, len(losses) + 1, 5)]
        name = f"{kind} experts, seed {seed}"
        axes.plot(at, means, line, color=f"C{seed}", lw=1 if line == "-" else 3, label=name)
    axes.set(xlabel="step", ylabel="loss, nats per byte, means of 10 steps")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
