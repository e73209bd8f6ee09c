"""Training steps on several GPUs: experts by group= or by fully_shard, in FP8 or bf16.

    torchrun --standalone --nproc-per-node 2 benchmarks/several_gpus.py --json FILE [--model NAME]

Two models: eight blocks of Qwen3-30B's experts with Linears between, and six layers of Qwen3-30B in
transformers. Five ways each, one after the other, from the same weights: torch's bf16 experts under
fully_shard, FP8 experts under fully_shard, and both with the experts shared by group= and the rest
under fully_shard; and FP8 with a rank capacity, too. Measured: 20 losses of the whole batch, a step
(the slowest rank's median), and the peak of memory on rank 0. --profile prints where three more
steps of rank 0 spend their time: how long its GPU is busy, and the calls that take most of its
host.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import common
from common import environment
from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import MoEExperts, shard_experts
from timing import Limits
from torch_experts import TorchExperts

BASE = "bf16, fully_shard"
# Variant: the recipe, whether group= shares the experts, and a rank capacity of so many times the
# assignments of balanced routing (0: exact sizes, for which the host waits in each forward).
VARIANTS: dict[str, tuple[Fp8Recipe | None, bool, float]] = {
    BASE: (None, False, 0.0),
    "FP8, fully_shard": (Fp8Recipe(), False, 0.0),
    "FP8, group": (Fp8Recipe(), True, 0.0),
    "FP8, group, capacity": (Fp8Recipe(), True, 1.5),
    "bf16, group": (None, True, 0.0),
}
STEPS = 20  # of losses
QWEN = {"E": 128, "S": 8, "H": 2048, "I": 768}
TINY = {"E": 8, "S": 2, "H": 128, "I": 64}
Batch = tuple[Tensor, ...]
Capacity = tuple[int, int] | None


class Block(nn.Module):
    """x plus the experts of a Linear of x."""

    def __init__(self, shape: dict[str, int], experts: nn.Module, device: Any) -> None:
        super().__init__()
        options: Any = {"bias": False, "device": device, "dtype": torch.bfloat16}
        self.linear, self.experts = nn.Linear(shape["H"], shape["H"], **options), experts

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor) -> Tensor:
        out: Tensor = x + self.experts(self.linear(x), topk_idx, probs)
        return out


class Blocks(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, topk_idx, probs)
        return (x.float() - target).square().mean()


class EightBlocks:
    """Experts and Linears alone, under uniform random routing."""

    name = "eight blocks of Qwen3-30B's experts"

    def __init__(self, quick: bool, device: torch.device) -> None:
        self.shape, self.device = TINY if quick else QWEN, device
        self.layers = 2 if quick else 8

    def build(self, recipe: Fp8Recipe | None, group: bool, rank_capacity: Capacity) -> nn.Module:
        """The whole model on every rank, sharded then."""
        e, s, h, i = (self.shape[letter] for letter in "ESHI")
        blocks = []
        for _ in range(self.layers):
            experts: nn.Module = MoEExperts(e, h, i, recipe=recipe, device=self.device)
            if recipe is None and not group:
                experts = TorchExperts(experts, s)  # type: ignore[arg-type]
            blocks.append(Block(self.shape, experts, self.device))
            if group:  # block by block: the whole model's experts need not fit
                shard_experts(blocks[-1], dist.group.WORLD, rank_capacity=rank_capacity)
        return sharded(Blocks(blocks), blocks)

    def batch(self, tokens: int) -> Batch:
        e, s, h = (self.shape[letter] for letter in "ESH")
        x = torch.randn(tokens, h, device=self.device).bfloat16()
        topk_idx = torch.rand(tokens, e, device=self.device).topk(s).indices
        probs = torch.rand(tokens, s, device=self.device).softmax(-1)
        return x, topk_idx, probs, x.float().roll(1, dims=1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        made: Tensor = model(*batch)
        return made


class Qwen3:
    """transformers' own model, its router and attention included."""

    name = "six layers of Qwen3-30B in transformers"

    def __init__(self, quick: bool, device: torch.device) -> None:
        self.shape, self.device = TINY if quick else QWEN, device
        self.layers = 2 if quick else 6
        self.length = 32 if quick else 2048
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
        full = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        self.config: dict[str, Any] = {
            **(heads if quick else full),
            "vocab_size": 256 if quick else 32000,
            "num_hidden_layers": self.layers,
            "hidden_size": self.shape["H"],
            "moe_intermediate_size": self.shape["I"],
            "num_experts": self.shape["E"],
            "num_experts_per_tok": self.shape["S"],
            "norm_topk_prob": True,
        }

    def build(self, recipe: Fp8Recipe | None, group: bool, rank_capacity: Capacity) -> nn.Module:
        import transformers

        from fp8moe_cutlass.integrations import transformers as fp8moe

        config = transformers.Qwen3MoeConfig(**self.config)
        config._experts_implementation = "grouped_mm"
        with torch.device(self.device):
            of: Any = transformers.Qwen3MoeForCausalLM
            model = of._from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0) if p.ndim == 1 else p.normal_(0.0, 0.02)
        if recipe is not None or group:
            world = dist.group.WORLD if group else None
            fp8moe.swap(model, recipe=recipe, group=world, rank_capacity=rank_capacity)
        return sharded(model.train(), list(model.model.layers))

    def batch(self, tokens: int) -> Batch:
        size = (tokens // self.length, self.length)
        return (torch.randint(self.config["vocab_size"], size, device=self.device),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        (ids,) = batch
        made: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return made


def sharded(model: nn.Module, blocks: list[Any]) -> nn.Module:
    """fully_shard for each block and the rest, but for what is a DTensor already."""
    ignored: Any = {p for p in model.parameters() if hasattr(p, "full_tensor")}
    for block in blocks:
        fully_shard(block, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    return model


class Bench:
    """One model's variants."""

    def __init__(
        self,
        of: Any,
        tokens: list[int],
        done: Callable[[dict[str, Any]], None],
        profiled: bool = False,
    ) -> None:
        self.of, self.tokens, self.done, self.device = of, tokens, done, of.device
        self.profiled = profiled
        self.base: dict[int, float] = {}
        self.losses: dict[str, list[float]] = {}
        self.model: Any = None
        self.optimizer: Any = None

    def run(self, variant: str) -> None:
        began = time.monotonic()
        recipe, group, spare = VARIANTS[variant]
        for n, tokens in enumerate(self.tokens):
            if n == 0 or spare:
                self.model = self.optimizer = None
                self.tidy()
                torch.manual_seed(0)  # the same on all ranks: whole weights, before they are shared
                assignments = int(spare * tokens * self.of.shape["S"])
                rank_capacity = (tokens, assignments) if spare else None
                self.model = self.of.build(recipe, group, rank_capacity)
                self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
            if n == 0:
                self.losses[variant] = self.train()
            batch = self.measure(variant, tokens)
            if self.profiled:
                self.profile(batch)
        self.say(
            f"losses {self.losses[variant][0]:.4f} to {self.losses[variant][-1]:.4f}; "
            f"{time.monotonic() - began:.0f} s for {variant}"
        )
        self.model = self.optimizer = None

    def train(self) -> list[float]:
        """Of STEPS batches, the same in every variant; averages over the ranks."""
        torch.manual_seed(1 + dist.get_rank())
        losses = torch.stack([self.step(self.of.batch(self.tokens[0])) for _ in range(STEPS)])
        dist.all_reduce(losses)
        return [float(loss) / dist.get_world_size() for loss in losses]

    def step(self, batch: Batch) -> Tensor:
        loss: Tensor = self.of.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def profile(self, batch: Batch) -> None:
        """Three steps as the profiler sees them; it lengthens the host's share."""
        from torch.profiler import ProfilerActivity, profile

        cuda = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        first = dist.get_rank() == 0
        self.wait()
        start = time.perf_counter()
        with (
            profile(activities=[ProfilerActivity.CPU, *cuda])
            if first
            else contextlib.nullcontext() as seen
        ):
            for _ in range(3):
                self.step(batch)
            self.wait()
        if seen is None:
            return
        wall = 1e3 * (time.perf_counter() - start) / 3
        busy, end = 0.0, 0.0  # of any stream
        spans = [e.time_range for e in seen.events() if e.device_type.name == "CUDA"]
        for span in sorted(spans, key=lambda span: span.start):
            busy += max(0.0, span.end - max(span.start, end))
            end = max(end, span.end)
        self.say(
            f"   a step under the profiler: {wall:.1f} ms, its GPU busy for {busy / 3e3:.1f} ms"
        )
        names = seen.key_averages()
        self.say(names.table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=50))

    def measure(self, variant: str, tokens: int) -> Batch:
        """A row: the median of five rounds of three steps, after two steps to warm up."""
        torch.manual_seed(100 + dist.get_rank())
        batch: Batch = self.of.batch(tokens)
        for _ in range(2):
            self.step(batch)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(5):
            self.wait()
            start = time.perf_counter()
            for _ in range(3):
                self.step(batch)
            self.wait()
            times.append(1e3 * (time.perf_counter() - start) / 3)
        slowest = torch.tensor(times, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times = slowest.tolist()
        ms = statistics.median(times)
        self.base.setdefault(tokens, ms)
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        self.done(
            {
                "op": "step",
                "model": self.of.name,
                "shape": {"T": tokens, **self.of.shape, "layers": self.of.layers},
                "variant": variant,
                "ms": ms,
                "host_us": None,
                "bytes": 0,
                "flops": 0,
                "limit_ms": None,
                "peers": {BASE: self.base[tokens]},
                "ratio": self.base[tokens] / ms,
                "peak_gib": peak,
                "repeat": {"min": min(times), "max": max(times)},
                "dropped": self.dropped(),
            }
        )
        return batch

    def dropped(self) -> int:
        """Assignments and rows that found no place, of all steps so far, on all ranks."""
        layers = [m for m in self.model.modules() if isinstance(m, MoEExperts) and m.group]
        count = torch.zeros(1, dtype=torch.int64, device=self.device)
        for layer in layers:
            count += torch.as_tensor(layer.dropped).sum()
        dist.all_reduce(count)
        return int(count)

    def wait(self) -> None:
        """Until this device is idle and every rank is here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)


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
    models = {"blocks": EightBlocks, "qwen3": Qwen3}
    parser = common.parser(__doc__)
    parser.add_argument("--model", choices=models, help="this one alone")
    parser.add_argument("--variant", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--profile", action="store_true", help="where the time goes, to the log")
    given = parser.parse_args()
    device = join(given.device)
    try:
        run(given, device, [models[n] for n in models if given.model in (None, n)])
    finally:
        dist.destroy_process_group()


def run(given: argparse.Namespace, device: torch.device, models: list[Any]) -> None:
    import transformers

    first = dist.get_rank() == 0
    limits = Limits(device)
    limits.wake()
    record: dict[str, Any] = {"environment": environment(limits), "results": [], "losses": {}}
    record["environment"] |= {
        "transformers": transformers.__version__,
        "ranks": dist.get_world_size(),
        "nccl": _nccl() if device.type == "cuda" else None,
    }

    def done(row: dict[str, Any]) -> None:
        if first:
            common.show(row)
            print(
                f"   {row['ratio']:.3f} times, {row['peak_gib']:.2f} GiB, {row['dropped']} dropped",
                flush=True,
            )
            record["results"].append(row)
            given.json.write_text(json.dumps(record, indent=1) + "\n")

    began = time.monotonic()
    for model in models:
        tokens = [64, 128] if given.quick else [4096, 16384]
        bench = Bench(model(given.quick, device), tokens, done, given.profile)
        record["losses"][bench.of.name] = bench.losses
        for variant in given.variant:
            bench.run(variant)
    if first:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {given.json} in {time.monotonic() - began:.0f} s", flush=True)


def _nccl() -> str:
    from torch.cuda import nccl

    return ".".join(str(part) for part in nccl.version())  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
