"""Train a small byte-level MoE transformer in FP8 and in bf16, and compare.

    python examples/language_model.py                                # on a CPU
    python examples/language_model.py --size large --device cuda     # an H100 or H200

The text is the Python source code of the standard library. Both runs start from the same weights
and see the same batches. Writes the losses to OUT/loss.json and their plot to OUT/loss.png.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import LossCoefficients, MoE, MoEExperts, Router

RECIPES = {"fp8": Fp8Recipe(), "bf16": None}
BYTES = 256
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Config:
    """Sizes of the model and the run. hidden and intermediate are multiples of 128."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    intermediate: int = 128
    context: int = 128
    batch: int = 16  # sequences per step
    steps: int = 400
    lr: float = 2e-3
    heldout: int = 128  # sequences per evaluation

    @property
    def eval_every(self) -> int:
        return max(1, self.steps // 10)


SIZES = {
    "tiny": Config(layers=1, heads=2, experts=4, context=32, batch=4, steps=20, heldout=8),
    "small": Config(),
    "large": Config(8, 1024, 8, 16, 4, 1536, 1024, batch=12, steps=1000, lr=6e-4, heldout=144),
}


# ---- data ---------------------------------------------------------------------------------------


class Text:
    """The bytes of Python's standard library; every tenth block of 16 KiB is held out."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if not SKIPPED & {*f.relative_to(root).parts}]
        data = np.frombuffer(b"\n".join(f.read_bytes() for f in sorted(files)), np.uint8)
        blocks = [data[i : i + 16384] for i in range(0, len(data), 16384)]
        self.heldout = torch.from_numpy(np.concatenate(blocks[9::10]))
        self.train = torch.from_numpy(
            np.concatenate([b for i, b in enumerate(blocks) if i % 10 != 9])
        )
        shares = np.bincount(data, minlength=BYTES) / len(data)
        shares = shares[shares > 0]
        self.unigram_entropy = float(-(shares * np.log(shares)).sum())  # nats per byte
        self.name = f"the standard library of Python {platform.python_version()}"

    def batches(self, c: Config, seed: int) -> Iterator[Tensor]:
        """Random training sequences [batch, context + 1] int64, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self.train) - c.context, (c.batch,), generator=generator)
            yield sequences(self.train, starts, c.context)

    def heldout_batches(self, c: Config) -> list[Tensor]:
        """Evenly spaced held-out sequences."""
        starts = torch.linspace(0, len(self.heldout) - c.context - 1, c.heldout).long()
        parts = [starts[i : i + c.batch] for i in range(0, c.heldout, c.batch)]
        return [sequences(self.heldout, part, c.context) for part in parts]


def sequences(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()


# ---- model --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention with rotary positions, [B, S, H] -> [B, S, H]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.hidden, 3 * c.hidden, bias=False)
        self.out = nn.Linear(c.hidden, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, s, h))
        return out


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of [B, heads, S, D]."""
    s, d = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, d, 2, device=x.device) / d)
    angle = torch.arange(s, device=x.device)[:, None] * frequency
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Block(nn.Module):
    """x + attention, then x + experts, each behind an RMSNorm."""

    def __init__(self, c: Config, recipe: Fp8Recipe | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.hidden)
        self.attention = Attention(c)
        self.moe_norm = nn.RMSNorm(c.hidden)
        losses = LossCoefficients(balancing=0.01 / c.layers)
        router = Router(c.hidden, c.experts, c.top_k, coefficients=losses)
        sizes = c.experts, c.hidden, c.intermediate
        self.moe = MoE(router, MoEExperts(*sizes, recipe=recipe, dtype=torch.float32))
        with torch.no_grad():  # what adds to the residual stream starts small
            for weight in (self.attention.out.weight, self.moe.experts.down_proj):
                weight.mul_((2 * c.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.moe(self.moe_norm(x).bfloat16())
        return out


class Decoder(nn.Module):
    """Bytes [B, S] int64 -> logits [B, S, 256]."""

    def __init__(self, c: Config, recipe: Fp8Recipe | None) -> None:
        super().__init__()
        # A byte and the two before it: attention need not first learn to look one back.
        self.bytes = nn.ModuleList(nn.Embedding(BYTES, c.hidden) for _ in range(3))
        self.blocks = nn.Sequential(*(Block(c, recipe) for _ in range(c.layers)))
        self.norm = nn.RMSNorm(c.hidden)
        self.head = nn.Linear(c.hidden, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        shifted = [F.pad(tokens, (back, 0))[:, : tokens.shape[1]] for back in range(3)]
        x = sum(table(t) for table, t in zip(self.bytes, shifted, strict=True))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


# ---- training -----------------------------------------------------------------------------------


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, nats. On a GPU attention runs in bf16."""
    device = windows.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: nn.Module, batches: list[Tensor], device: torch.device) -> float:
    model.eval()  # without the routers' losses
    total = sum(len(b) * loss_of(model, b.to(device)).item() for b in batches)
    model.train()
    return total / sum(map(len, batches))


def learning_rate(c: Config, step: int) -> float:
    """A linear warm-up over a tenth of the steps, then a cosine to zero."""
    warmup = max(1, c.steps // 10)
    if step < warmup:
        return c.lr * (step + 1) / warmup
    return c.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (c.steps - warmup)))


def train(
    name: str, c: Config, text: Text, device: torch.device, seed: int, bar: Progress
) -> tuple[Decoder, dict[str, Any]]:
    """The trained model, and its run: losses of each step, held-out losses, tokens per second."""
    torch.manual_seed(seed)
    model = Decoder(c, RECIPES[name]).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    heldout = text.heldout_batches(c)
    task = bar.add_task(name, total=c.steps, loss=math.nan, rate=0.0)
    run: dict[str, Any] = {"variant": name, "seed": seed, "loss": [], "heldout": []}
    seconds = 0.0  # of training, evaluation aside
    for step, windows in zip(range(c.steps), text.batches(c, seed), strict=False):
        start = time.perf_counter()
        loss = loss_of(model, windows.to(device))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(c, step)
        optimizer.step()
        optimizer.zero_grad()
        run["loss"].append(loss.item())
        seconds += time.perf_counter() - start
        run["tokens_per_second"] = (step + 1) * c.batch * c.context / seconds
        bar.update(task, advance=1, loss=run["loss"][-1], rate=run["tokens_per_second"])
        if (step + 1) % c.eval_every == 0 or step + 1 == c.steps:
            run["heldout"].append((step + 1, heldout_loss(model, heldout, device)))
    return model, run | {"seconds": seconds}


@torch.no_grad()
def sample(model: Decoder, c: Config, device: torch.device, count: int = 240) -> str:
    """What the model writes after "def "; what would command a terminal is replaced."""
    tokens = list(b"def ")
    for _ in range(count):
        window = torch.tensor([tokens[-c.context :]], device=device)
        chances = torch.softmax(model(window)[0, -1].float() / 0.7, dim=0)
        tokens.append(int(torch.multinomial(chances, 1)))
    text = bytes(tokens).decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


# ---- showing ------------------------------------------------------------------------------------


def plot(record: dict[str, Any], path: Path) -> None:
    """Training losses, smoothed, and held-out losses of both runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = max(1, record["config"]["steps"] // 20)
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    styles = {"bf16": ("#8b8f96", 4.0), "fp8": ("#00795c", 1.4)}  # the wider line lies below
    for run in sorted(record["runs"], key=lambda run: -styles[run["variant"]][1]):
        color, line = styles[run["variant"]]
        smooth = np.convolve(run["loss"], np.full(width, 1 / width), "valid")
        steps = np.arange(len(smooth)) + width
        axes.plot(steps, smooth, color=color, linewidth=line, label=f"{run['variant']}, training")
        axes.plot(*zip(*run["heldout"], strict=True), "o", color=color, markersize=2 + 2 * line)
    axes.plot([], [], "o", color="black", label="held out")
    axes.axhline(record["unigram_entropy"], color="black", linestyle=":", label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=f"On {record['device']}")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small", help="tiny takes seconds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/language-model"))
    return parser.parse_args(arguments)


def main(given: argparse.Namespace) -> None:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # the model writes any letter
    c, device, text = SIZES[given.size], torch.device(given.device), Text()
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"{len(text.train) / 1e6:.1f} MB of {text.name}, {len(text.heldout) / 1e6:.1f} held out")
    record: dict[str, Any] = {
        "config": asdict(c),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "text": text.name,
        "unigram_entropy": text.unigram_entropy,
        "runs": [],
    }
    columns = (
        *(TextColumn("{task.description:>5}"), BarColumn(), MofNCompleteColumn()),
        TextColumn("loss {task.fields[loss]:.3f}, {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    models = {}
    with Progress(*columns) as bar:
        for name in RECIPES:
            models[name], run = train(name, c, text, device, given.seed, bar)
            record["runs"].append(run)
    (given.out / "loss.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(record, given.out / "loss.png")
    fp8, bf16 = (run["heldout"][-1][1] for run in record["runs"])
    print(f"held-out loss, nats per byte: FP8 {fp8:.4f}, bf16 {bf16:.4f}: {fp8 / bf16 - 1:+.2%}")
    print(f"(a model without context: {text.unigram_entropy:.4f})")
    print(f"wrote {given.out / 'loss.json'} and {given.out / 'loss.png'}")
    print("\nWhat the FP8 model writes:\n" + sample(models["fp8"], c, device))


if __name__ == "__main__":
    main(parse())
