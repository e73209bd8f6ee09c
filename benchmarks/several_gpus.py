"""Training steps of six layers of Qwen3-30B on several GPUs: experts by group= or by fully_shard.

In FP8 or bf16, as they are and by the recipe of docs/how-to/hugging-face.md:

    torchrun --standalone --nproc-per-node 2 benchmarks/several_gpus.py --json FILE

8,192 tokens per rank. The recipe compiles the layers one by one and the loss, with fused AdamW and
with a compiled one. Variants run one after the other from the same weights. Measured: 20 losses of
the whole batch, a step (the slowest rank's median), rank 0's host until a step is queued, and its
peak of memory.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import common
from common import environment
from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.integrations import transformers as fp8moe
from timing import Limits
from transformers_step import QWEN, TINY, adamw, initialize
from transformers_variants import ADAMW, LAYERS, LOSS, compiled_adamw

BASE = "bf16, fully_shard"
# Variant: the recipe, and the transport where group= shares the experts.
VARIANTS: dict[str, tuple[Fp8Recipe | None, str | None]] = {
    BASE: (None, None),
    "FP8, fully_shard": (Fp8Recipe(), None),
    "FP8, group": (Fp8Recipe(), "auto"),
    "FP8, group, NCCL": (Fp8Recipe(), "nccl"),
    "bf16, group": (None, "auto"),
}
FAST = " + ".join((LAYERS, LOSS))
# What is asked for first comes first: a run may end early.
RUNS = [
    (BASE, False),
    ("FP8, group", True),
    (BASE, True),
    ("FP8, fully_shard", True),
    ("FP8, group, NCCL", True),
    ("FP8, group", False),
    ("bf16, group", True),
]
STEPS = 20  # of losses


class Bench:
    """Runs variants; `done` gets their rows."""

    def __init__(self, quick: bool, device: torch.device, done: Callable[[Any], None]) -> None:
        self.device, self.done = device, done
        self.config = TINY if quick else QWEN.config
        self.tokens, self.length = (64, 32) if quick else (8192, 2048)
        self.base: float | None = None
        self.model: Any = None
        self.optimizer: Any = None

    def build(self, recipe: Fp8Recipe | None, transport: str | None, fast: bool) -> nn.Module:
        """The whole model on every rank, sharded then."""
        config = transformers.Qwen3MoeConfig(**self.config)
        config._experts_implementation = "grouped_mm"
        of: Any = transformers.Qwen3MoeForCausalLM
        with torch.device(self.device):
            model = of._from_config(config, dtype=torch.bfloat16)
        initialize(model)
        if transport is not None:
            fp8moe.swap(model, recipe=recipe, group=dist.group.WORLD, transport=transport)
        elif recipe is not None:
            fp8moe.swap(model, recipe=recipe)
        shared: Any = {p for p in model.parameters() if hasattr(p, "full_tensor")}
        for layer in model.model.layers:
            fully_shard(layer, ignored_params=shared)
        fully_shard(model, ignored_params=shared)
        if fast:
            for layer in (*model.model.layers, model.model.norm):
                layer.compile(fullgraph=True)
            model.loss_function = torch.compile(model.loss_function)
        made: nn.Module = model.train()
        return made

    def run(self, variant: str, fast: bool) -> list[float]:
        """Measures, and returns the losses of STEPS batches, the same in every variant."""
        self.free()
        self.model = None
        self.tidy()
        torch.manual_seed(0)  # the same on all ranks: whole weights, before they are shared
        self.model = self.build(*VARIANTS[variant], fast)
        self.optimizer = adamw(self.model.parameters())
        torch.manual_seed(1 + dist.get_rank())
        losses = torch.stack([self.step(self.batch()) for _ in range(STEPS)])
        dist.all_reduce(losses)
        self.measure(f"{variant}: {FAST if fast else 'default'}")
        if fast:
            self.free()
            self.optimizer = compiled_adamw(list(self.model.parameters()))
            self.measure(f"{variant}: {FAST} + {ADAMW}")
        return [float(loss) / dist.get_world_size() for loss in losses]

    def batch(self) -> Tensor:
        size = (self.tokens // self.length, self.length)
        return torch.randint(self.config["vocab_size"], size, device=self.device)

    def step(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def measure(self, variant: str) -> None:
        """A row: the median of five rounds of three steps, after two steps to warm up."""
        torch.manual_seed(100 + dist.get_rank())
        ids = self.batch()
        for _ in range(2):
            self.step(ids)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times, hosts = [], []
        for _ in range(5):
            self.wait()
            start = time.perf_counter()
            for _ in range(3):
                self.step(ids)
            hosts.append(1e6 * (time.perf_counter() - start) / 3)
            self.wait()
            times.append(1e3 * (time.perf_counter() - start) / 3)
        slowest = torch.tensor(times, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times = slowest.tolist()
        ms = statistics.median(times)
        self.base = self.base or ms
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        layers = self.config["num_hidden_layers"]
        self.done(
            {
                "op": "step",
                "model": "six layers of Qwen3-30B in transformers",
                "shape": {"T": self.tokens, "H": self.config["hidden_size"], "layers": layers},
                "variant": variant,
                "ms": ms,
                "host_us": statistics.median(hosts),
                "bytes": 0,
                "flops": 0,
                "limit_ms": None,
                "peers": {BASE: self.base},
                "ratio": self.base / ms,
                "peak_gib": peak,
                "repeat": {"min": min(times), "max": max(times)},
            }
        )

    def free(self) -> None:
        """The optimizer's states."""
        self.optimizer = None
        self.tidy()

    def wait(self) -> None:
        """Until this device is idle and every rank is here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def join(name: str) -> torch.device:
    """This rank's device, "cuda" or "cpu", once all ranks are one group: of one host, without
    NVLink multicast, whatever the machine has."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    cuda = name == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return device


def main() -> None:
    given = common.parser(__doc__).parse_args()
    device = join(given.device)
    first = dist.get_rank() == 0
    limits = Limits(device)
    limits.wake()
    record: dict[str, Any] = {"environment": environment(limits), "results": [], "losses": {}}
    record["environment"] |= {"transformers": transformers.__version__}
    record["environment"] |= {"ranks": dist.get_world_size()}

    def keep() -> None:
        if first:
            given.json.write_text(json.dumps(record, indent=1) + "\n")

    def done(row: dict[str, Any]) -> None:
        record["results"].append(row)
        keep()
        if first:
            common.show(row)
            print(f"   {row['ratio']:.3f} times, {row['peak_gib']:.2f} GiB", flush=True)

    bench = Bench(given.quick, device, done)
    for variant, fast in RUNS:
        torch._dynamo.reset()
        try:
            record["losses"][f"{variant}{', compiled' if fast else ''}"] = bench.run(variant, fast)
        except Exception as failed:  # the same on every rank
            print(f"failed: {variant}, fast {fast}: {failed!r}"[:2000], flush=True)
        keep()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
