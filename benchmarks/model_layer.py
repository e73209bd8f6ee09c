"""How fast for one model: a layer of its experts in FP8 and in bf16, as a table and a sentence."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from contender import Contender, Inputs, block
from fp8moe_cutlass.nn import MoEExperts
from model_sizes import Sizes, of_config
from timing import burst
from torch_experts import TorchExperts

BF16, QUANTIZING, REUSING = (
    "torch bf16",
    "FP8, weights quantized in each step",
    "FP8, weights reused",
)


class Way(NamedTuple):
    """Forward and backward of one layer."""

    ms: float
    peak_gib: float | None  # weights, gradients and activations of the layer; None on a CPU


def measure(sizes: Sizes, tokens: int, device: torch.device) -> dict[str, Way]:
    """The three ways over the same parameters, random tokens and random routing."""
    e, h, i, k = sizes[:4]
    if h % 16 or i % 16:
        raise ValueError(f"[layer] H and I must be multiples of 16; got {h} and {i}")
    if not 1 <= k <= e or tokens < 1:
        raise ValueError(f"[layer] need k in [1, E] and tokens; got k {k}, E {e}, {tokens} tokens")
    torch.manual_seed(0)
    try:
        layer = MoEExperts(e, h, i, device=device)
        inputs = Inputs.random(block(tokens, e, k, h, i), device)
        contenders, peaks = {}, {}
        # The reusing one last: it holds FP8 weights, which are not the others' memory.
        for name in (BF16, QUANTIZING, REUSING):
            module = TorchExperts(layer) if name == BF16 else layer
            contenders[name] = Contender(module, inputs, reuse=name == REUSING)
            peaks[name] = peak_gib(contenders[name], device)
        times = burst({name: c.step for name, c in contenders.items()}, device)
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(
            f"[layer] {e} experts with {tokens} tokens must fit the GPU; got {error}. Give "
            "--experts, the number per GPU, or fewer --tokens"
        ) from error
    return {name: Way(times[name].ms, peaks[name]) for name in contenders}


def peak_gib(contender: Contender, device: torch.device) -> float | None:
    contender.step()
    contender.clear()
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    contender.step()
    torch.cuda.synchronize()
    contender.clear()
    return torch.cuda.max_memory_allocated() / 2**30


def lines(sizes: Sizes, tokens: int, device: torch.device, found: dict[str, Way]) -> Iterator[str]:
    """What was measured, the table, and what to expect."""
    e, h, i, k = sizes[:4]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    yield f"{sizes.kind}: {e} experts, hidden size {h}, intermediate size {i}, top-{k}"
    yield f"{tokens} tokens, {tokens * k / e:.0f} per expert; {where}, torch {torch.__version__}"
    if sizes.note:
        yield sizes.note
    yield ""
    yield f"{'one layer, forward + backward':38}{'ms':>9}{'times bf16':>12}{'peak, GiB':>11}"
    for name, way in found.items():
        peak = "" if way.peak_gib is None else f"{way.peak_gib:.2f}"
        yield f"{name:38}{way.ms:9.2f}{found[BF16].ms / way.ms:12.2f}{peak:>11}".rstrip()
    yield ""
    yield expectation(sizes, device, found)


def expectation(sizes: Sizes, device: torch.device, found: dict[str, Way]) -> str:
    if device.type == "cpu":
        return "A CPU computes FP8 in software: these times say nothing about a GPU."
    bf16, each, reused = (found[name].ms for name in (BF16, QUANTIZING, REUSING))
    saved = f"{sizes.layers} such layers save {sizes.layers * (bf16 - each):.1f} ms of a step"
    if each < bf16:
        return (
            f"Expect experts {bf16 / each:.2f} times as fast as in bf16, {bf16 / reused:.2f} with "
            f"weights reused over microbatches: {saved}, and the rest of the model stays as it is."
        )
    if reused < bf16:
        return (
            f"Expect a gain only with weights reused over microbatches ({bf16 / reused:.2f} times "
            "as fast): with so few tokens per expert, quantizing them in each step costs more."
        )
    return "Expect no gain: with so few tokens per expert, stay in bf16 or use more per step."


def with_arguments(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    made.add_argument("config", nargs="?", type=Path, help="a Hugging Face model's config.json")
    made.add_argument("--sizes", type=int, nargs=4, metavar=("E", "H", "I", "K"), help="instead")
    made.add_argument("--tokens", type=int, default=4096, help="per step (default: 4096)")
    made.add_argument("--experts", type=int, help="how many this GPU holds (default: all)")
    return made


def show(given: argparse.Namespace) -> None:
    """Measure and print, by the arguments above; exit with the reason where that cannot be."""
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "[layer] needs a CUDA GPU, and torch sees none (--device cpu proves only that it runs)"
        )
    try:
        sizes = of_config(given.config) if given.config else Sizes(*given.sizes)
        sizes = sizes._replace(experts=given.experts or sizes.experts)
        found = measure(sizes, given.tokens, device)
    except OSError as error:
        raise SystemExit(f"[layer] cannot read {given.config}: {error.strerror}") from None
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(*lines(sizes, given.tokens, device, found), sep="\n")
