"""MoEExperts(recipe=None) beside torch's bf16 at its best: forward and backward, and forward alone.

    python benchmarks/bf16_layer.py [--json FILE] [--kernels]
    torchrun --nproc-per-node 2 benchmarks/bf16_layer.py [--json FILE]

By torchrun: a training step of eight blocks of Qwen3-30B's experts, with Linears between and fused
AdamW. One side has recipe=None with group= and the Linears under fully_shard. The others have
torch's bf16 experts: on the rows of the same exchange, and all under fully_shard. A side's time is
the slowest rank's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fp8moe_cutlass.activation import SWIGLU
from fp8moe_cutlass.autograd.activation import forward_of
from fp8moe_cutlass.autograd.bf16 import sum_slots
from fp8moe_cutlass.autograd.body import Need
from fp8moe_cutlass.nn import MoEExperts, shard_experts
from layer import SHAPES
from torch_experts import TorchExperts

QUICK = {"tiny": {"E": 8, "S": 2, "H": 128, "I": 64}}
OURS, BEST, MOVED = "recipe=None", "torch bf16", "torch bf16, the same exchange"

Run = Callable[[], object]


def inputs(tokens: int, experts: int, slots: int, hidden: int, device: Any) -> tuple[Tensor, ...]:
    """x, topk_idx, probs and the gradient of the output."""
    x = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
    topk_idx = torch.rand(tokens, experts, device=device).topk(slots).indices
    probs = torch.rand(tokens, slots, device=device).softmax(-1).requires_grad_()
    return x, topk_idx, probs, torch.randn_like(x)


def measure(runs: dict[str, Run], count: int, rounds: int, device: Any) -> dict[str, float]:
    """Milliseconds per call of each run: `count` back to back, in turn, a round to warm up; the
    median of `rounds`."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            wait(device)
            start = time.perf_counter()
            for _ in range(count):
                run()
            wait(device)
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start) / count)
    return {name: statistics.median(taken) for name, taken in times.items()}


def wait(device: Any) -> None:
    """Until this device is idle and every rank is here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def peak(run: Run, device: Any) -> float:
    """GiB at the most during a call."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**30


def row(variant: str, runs: dict[str, Run], count: int, rounds: int, device: Any) -> dict[str, Any]:
    ms = measure(runs, count, rounds, device)
    gib = {name: peak(run, device) for name, run in runs.items()}
    ratio = ms[OURS] / ms[BEST]
    shown = ", ".join(f"{name} {ms[name]:.3f} ms {gib[name]:.2f} GiB" for name in runs)
    print(f"{variant}: {shown}; ratio {ratio:.3f}", flush=True)
    return {"variant": variant, "ms": ms, "ratio": ratio, "peak_gib": gib}


# ---- one GPU ------------------------------------------------------------------------------------


def layers(given: argparse.Namespace, device: Any) -> list[dict[str, Any]]:
    found = []
    for name, shape in (QUICK if given.quick else SHAPES["cuda"]).items():
        experts, slots, hidden, intermediate = (shape[letter] for letter in "ESHI")
        layer = MoEExperts(experts, hidden, intermediate, recipe=None, device=device)
        modules: dict[str, nn.Module] = {OURS: layer, BEST: TorchExperts(layer, slots)}
        for tokens in given.tokens:
            x, topk_idx, probs, dout = inputs(tokens, experts, slots, hidden, device)

            def step(module: nn.Module) -> None:
                for leaf in (x, probs, *module.parameters()):  # noqa: B023
                    leaf.grad = None
                module(x, topk_idx, probs).backward(dout)  # noqa: B023

            def infer(module: nn.Module) -> None:
                with torch.no_grad():
                    module(x, topk_idx, probs)  # noqa: B023

            for what, run in (("forward and backward", step), ("forward", infer)):
                runs: dict[str, Run] = {n: lambda m=m, f=run: f(m) for n, m in modules.items()}  # type: ignore[misc]
                found.append(row(f"{name}, T {tokens}, {what}", runs, 12, 5, device))
            if given.kernels:
                for who, module in modules.items():
                    print(who, kernels(lambda m=module: step(m)), sep="\n")  # type: ignore[misc]
        del layer, modules
        gc.collect()
    return found


def kernels(run: Run) -> str:
    """A table of what one call runs on the GPU, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    table: str = profiler.key_averages().table(
        sort_by="self_device_time_total", row_limit=25, max_name_column_width=70
    )
    return table


# ---- two GPUs and more --------------------------------------------------------------------------


class Moved(nn.Module):
    """torch's bf16 experts over the rows that the layer's own exchange brings: gathers, grouped_mm
    and a compiled SwiGLU under autograd."""

    def __init__(self, layer: MoEExperts) -> None:
        super().__init__()
        assert layer._exchange is not None
        self.move: Any = layer._move
        self.gate_up_proj, self.down_proj = layer.gate_up_proj, layer.down_proj

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor) -> Tensor:
        found: dict[str, Any] = {}
        rows, row_probs = _Bring.apply(x, probs, topk_idx, self.move, found)  # type: ignore[no-untyped-call]
        groups = found["groups"]
        order, row_of = groups.order, groups.row_of
        x_rows, p = _Spread.apply(rows, row_probs, order, row_of)  # type: ignore[no-untyped-call]
        gate_up, down = (_mine(w) for w in (self.gate_up_proj, self.down_proj))
        z = F.grouped_mm(x_rows, gate_up.transpose(1, 2), offs=groups.offsets)
        y = F.grouped_mm(forward_of(SWIGLU)(z, p), down.transpose(1, 2), offs=groups.offsets)
        sums = _Gather.apply(y, order, row_of)  # type: ignore[no-untyped-call]
        out: Tensor = _Return.apply(sums, self.move, found["route"])  # type: ignore[no-untyped-call]
        return out


def _mine(w: Any) -> Tensor:
    local: Tensor = w.to_local() if hasattr(w, "to_local") else w
    return local


class _Bring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, topk_idx: Tensor, move: Any, found: Any) -> Any:
        sent = move.send(x, topk_idx, probs, None, Need(True, True, True, True))
        arrived = move.receive(sent)
        found |= {"groups": arrived.plan, "route": arrived.route}
        ctx.move, ctx.route = move, arrived.route
        return arrived.rows, arrived.probs

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dprobs: Tensor) -> Any:
        returning = ctx.move.return_grads(dx, dprobs.contiguous(), ctx.route, True)
        return *ctx.move.receive_grads(returning, ctx.route), None, None, None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, move: Any, route: Any) -> Any:
        ctx.move, ctx.route = move, route
        return move.combine(sums, route)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return ctx.move.send_grad(dout, ctx.route, None, None)[0], None, None


class _Spread(torch.autograd.Function):
    """Tokens to the rows of their experts; assignments of other ranks (-1) have none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, order: Tensor, row_of: Tensor) -> Any:
        ctx.save_for_backward(row_of)
        return x[order // row_of.shape[1]], probs.flatten()[order]

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dp: Tensor) -> Any:
        (row_of,) = ctx.saved_tensors
        dprobs = dp[row_of.clamp(min=0)].masked_fill(row_of < 0, 0.0)
        return sum_slots(dx, row_of), dprobs, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, row_of: Tensor) -> Any:
        ctx.save_for_backward(order, row_of)
        return sum_slots(y.detach(), row_of)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        order, row_of = ctx.saved_tensors
        return dout[order // row_of.shape[1]], None, None


class Blocks(nn.Module):
    """x plus experts of a Linear of x, eight times."""

    def __init__(self, experts: list[nn.Module], hidden: int, device: Any) -> None:
        super().__init__()
        options: Any = {"bias": False, "device": device, "dtype": torch.bfloat16}
        self.linears = nn.ModuleList(nn.Linear(hidden, hidden, **options) for _ in experts)
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor) -> Tensor:
        for linear, experts in zip(self.linears, self.experts, strict=True):
            x = x + experts(linear(x), topk_idx, probs)
        return x


def group(given: argparse.Namespace, device: Any) -> list[dict[str, Any]]:
    shape = QUICK["tiny"] if given.quick else SHAPES["cuda"]["Qwen3-30B, 128 experts"]
    experts, slots, hidden, intermediate = (shape[letter] for letter in "ESHI")
    world: Any = dist.group.WORLD
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))

    def ours(torchs: bool = False) -> tuple[Blocks, torch.optim.Optimizer]:
        sizes: Any = (experts, hidden, intermediate)
        made = [MoEExperts(*sizes, recipe=None, group=world, device=device) for _ in range(8)]
        mine = {p for layer in made for p in shard_experts(layer, mesh)}
        used: list[nn.Module] = [Moved(layer) if torchs else layer for layer in made]
        blocks = Blocks(used, hidden, device)
        for linear in blocks.linears:
            fully_shard(linear, mesh=mesh)
        fully_shard(blocks, mesh=mesh, ignored_params=mine)
        return blocks, adamw(blocks.parameters())

    def moved() -> tuple[Blocks, torch.optim.Optimizer]:
        return ours(torchs=True)

    def best() -> tuple[Blocks, torch.optim.Optimizer]:
        made: list[nn.Module] = [
            TorchExperts(MoEExperts(experts, hidden, intermediate, recipe=None, device=device), 0)
            for _ in range(8)
        ]
        blocks = Blocks(made, hidden, device)
        for module in (*blocks.linears, *blocks.experts):
            fully_shard(module, mesh=mesh)
        fully_shard(blocks, mesh=mesh)
        return blocks, adamw(blocks.parameters())

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    found = []
    for tokens in given.tokens:
        x, topk_idx, probs, dout = inputs(tokens, experts, slots, hidden, device)
        results: dict[str, dict[str, Any]] = {}
        # The two with one exchange take turns; the third with its optimizer does not fit beside.
        for builds in ({OURS: ours, MOVED: moved}, {BEST: best}):
            made = {name: build() for name, build in builds.items()}

            def step(name: str, made: Any = made) -> None:
                blocks, optimizer = made[name]
                blocks(x, topk_idx, probs).backward(dout)  # noqa: B023
                optimizer.step()
                optimizer.zero_grad()

            runs: dict[str, Run] = {name: partial(step, name) for name in made}
            ms = measure(runs, 4, 5, device)
            slowest = torch.tensor([ms[name] for name in runs], device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            for name, time_of in zip(runs, slowest.tolist(), strict=True):
                # Of both that take turns the peak has both models.
                results[name] = {"ms": time_of, "peak_gib": peak(runs[name], device)}
            del made, step, runs
            gc.collect()
        ratio = {n: results[OURS]["ms"] / results[n]["ms"] for n in (MOVED, BEST)}
        variant = f"eight blocks, {dist.get_world_size()} ranks, T {tokens} per rank"
        found.append({"variant": variant, "ratio": ratio, **results})
        if dist.get_rank() == 0:
            print(f"{variant}: {results}; ratio {ratio}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--quick", action="store_true", help="a tiny shape: does it run?")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a step")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    # A side that runs eagerly would be another one.
    warnings.filterwarnings("error", message=r"\[MoEExperts\] torch cannot compile")
    torch.manual_seed(0)
    device = torch.device(given.device)
    if "RANK" in os.environ:
        if given.device == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
        results = group(given, device)
        first = dist.get_rank() == 0
        dist.destroy_process_group()
    else:
        results, first = layers(given, device), True
    if given.json and first:
        name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        record = {"device": name, "torch": torch.__version__, "results": results}
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
