"""The recipe of docs/how-to/hugging-face.md on several GPUs: six layers of Qwen3-30B, 8,192 tokens
per rank.

    torchrun --standalone --nproc-per-node 2 benchmarks/several_gpus_recipe.py --json FILE

Variants of several_gpus.py as they are, and by the recipe: layers compiled one by one and the loss
compiled, with fused AdamW and with a compiled one. One after the other, from the same weights.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
import transformers

import common
import several_gpus as steps
from common import environment
from timing import Limits
from transformers_variants import ADAMW, LAYERS, LOSS, compiled_adamw

FAST = (LAYERS, LOSS)
# What is asked for first comes first: a run may end early.
RUNS = [
    (steps.BASE, False),
    ("FP8, group", True),
    (steps.BASE, True),
    ("FP8, fully_shard", True),
    ("FP8, group", False),
    ("bf16, group", True),
]


class Qwen3(steps.Qwen3):
    """The model whose layers and loss are compiled, if `fast`."""

    fast = False

    def build(self, *given: Any) -> torch.nn.Module:
        model: Any = super().build(*given)
        if self.fast:
            for layer in (*model.model.layers, model.model.norm):
                layer.compile()
            model.loss_function = torch.compile(model.loss_function)
        made: torch.nn.Module = model
        return made


class Bench(steps.Bench):
    """Runs variants as they are, or by the recipe."""

    def measure(self, variant: str, tokens: int) -> steps.Batch:
        if not self.of.fast:
            return super().measure(f"{variant}: default", tokens)
        super().measure(f"{variant}: {' + '.join(FAST)}", tokens)
        self.optimizer = None
        self.tidy()
        self.optimizer = compiled_adamw(list(self.model.parameters()))
        return super().measure(f"{variant}: {' + '.join((*FAST, ADAMW))}", tokens)


def main() -> None:
    given = common.parser(__doc__).parse_args()
    device = steps.join(given.device)
    limits = Limits(device)
    limits.wake()
    record: dict[str, Any] = {"environment": environment(limits), "results": [], "losses": {}}
    record["environment"] |= {"transformers": transformers.__version__}
    record["environment"] |= {"ranks": dist.get_world_size()}

    def done(row: dict[str, Any]) -> None:
        if dist.get_rank():
            return
        common.show(row)
        print(f"   {row['ratio']:.3f} times, {row['peak_gib']:.2f} GiB", flush=True)
        record["results"].append(row)
        given.json.write_text(json.dumps(record, indent=1) + "\n")

    bench = Bench(Qwen3(given.quick, device), [64 if given.quick else 8192], done)
    for variant, bench.of.fast in RUNS:
        torch._dynamo.reset()
        try:
            bench.run(variant)
        except Exception as failed:  # the same on every rank
            bench.say(f"failed: {variant}, fast {bench.of.fast}: {failed!r}"[:2000])
        if variant in bench.losses:
            name = ", ".join((variant, *FAST) if bench.of.fast else (variant,))
            record["losses"][name] = bench.losses.pop(variant)
    if not dist.get_rank():
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
