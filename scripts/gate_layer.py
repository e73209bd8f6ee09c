"""Times the expert block of two builds in turn.

    gate_layer.py time OUT.json [--tokens T...] [--memory]
    gate_layer.py compare A.json... --with B.json...

`time` runs over the installed package that `import fp8moe_cutlass` finds: forward and backward of
five models' experts, weights quantized in each step and reused, and the forward under no_grad; with
`--memory` also what a stack of four layers holds and its peak. Builds cannot share a process, so
run them in turn (A, B, A, B) on one machine; `compare` takes each figure's minimum over the runs of
a build and prints B over A.

Under torchrun the ranks share the experts (group=), each with its own tokens; the slowest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

MODELS = {  # E, S, H, I
    "DeepSeek-V3, 32 experts": (32, 8, 7168, 2048),
    "DeepSeek-V3, 8 experts": (8, 8, 7168, 2048),
    "Qwen3-235B, 16 experts": (16, 8, 4096, 1536),
    "DeepSeek-V2-Lite, 64 experts": (64, 6, 2048, 1408),
    "Qwen3-30B, 128 experts": (128, 8, 2048, 768),
}


RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def step(layer: Any, x: Any, ids: Any, probs: Any, dout: Any, **how: Any) -> None:
    layer(x, ids, probs, **how).backward(dout)
    for p in (*layer.parameters(), x, probs):
        p.grad = None


def milliseconds(run: Any, reps: int, blocks: int) -> float:
    """The median over blocks of the mean of `reps` back-to-back runs."""
    import torch

    for _ in range(3):
        run()
    times = []
    for _ in range(blocks):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(reps):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / reps)
    ms = sorted(times)[blocks // 2]
    if RANKS > 1:
        slowest = torch.tensor(ms, device="cuda")
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        ms = float(slowest)
    return ms


def variants(layer: Any) -> dict[str, Any]:
    """How a step gets its FP8 weights."""
    weights = layer.quantize_weights()
    return {"quantized in each step": dict, "reused": lambda: {"weights": weights}}


def times(layer: Any, t: int, slots: int, blocks: int) -> dict[str, float]:
    """Of one layer at t tokens: each variant's milliseconds."""
    import torch

    x = torch.randn(t, layer.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    ids = torch.rand(t, layer.num_experts, device="cuda").topk(slots).indices
    probs = torch.rand(t, slots, device="cuda", requires_grad=True)
    found = variants(layer)
    ms = {
        variant: milliseconds(lambda how=how: step(layer, x, ids, probs, dout, **how()), 12, blocks)
        for variant, how in found.items()
    }
    first = found["quantized in each step"]
    with torch.no_grad():
        ms["no_grad"] = milliseconds(lambda: layer(x, ids, probs, **first()), 12, blocks)
    return ms


def measure(tokens: list[int], models: list[str], memory: bool, blocks: int) -> dict[str, float]:
    import torch

    from fp8moe_cutlass import nn

    group: dict[str, Any] = {}
    if RANKS > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
        group["group"] = torch.distributed.group.WORLD
    figures: dict[str, float] = {}
    for name in models:
        experts, slots, hidden, intermediate = MODELS[name]
        torch.manual_seed(int(os.environ.get("RANK", "0")))
        layer = nn.MoEExperts(experts, hidden, intermediate, device="cuda", **group)
        for t in tokens:
            found = times(layer, t, slots, blocks)
            figures |= {f"{name}, T {t}, {variant}": ms for variant, ms in found.items()}
        del layer
        torch.cuda.empty_cache()
        if memory:
            figures |= {f"{name}, {k}": v for k, v in stack(*MODELS[name], tokens[0]).items()}
    return figures


def stack(experts: int, slots: int, hidden: int, intermediate: int, t: int) -> dict[str, float]:
    """GiB that four layers hold between steps, and their peak in a step."""
    import torch

    from fp8moe_cutlass import Fp8Recipe, nn

    figures = {}
    for label, options in {
        "saved": {"recipe": Fp8Recipe(), "transposed_weights": "save"},
        "recomputed": {"recipe": Fp8Recipe(), "transposed_weights": "recompute"},
        "recipe=None": {"recipe": None},
    }.items():
        layers = [
            nn.MoEExperts(experts, hidden, intermediate, device="cuda", **options) for _ in range(4)
        ]
        x = torch.randn(t, hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(t, experts, device="cuda").topk(slots).indices
        probs = torch.rand(t, slots, device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            h = x
            for layer in layers:
                h = h + layer(h, ids, probs)
            h.float().square().mean().backward()
            del h
            for layer in layers:
                for p in layer.parameters():
                    p.grad = None
        figures[f"{label}, held GiB"] = torch.cuda.memory_allocated() / 2**30
        figures[f"{label}, peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        del layers, layer, x, ids, probs
        torch.cuda.empty_cache()
    return figures


def compare(before: list[str], after: list[str]) -> None:
    def best(files: list[str]) -> dict[str, float]:
        runs = [json.load(open(f)) for f in files]  # noqa: SIM115
        return {k: min(r[k] for r in runs if k in r) for r in runs for k in r}

    a, b = best(before), best(after)
    for key in a:
        if key in b:
            print(f"{key:60}{a[key]:10.3f}{b[key]:10.3f}{b[key] / a[key]:8.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["time", "compare"])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--with", dest="other", nargs="+", help="compare: the other build's files")
    given = parser.parse_args()
    if given.command == "compare":
        compare(given.files, given.other)
        return 0
    figures = measure(given.tokens, given.models, given.memory, given.blocks)
    if os.environ.get("RANK", "0") == "0":
        with open(given.files[0], "w") as out:
            json.dump(figures, out, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
