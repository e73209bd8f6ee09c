"""Megatron-Core's GPT on two GPUs: TEGroupedMLP beside our experts and our layer.

    python benchmarks/megatron_step.py --json FILE [--model NAME] [--part together|alone]
        [--variant NAME]

megatron-core and TransformerEngine's layer spec, expert parallelism of the two, DDP with fp32
main_grad. "together": every variant in one process, taking turns; forward and backward of the
whole model, as the slowest rank sees them. "alone": each variant in processes of its own, from the
same weights; the peak of memory of a forward and backward, and 50 losses under Megatron's Adam.
FP8 weights are quantized in every forward. With --device cpu the baseline is SequentialMLP.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import common
from common import environment
from timing import Limits

BASE, FP8, EXPERTS, LAYER = "TE bf16", "TE FP8 blockwise", "our experts", "our layer"
VARIANTS = (BASE, FP8, EXPERTS, LAYER)
RANKS, STEPS = 2, 50


def sizes(layers: int, hidden: int, intermediate: int, experts: int, topk: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "moe_ffn_hidden_size": intermediate,
        "ffn_hidden_size": intermediate,
        "num_moe_experts": experts,
        "moe_router_topk": topk,
    }


QWEN = {"num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128}
V3 = {"num_attention_heads": 56, "num_query_groups": 8, "kv_channels": 128}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b": sizes(3, 2048, 768, 64, 8) | QWEN,
    "deepseek-v3": sizes(1, 7168, 2048, 16, 4) | V3,
}
ABOUT = {
    "qwen3-30b": "three layers of Qwen3-30B's sizes, 64 experts",
    "deepseek-v3": "one layer of DeepSeek-V3's sizes, 16 experts",
    "tiny": "tiny",
}
TINY = sizes(2, 128, 96, 8, 2) | {"num_attention_heads": 4}


class Bench:
    """One rank. Batches are [2, T / 2] tokens."""

    def __init__(self, model: str, device: str, quick: bool) -> None:
        self.gpu = device == "cuda"
        self.sizes = TINY if quick else MODELS[model]
        self.vocabulary, self.tokens = (256, 128) if quick else (32000, 8192)
        self.rank = dist.get_rank()

    def config(self, variant: str) -> Any:
        from megatron.core.transformer.transformer_config import TransformerConfig

        options: dict[str, Any] = {
            "expert_model_parallel_size": RANKS,
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "embedding_init_method_std": 1.0,  # of 0.02, tokens may choose the same experts
            "normalization": "RMSNorm" if self.gpu else "LayerNorm",
            "qk_layernorm": self.gpu,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-3,
            "bias_activation_fusion": self.gpu,
            "bias_dropout_fusion": self.gpu,
            "apply_rope_fusion": self.gpu,
            "moe_grouped_gemm": self.gpu,
            "moe_permute_fusion": self.gpu,
            "gradient_accumulation_fusion": self.gpu,
            "masked_softmax_fusion": False,
            "use_cpu_initialization": not self.gpu,
            "transformer_impl": "transformer_engine" if self.gpu else "local",
        }
        if variant == FP8 and self.gpu:
            options |= {"fp8": "e4m3", "fp8_recipe": "blockwise"}
        return TransformerConfig(**self.sizes, **options)

    def build(self, variant: str) -> Any:
        """A model under Megatron's DistributedDataParallel."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_local_spec,
            get_gpt_layer_with_transformer_engine_spec,
        )
        from megatron.core.transformer.module import Float16Module

        from fp8moe_cutlass.integrations.megatron import swap

        config = self.config(variant)
        experts = config.num_moe_experts
        spec = (
            get_gpt_layer_with_transformer_engine_spec(experts, True, qk_layernorm=True)
            if self.gpu
            else get_gpt_layer_local_spec(experts, False)
        )
        if variant in (EXPERTS, LAYER):
            spec = swap(spec, layer=variant == LAYER)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=self.vocabulary,
            max_sequence_length=self.tokens // 2,
            position_embedding_type="rope",
        )
        wrapped = Float16Module(config, model.cuda())
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        return DistributedDataParallel(config, options, wrapped)

    def batch(self, step: int) -> dict[str, Any]:
        """What follows a token depends on it; of the first 512 ids, so that losses fall."""
        seen = min(self.vocabulary, 512)
        noise = torch.Generator().manual_seed(RANKS * step + self.rank)
        ids = torch.randint(seen, (2, self.tokens // 2 + 1), generator=noise)
        for s in range(1, ids.shape[1]):
            ids[:, s] = (5 * ids[:, s - 1] + ids[:, s] % 4) % seen
        length = self.tokens // 2
        given: dict[str, Any] = {
            "input_ids": ids[:, :-1].contiguous().cuda(),
            "position_ids": torch.arange(length).expand(2, -1).cuda(),
            "labels": ids[:, 1:].contiguous().cuda(),
            "attention_mask": None,
        }
        if not self.gpu:
            given["attention_mask"] = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        return given

    def step(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Forward and backward; as Megatron's schedules, the first microbatch is announced."""
        model.zero_grad_buffer()
        model.module.module.set_is_first_microbatch()
        loss: Tensor = model(**batch).float().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def together(self) -> dict[str, Any]:
        """{variant: ms of each of the rounds}, in turn, after one to warm up."""
        batch = self.batch(0)
        models = {variant: self.build(variant) for variant in self.variants()}
        taken: dict[str, list[float]] = {variant: [] for variant in models}
        count = 8 if self.gpu else 1
        for turn in range(7 if self.gpu else 2):
            for variant, model in models.items():
                for _ in range(1 if turn else 3):  # its own state of the caches and clocks
                    self.step(model, batch)
                torch.cuda.synchronize()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(count):
                    self.step(model, batch)
                torch.cuda.synchronize()
                if turn:
                    taken[variant].append(self.slowest((time.perf_counter() - start) / count))
        return {variant: [1e3 * t for t in times] for variant, times in taken.items()}

    def alone(self, variant: str) -> dict[str, Any]:
        """The peak in GiB, and the losses from the weights of the seed."""
        state = self.build(BASE).module.module.state_dict()
        state = {k: v.cpu() for k, v in state.items() if "_extra_state" not in k}
        self.tidy()
        model = self.build(variant)
        absent = model.module.module.load_state_dict(state, strict=False)
        wrong = [k for k in (*absent.missing_keys, *absent.unexpected_keys) if "_extra" not in k]
        assert not wrong, wrong
        del state
        batch = self.batch(0)
        self.step(model, batch)
        self.tidy()
        peak = 0.0
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
            self.step(model, batch)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**30
        return {"peak_gib": peak, "losses": self.losses(model)}

    def losses(self, model: Any) -> list[float]:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        options: Any = {"optimizer": "adam", "lr": 3e-4, "bf16": True}
        optimizer = get_megatron_optimizer(
            OptimizerConfig(params_dtype=torch.bfloat16, **options), [model]
        )
        found = []
        for step in range(STEPS if self.gpu else 3):
            loss = self.step(model, self.batch(step))
            finalize_model_grads([model])
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss)
            found.append(round(float(loss) / RANKS, 5))
        return found

    def variants(self) -> list[str]:
        return [v for v in VARIANTS if self.gpu or v != FP8]

    def slowest(self, seconds: float) -> float:
        worst = torch.tensor(seconds).cuda()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def tidy(self) -> None:
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()


def serve(rank: int, given: argparse.Namespace, model: str, variant: str | None, out: str) -> None:
    """One rank of one part; rank 0 writes what it found."""
    store = f"file://{out}.store"
    if given.device == "cpu":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        import megatron_cpu

        megatron_cpu.on_cpu()
        dist.init_process_group("gloo", store, rank=rank, world_size=RANKS)
    else:
        sys.modules.setdefault("fused_weight_gradient_mlp_cuda", _accumulation())
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", store, rank=rank, world_size=RANKS)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=RANKS, expert_tensor_parallel_size=1
    )
    torch.manual_seed(1)
    if given.device == "cuda":
        model_parallel_cuda_manual_seed(1)
    bench = Bench(model, given.device, given.quick)
    found = bench.together() if variant is None else bench.alone(variant)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _accumulation() -> Any:
    """What Apex gives Megatron's own linears, here the output layer's, for
    gradient_accumulation_fusion. TransformerEngine's have their own."""
    made: Any = ModuleType("fused_weight_gradient_mlp_cuda")

    def accumulate(x: Tensor, dout: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(dout.t() @ x)

    made.wgrad_gemm_accum_fp32 = made.wgrad_gemm_accum_fp16 = accumulate
    return made


def on_ranks(given: argparse.Namespace, model: str, variant: str | None) -> dict[str, Any]:
    """What the ranks of one part found, in processes of their own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "found.json")
        ranks = [
            context.Process(target=serve, args=(rank, given, model, variant, out))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"{model}, {variant or 'together'}: a rank failed")
        found: dict[str, Any] = json.loads(Path(out).read_text())
        return found


def rows(name: str, taken: dict[str, list[float]], tokens: int) -> list[dict[str, Any]]:
    """A row per variant of ours and of TransformerEngine's FP8, beside its bf16."""
    ms = {variant: statistics.median(times) for variant, times in taken.items()}
    return [
        {
            "op": "forward and backward",
            "model": ABOUT[name],
            "shape": {"T": tokens, "ranks": RANKS},
            "variant": variant,
            "ms": ms[variant],
            "host_us": None,
            "bytes": 0,
            "flops": 0,
            "limit_ms": None,
            "peers": {v: ms[v] for v in (BASE, FP8) if v in ms and v != variant},
            "ratio": ms[BASE] / ms[variant],
            "tokens_per_s": RANKS * tokens / ms[variant] * 1e3,
            "repeat": {"min": min(times), "max": max(times)},
        }
        for variant, times in taken.items()
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    parser.add_argument("--part", choices=("together", "alone"), help="this one alone")
    parser.add_argument("--variant", choices=VARIANTS, help="this one alone, of part alone")
    given = parser.parse_args()
    began = time.monotonic()
    names = ["tiny"] if given.quick else [m for m in MODELS if given.model in (None, m)]
    record: dict[str, Any] = {"environment": {}, "results": [], "alone": {}}

    def step(what: Callable[[], None]) -> None:
        what()
        given.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"   {time.monotonic() - began:.0f} s", flush=True)

    def together(name: str) -> None:
        for row in rows(name, on_ranks(given, name, None), 128 if given.quick else 8192):
            common.show(row)
            print(f"   {row['ratio']:.3f} times TE bf16's speed", flush=True)
            record["results"].append(row)

    def alone(name: str, variant: str) -> None:
        found = on_ranks(given, name, variant)
        print(f"{name}, {variant}: {found['peak_gib']:.2f} GiB, losses", found["losses"][::10])
        record["alone"].setdefault(ABOUT[name], {})[variant] = found

    limits = Limits(torch.device(given.device))
    limits.wake()
    record["environment"] = environment(limits)
    for name in names:
        if given.part != "alone":
            step(lambda name=name: together(name))  # type: ignore[misc]
        if given.part != "together":
            for variant in VARIANTS if given.variant is None else (given.variant,):
                if given.device == "cuda" or variant != FP8:
                    step(lambda name=name, v=variant: alone(name, v))  # type: ignore[misc]
    print(f"wrote {given.json} in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
