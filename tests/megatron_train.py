"""Training steps of the small GPT by Megatron's own schedules, as one rank runs them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megatron_cpu as mc
from fp8moe_cutlass import ops
from fp8moe_cutlass.nn import reuse_fp8_weights


class Trained(NamedTuple):
    """What a rank's training came to."""

    losses: list[float]  # of each step, of this rank's microbatches, where it has the last stage
    first: dict[str, Tensor]  # main_grad after the first step's backward, averaged over ranks
    weights: dict[str, Tensor]  # at the end
    quantized: int  # weights, of both projections


class Setup(NamedTuple):
    """A model, wrapped, and its optimizer."""

    chunks: list[Any]
    optimizer: Any
    config: Any

    def parameters(self) -> dict[str, Tensor]:
        return {
            f"{n}.{name}": p
            for n, chunk in enumerate(self.chunks)
            for name, p in chunk.module.named_parameters()
        }


def build(
    kind: str,
    config: Any,
    *,
    ddp: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    vpp: int | None = None,
    **swapped: Any,
) -> Setup:
    """The model of `kind` with SequentialMLP's weights."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config.finalize_model_grads_func = finalize_model_grads
    chunks = []
    for stage in range(vpp or 1):
        place: dict[str, Any] = {
            "pre_process": ps.is_pipeline_first_stage(ignore_virtual=vpp is None, vp_stage=stage),
            "post_process": ps.is_pipeline_last_stage(ignore_virtual=vpp is None, vp_stage=stage),
            "vp_stage": None if vpp is None else stage,
        }
        model = mc.gpt(kind, config, **swapped, **place)
        if kind != "sequential":
            model.load_state_dict(mc.gpt("sequential", config, **place).state_dict())
        if config.bf16:
            model = Float16Module(config, model)
        options: Any = {"grad_reduce_in_fp32": True, "bucket_size": 20_000, **(ddp or {})}
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(**options), model)
        if options.get("overlap_grad_reduce"):
            config.no_sync_func = wrapped.no_sync
        chunks.append(wrapped)
    if vpp is not None and config.no_sync_func is not None:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
    made = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=bool((ddp or {}).get("use_distributed_optimizer")),
            overlap_param_gather=bool((ddp or {}).get("overlap_param_gather")),
            **(optimizer or {}),
        ),
        chunks,
    )
    return Setup(chunks, made, config)


def steps(
    setup: Setup, number: int, microbatches: int = 2, first: int = 0, reuse: bool = False
) -> Trained:
    """`number` steps from step `first` on; each data-parallel rank has batches of its own. reuse:
    FP8 weights, by reuse_fp8_weights."""
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks, optimizer = setup.chunks, setup.optimizer
    counted = 0
    quantize_weight = ops.quantize_weight

    def counting(*args: Any, **how: Any) -> Any:
        nonlocal counted
        counted += how.get("transposed") != "only"  # which a backward asks for
        return quantize_weight(*args, **how)

    ops.quantize_weight = counting
    losses, grads = [], {}
    try:
        for step in range(first, first + number):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            rank, ranks = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
            seeds = [(step * microbatches + m) * ranks + rank for m in range(microbatches)]
            with reuse_fp8_weights(chunks[0]) if reuse else contextlib.nullcontext():
                reports = get_forward_backward_func()(
                    forward_step_func=_forward_step,
                    data_iterator=[_batches(seeds) for _ in chunks],
                    model=chunks,
                    num_microbatches=microbatches,
                    seq_length=mc.SEQUENCE,
                    micro_batch_size=mc.BATCH,
                    forward_only=False,
                )
            losses += [sum(reports) / len(reports)] if reports else []
            if step == first:
                grads = {k: p.main_grad.clone() for k, p in setup.parameters().items()}
            assert optimizer.step()[0]
    finally:
        ops.quantize_weight = quantize_weight
    for chunk in chunks:  # those that are gathered before a forward
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    held = {k: p.detach().float().clone() for k, p in setup.parameters().items()}
    return Trained(losses, grads, held, counted)


def _batches(seeds: list[int]) -> Iterator[dict[str, Tensor]]:
    return (mc.batch(seed) for seed in seeds)


def _forward_step(data: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    given = next(data)

    def loss(output: Tensor) -> Any:
        mean = output.float().mean()
        return mean, mean.detach().item()

    if return_schedule_plan:
        return model.build_schedule_plan(**given), loss
    return model(**given), loss


def of_experts(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of experts, stacked under one name for each projection; SequentialMLP's, too."""
    found: dict[str, list[Tensor]] = {}
    for key, grad in grads.items():  # by expert: SequentialMLP's ascend, ours descend
        match = re.fullmatch(
            r"(.*mlp\.experts\.)(?:local_experts\.(\d+)\.)?(linear_fc[12])\.weight(\d*)", key
        )
        if match is not None:
            before, theirs, linear, ours = match.groups()
            found.setdefault(before + linear, []).insert(0 if ours else len(grads), grad)
            assert (theirs is None) == bool(ours)
    return {key: torch.stack(of) for key, of in found.items()}


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative error, by norm, of any of them."""
    assert found.keys() == wanted.keys()
    return max(float((found[k] - w).norm() / w.norm()) for k, w in wanted.items())
