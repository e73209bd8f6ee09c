"""Train a small GPT with MoE layers in Megatron-Core: FP8 experts beside Megatron's own.

    python examples/megatron_gpt_moe.py --out runs/megatron             # a process per GPU
    python examples/megatron_gpt_moe.py --ranks 2 --steps 60 --cpu      # gloo

Three runs from the same weights: Megatron's experts in bf16, ours on its dispatcher ("experts"),
and the whole layer with FP8 dispatch ("layer"). The experts are shared by all ranks. Writes each
run's distributed checkpoint to OUT/NAME, the losses to OUT/loss.json and a plot to OUT/loss.png.
Then every kind loads the checkpoint of Megatron's run.

Needs megatron-core 0.19.2; without a GPU, also tests/megatron_cpu.py of this repository.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

RUNS = ("megatron", "experts", "layer")
LABELS = {"megatron": "Megatron's experts, bf16", "experts": "FP8 experts", "layer": "FP8 layer"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/megatron"))
    parser.add_argument("--ranks", type=int, help="default: the number of GPUs, or 2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    given = parser.parse_args(arguments)
    given.cpu = given.cpu or not torch.cuda.is_available()
    given.ranks = given.ranks or (2 if given.cpu else torch.cuda.device_count())
    return given


def config(ranks: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_ffn_hidden_size=128,
        moe_router_topk=2,
        moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=ranks,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )


def build(run: str, given: argparse.Namespace) -> Any:
    """The model of a run under Megatron's DistributedDataParallel, from the same weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    from fp8moe_cutlass.integrations.megatron import swap

    made = config(given.ranks)

    def gpt(kind: str) -> Any:
        spec = get_gpt_layer_local_spec(num_experts=made.num_moe_experts)
        if kind != "megatron":
            spec = swap(spec, layer=kind == "layer")
        torch.manual_seed(0)
        return GPTModel(made, spec, vocab_size=256, max_sequence_length=given.length)

    model = gpt(run)
    if run != "megatron":
        model.load_state_dict(gpt("megatron").state_dict())
    model = Float16Module(made, model.cuda())
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(made, options, model)


def batch(step: int, given: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Sequences whose next token is one of two that follow from the last."""
    noise = torch.Generator().manual_seed(step * given.ranks + dist.get_rank())
    ids = torch.randint(256, (given.batch, given.length + 1), generator=noise)
    for s in range(1, given.length + 1):
        ids[:, s] = (5 * ids[:, s - 1] + ids[:, s] % 2) % 256
    hidden = torch.ones(given.length, given.length, dtype=torch.bool).triu(1)[None, None]
    given_ids = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    positions = torch.arange(given.length).expand(given.batch, -1)
    made = {**given_ids, "position_ids": positions, "attention_mask": hidden}
    return {name: t.cuda() for name, t in made.items()}


def mean_loss(model: Any, step: int, given: argparse.Namespace) -> torch.Tensor:
    loss: torch.Tensor = model(**batch(step, given)).float().mean()
    return loss


def over_ranks(loss: torch.Tensor) -> float:
    seen = loss.detach().clone()
    dist.all_reduce(seen)
    return float(seen) / dist.get_world_size()


def train(run: str, given: argparse.Namespace) -> list[float]:
    """The loss of every step; the checkpoint is in OUT/run."""
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = build(run, given)
    options: Any = {"optimizer": "adam", "lr": given.lr, "bf16": True}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(params_dtype=torch.bfloat16, **options), [model]
    )
    losses: list[float] = []
    with Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        disable=dist.get_rank() > 0,
    ) as bar:
        task = bar.add_task(run, total=given.steps, loss="-", speed="-")
        began = time.monotonic()
        for step in range(given.steps):
            model.zero_grad_buffer()
            loss = mean_loss(model, step, given)
            loss.backward()  # type: ignore[no-untyped-call]
            finalize_model_grads([model])
            optimizer.step()
            optimizer.zero_grad()
            losses.append(over_ranks(loss))
            tokens = (step + 1) * given.ranks * given.batch * given.length
            speed = f"{tokens / (time.monotonic() - began):,.0f}"
            bar.update(task, completed=step + 1, loss=f"{losses[-1]:.3f}", speed=speed)
    folder = given.out / run
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(model.module.sharded_state_dict(), str(folder))
    return losses


def loaded(run: str, given: argparse.Namespace) -> float:
    """The next loss of a model of this kind that loads the checkpoint of Megatron's run."""
    from megatron.core import dist_checkpointing

    model = build(run, given).module
    state = dist_checkpointing.load(model.sharded_state_dict(), str(given.out / "megatron"))
    model.load_state_dict(state)
    with torch.no_grad():
        return over_ranks(mean_loss(model, given.steps, given))


def plot(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run, points in losses.items():
        axes.plot(points, label=LABELS[run])
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def serve(rank: int, given: argparse.Namespace, port: int) -> None:
    """One rank."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {**where, "RANK": str(rank), "WORLD_SIZE": str(given.ranks)}
    if given.cpu:
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        import megatron_cpu

        megatron_cpu.on_cpu()
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=given.ranks, expert_tensor_parallel_size=1
    )
    if not given.cpu:
        model_parallel_cuda_manual_seed(0)
    losses: dict[str, list[float]] = {}
    for run in RUNS:
        losses[run] = train(run, given)
        if rank == 0:
            (given.out / "loss.json").write_text(json.dumps(losses, indent=1) + "\n")
            plot(losses, given.out / "loss.png")
    after = {LABELS[run]: f"{loaded(run, given):.4f}" for run in RUNS}
    if rank == 0:
        print(f"wrote {given.out / 'loss.json'} and {given.out / 'loss.png'}")
        print(f"next loss from the checkpoint of Megatron's run: {after}")
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=serve, args=(r, given, port)) for r in range(given.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
