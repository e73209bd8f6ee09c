"""A torchtitan model's training step: its own experts in bf16 beside ours and torchao's.

    python benchmarks/torchtitan_step.py --json FILE [--compiled] [--who NAME ...] [--words N]
    torchrun --standalone --nproc-per-node 2 benchmarks/torchtitan_step.py --json FILE [--ep] ...

Four layers of Qwen3-30B-A3B by torchtitan's own model code, without its Trainer: forward, backward
and AdamW on 8192 tokens per rank. All models are in one process and take turns. One process trains
bf16 parameters; several by torchtitan's FSDP, fp32 parameters computed in bf16; or with --ep bf16
parameters, and the ranks share the experts. Attention is torch's own in the place of FlexAttention,
which is tuned for minutes. Everything is eager, or each block compiled (--compiled). With --graphs
forward and backward run as one CUDA graph, the default of torchtitan's Trainer on one rank.
--words: the vocabulary, 2048 as of torchtitan's debug models; Qwen3's has 151936, whose head takes
half as long as four layers. --who: those beside torchtitan's own: our layer, our experts, torchao's
rowwise FP8 by torchtitan's converter. A second run with the same --json adds its rows.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import common
from common import environment
from timing import Limits

OWN = "torchtitan bf16"
OTHERS = {
    "layer": "fp8moe, the layer",
    "experts": "fp8moe, the experts",
    "rowwise": "torchao rowwise FP8",
}
ROUNDS, COUNT = 5, 4


class Bench:
    def __init__(self, device: torch.device, given: argparse.Namespace) -> None:
        self.device, self.quick, self.compiled = device, given.quick, given.compiled
        self.words, self.ep, self.graphs = given.words, given.ep, given.graphs
        self.ranks, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.batch, self.length = (1, 64) if self.quick else (2, 4096)
        from torch.nn.attention.flex_attention import create_block_mask

        sizes = (None, None, self.length, self.length)  # of any batch and head
        self.mask = create_block_mask(lambda b, h, q, k: q >= k, *sizes, str(device))
        self.positions = torch.arange(self.length, device=device).repeat(self.batch, 1)
        self.count = torch.ones((), device=device)
        plain_attention()
        if self.compiled:  # as torchtitan's apply_compile
            torch._dynamo.config.capture_scalar_outputs = True
        if self.ranks > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def config(self, who: str) -> Any:
        """The model's, with what replaces its experts."""
        from torchtitan.components.quantization import Float8GroupedExpertsConverter
        from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
        from torchtitan.models.qwen3 import model_registry
        from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

        from fp8moe_cutlass.integrations.torchtitan import fp8moe_experts, fp8moe_layer

        rowwise: list[Any] = []
        if who == OTHERS["rowwise"]:
            rowwise.append(Float8GroupedExpertsConverter.Config(model_compile_enabled=True))
        flavor = "debugmodel_moe" if self.quick else "30B-A3B"
        config = model_registry(flavor, converters=rowwise or None).model
        config.layers = config.layers[: 2 if self.quick else 4]
        config.vocab_size = config.tok_embeddings.num_embeddings = self.words
        config.lm_head.out_features = self.words
        if self.ranks > 1:
            set_qwen3_sharding_config(config, enable_sp=True, enable_ep=self.ep)
        replaced: Any = {
            OTHERS["layer"]: (RoutedExperts, fp8moe_layer),
            OTHERS["experts"]: (GroupedExperts, fp8moe_experts),
        }
        if who in replaced:
            target, factory = replaced[who]
            for _, cfg, parent, name in list(config.traverse(target.Config)):
                setattr(parent, name, factory(cfg))
        return config

    def build(self, who: str) -> tuple[Any, Any, Any]:
        """The model, every time with the same weights, its optimizer, and its forward and
        backward."""
        with torch.device("meta"):
            model = self.config(who).build()
        if self.ranks > 1:
            model = self.parallel(model)
        else:
            model = model.bfloat16()
            if self.compiled:
                for layer in model.layers.values():
                    layer.compile(fullgraph=True)
        model.to_empty(device=self.device)
        torch.manual_seed(1)
        with torch.no_grad():
            model.init_weights(buffer_device=self.device)
            # Of 0.02, attention's mean would outgrow it: all tokens would choose the same experts.
            model.tok_embeddings.weight.normal_()
        experts = list(experts_of(model))  # with expert parallelism over a mesh of their own
        known = set(experts)
        groups: Any = [[p for p in model.parameters() if p not in known], experts]
        groups = [{"params": group} for group in groups]
        optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=self.device.type == "cuda")

        def run(tokens: Tensor, labels: Tensor, count: Any, more: dict[str, Any]) -> Tensor:
            out = model(tokens, **more)
            loss = F.cross_entropy(out.flatten(0, 1), labels.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        if not self.graphs:
            return model, optimizer, run
        from torchtitan.distributed.cudagraph import wrap_with_cuda_graph

        return model, optimizer, wrap_with_cuda_graph(run)

    def parallel(self, model: Any) -> Any:
        """FSDP by torchtitan's own function. With expert parallelism that needs a newer torch than
        2.11: by hand then, bf16 parameters, the experts' whole ones beside fully_shard."""
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed import utils
        from torchtitan.distributed.parallel_dims import ParallelDims
        from torchtitan.models.qwen3.parallelize import parallelize_qwen3

        backend: Any = "partial_dtensor"  # the default needs a newer torch
        utils.set_spmd_backend(backend)
        degree = self.ranks if self.ep else 1
        how = ParallelismConfig(expert_parallel_degree=degree, spmd_backend=backend)
        dims = ParallelDims.from_config(how, self.ranks)
        dims.build_mesh()
        if not self.ep:
            return parallelize_qwen3(
                model,
                parallel_dims=dims,
                training=TrainingConfig(),
                parallelism=how,
                compile_config=CompileConfig(enable=self.compiled),
                ac_config=None,
                dump_folder="",
            )
        model = model.bfloat16()
        model.parallelize(dims)
        experts = set(experts_of(model))
        for layer in model.layers.values():
            if self.compiled:
                layer.compile(fullgraph=True)
            fully_shard(layer, mesh=dims.get_mesh("fsdp"), ignored_params=experts)
        fully_shard(model, mesh=dims.get_mesh("fsdp"), ignored_params=experts)
        return model

    def step(self, made: tuple[Any, Any, Any], ids: Tensor) -> Tensor:
        _, optimizer, run = made
        tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        more = {"positions": self.positions, "attention_masks": self.mask}
        loss: Tensor = run(tokens, labels, self.count, more)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not self.graphs)
        return loss

    def ids(self, step: int) -> Tensor:
        """What follows a token depends on it."""
        draw = torch.Generator().manual_seed(self.ranks * step + self.rank)
        noise = torch.randint(4, (self.batch, self.length + 1), generator=draw)
        made = noise.clone()
        for s in range(1, self.length + 1):
            made[:, s] = (5 * made[:, s - 1] + noise[:, s]) % 512
        return made.to(self.device)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def slowest(self, seconds: float) -> float:
        if self.ranks == 1:
            return seconds
        worst = torch.tensor(seconds, device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def together(self, *who: str) -> list[dict[str, Any]]:
        """A row for each: ms of a step in turn, as the slowest rank sees it, after some to warm up;
        10 losses before, of the first rank."""
        ids = [self.ids(step) for step in range(10)]
        models = {name: self.build(name) for name in who}
        losses = {
            name: [float(self.step(made, batch)) for batch in ids[: 3 if self.quick else 10]]
            for name, made in models.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in who}
        for _ in range(1 if self.quick else ROUNDS):
            for name, made in models.items():
                self.step(made, ids[0])
                self.sync()
                self.slowest(0.0)
                start = time.perf_counter()
                for batch in ids[:COUNT]:
                    self.step(made, batch)
                self.sync()
                seconds = self.slowest(time.perf_counter() - start)
                taken[name].append(1e3 * seconds / COUNT)
        tokens, ranks = self.batch * self.length, self.ranks
        how = "compiled" if self.compiled else "eager"
        how += ", CUDA graphs" if self.graphs else ""
        if ranks > 1:
            how += ", expert parallelism" if self.ep else ", FSDP"
        shape = {"layers": len(models[OWN][0].layers), "T": tokens, "V": self.words, "ranks": ranks}
        return [
            {
                "op": "torchtitan step",
                "shape": shape,
                "variant": how,
                "who": name,
                "ms": statistics.median(times),
                "tokens_per_s": 1e3 * ranks * tokens / statistics.median(times),
                "limit_ms": None,
                "peers": {},
                "times_own": statistics.median(taken[who[0]]) / statistics.median(times),
                "repeat": {"min": min(times), "max": max(times)},
                "losses": losses[name],
            }
            for name, times in taken.items()
        ]


def experts_of(model: Any) -> Iterator[Any]:
    """The parameters of all experts."""
    for layer in model.layers.values():
        yield from layer.moe.routed_experts.inner_experts.parameters()


def plain_attention() -> None:
    from torchtitan.models.common.attention import FlexAttention

    def plain(q: Tensor, k: Tensor, v: Tensor, *, scale: Any, enable_gqa: bool, **_: Any) -> Any:
        how: Any = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(q, k, v, **how), None

    FlexAttention._compiled_flex_attn = staticmethod(plain)


def older_torch() -> None:
    """Stand-ins for what torchtitan 0.3.0 names and torch 2.11 lacks. Nothing here comes to them
    but the question of the second, whose answer is no."""
    fsdp: Any = torch.distributed.fsdp
    compiler: Any = torch.compiler
    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = object
    if not hasattr(compiler, "_is_non_strict_tracing"):
        compiler._is_non_strict_tracing = lambda: False


def run(device: torch.device, given: argparse.Namespace, on_result: common.OnResult) -> Any:
    older_torch()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        sys.path.append(str(Path(__file__).parent.parent / "tests"))
        import titan_cpu

        titan_cpu.on_cpu()
    bench = Bench(device, given)
    rows = bench.together(OWN, *(OTHERS[name] for name in given.who))
    for row in rows if bench.rank == 0 else ():
        on_result(row)
        print(f"  {row['tokens_per_s']:.0f} tokens/s, {row['times_own']:.3f} times {OWN}")
    gc.collect()
    if bench.ranks > 1:
        dist.destroy_process_group()
    if bench.rank:
        raise SystemExit
    return {
        "environment": environment(Limits(device)),
        "results": [*common.earlier(given.json), *rows],
    }


if __name__ == "__main__":
    arguments = common.parser(__doc__)
    arguments.add_argument("--compiled", action="store_true", help="each block by torch.compile")
    arguments.add_argument("--graphs", action="store_true", help="torchtitan's, of both passes")
    arguments.add_argument("--ep", action="store_true", help="the ranks share the experts")
    arguments.add_argument("--who", nargs="+", choices=OTHERS, default=["layer", "experts"])
    arguments.add_argument("--words", type=int, default=2048, help="the vocabulary")
    common.main(arguments, run)
