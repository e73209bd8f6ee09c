"""Many steps of expert parallelism with random, unequal batches, beside one process.

Every rank draws its own number of tokens, none among them; the experts learn to give back what they
get, by SGD on the mean Huber loss of out - x over all tokens of all ranks. Rank 0 runs the same
experts by itself on the same tokens. Counted: what was dropped, memory at rest as it drifts, and
how far the two losses are apart. All random numbers depend on (step, rank) alone.
"""

from __future__ import annotations

import math
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common import OnResult, Record, environment, ignore, parser, show, write
from contender import Shape
from ep_team import Team
from fp8moe_cutlass.nn import MoEExperts
from launch import processes
from timing import Limits

RATE = 0.02
SHAPES: dict[str, Shape] = {
    "cuda": {"T": 4096, "S": 8, "E": 8, "H": 2048, "I": 768},
    "cpu": {"T": 48, "S": 2, "E": 2, "H": 256, "I": 128},
}
BOUND = 1e-4  # of the losses, relative: what bf16 partial sums may make of a run
DRIFT = 2**20  # bytes of the GPU's memory at rest, from the first quarter of the run to its end


class Soak:
    """One layer over the group and, on rank 0, the same layer by itself."""

    def __init__(self, team: Team, shape: Shape, transport: str = "nccl") -> None:
        self.team, self.shape = team, shape
        e, h, i = shape["E"] * team.size, shape["H"], shape["I"]
        torch.manual_seed(0)
        options: Any = {"dtype": torch.float32, "device": team.device}
        self.layer = MoEExperts(e, h, i, group=team.group, transport=transport, **options)
        torch.manual_seed(0)
        self.alone = MoEExperts(e, h, i, **options) if team.rank == 0 else None
        layers = [m for m in (self.layer, self.alone) if m is not None]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=RATE) for m in layers]

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] bf16, topk_idx and probs [T, S] of a rank in a step; T is 0 now and then."""
        device, (t, s) = self.team.device, (self.shape["T"], self.shape["S"])
        generator = torch.Generator(device).manual_seed(7919 * step + rank)
        most = torch.randint(-t // 8, t + 1, (1,), generator=generator, device=device)
        tokens = max(0, int(most))
        x = torch.randn(tokens, self.shape["H"], generator=generator, device=device)
        scores = torch.rand(tokens, self.layer.num_experts, generator=generator, device=device)
        # Experts are unequally liked, and not the same ones in every step.
        liked = torch.rand(self.layer.num_experts, generator=generator, device=device)
        probs, ids = (scores * liked).topk(s, dim=-1)
        return x.bfloat16(), ids, probs / probs.sum(dim=-1, keepdim=True).clamp(min=1e-9)

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """Both losses, on the device; that of the single process is NaN but on rank 0."""
        batches = [self.batch(number, rank) for rank in range(self.team.size)]
        elements = max(1, sum(x.numel() for x, _, _ in batches))
        loss = self._train(self.layer, self.optimizers[0], batches[self.team.rank], elements)
        dist.all_reduce(loss, group=self.team.group)
        if self.alone is None:
            return loss, torch.full_like(loss, math.nan)
        x, ids, probs = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return loss, self._train(self.alone, self.optimizers[1], (x, ids, probs), elements)

    def _train(
        self,
        layer: MoEExperts,
        optimizer: torch.optim.Optimizer,
        batch: tuple[Tensor, Tensor, Tensor],
        elements: int,
    ) -> Tensor:
        x, ids, probs = batch
        out = layer(x, ids, probs)
        loss = F.smooth_l1_loss(out.float(), x.float(), reduction="sum") / elements
        # The gradient of a mean over H elements is small; RATE is for one over tokens.
        torch.autograd.backward(loss * self.shape["H"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def memory(self) -> int:
        """Bytes at rest: allocated on the GPU; on the CPU what the process has resident."""
        if self.team.cuda:
            torch.cuda.synchronize(self.team.device)
            return torch.cuda.memory_allocated(self.team.device)
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()


def run_soak(
    team: Team,
    steps: int,
    shape: Shape | None = None,
    on_step: OnResult = ignore,
    transport: str = "nccl",
) -> Record:
    """The record of `steps` steps, the same on every rank. Raises what a step raises."""
    soak = Soak(team, shape or SHAPES[team.device.type], transport)
    every = max(1, steps // 20)
    memory = []
    losses = torch.zeros(2, steps, device=team.device)  # of the group, of one process
    for number in range(steps):
        losses[0, number], losses[1, number] = soak.step(number)
        if (number + 1) % every == 0:
            memory.append(soak.memory())
            loss = f"step {number + 1}: loss {float(losses[0, number]):.4f}"
            on_step({"op": "soak", "variant": loss, "shape": soak.shape})
    soak.layer.check()
    dist.broadcast(losses, group_src=0, group=team.group)
    a, b = losses.double().cpu()
    apart = (a - b).abs() / b.clamp(min=torch.finfo(torch.float32).tiny)
    tenth = max(1, steps // 10)
    settled = memory[len(memory) // 4 :]  # the first quarter is warm-up
    drift = team.reduce([float(settled[-1] - settled[0])], dist.ReduceOp.MAX)[0]
    return {
        "op": "soak",
        "shape": {"W": team.size, **soak.shape, "E": soak.layer.num_experts},
        "transport": transport,
        "steps": steps,
        "dropped": sum(soak.layer.dropped.tolist()) if soak.layer.dropped is not None else 0,
        "loss": a.tolist(),
        "loss_alone": b.tolist(),
        "deviation_max": float(apart.max()),
        "deviation_last_tenth": float(a[-tenth:].mean() / b[-tenth:].mean() - 1.0),
        "memory": memory,
        "memory_drift": int(drift),
        "passed": bool(apart.max() <= BOUND) and (not team.cuda or drift <= DRIFT),
    }


def main() -> None:
    """Exit code 1 if the losses part or memory grows."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=1000, help="at least 20")
    arguments.add_argument("--transport", choices=("nccl", "peer"), default="nccl")
    given = arguments.parse_args()
    steps = max(20, given.steps)
    with processes(given.ranks, torch.device(given.device)) as device:
        team = Team(dist.group.WORLD, device)
        shape = SHAPES["cpu" if given.quick else device.type]
        on_step = show if team.rank == 0 else ignore
        row = run_soak(team, steps, shape, on_step, given.transport)
        place = environment(Limits(device)) | {"ranks": team.size, "backend": dist.get_backend()}
        if team.rank == 0:
            write({"environment": place, "results": [row]}, given.json)
            print("passed" if row["passed"] else "FAILED")
    raise SystemExit(0 if row["passed"] else 1)


if __name__ == "__main__":
    main()
