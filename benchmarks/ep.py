"""Expert parallelism over N processes: dispatch, combine, and a step of the layer.

A row is what a group of W ranks does. `limit_ms` of an exchange is the bare all-to-all of the same
bytes; of the layer, its four bare exchanges and its arithmetic at the tensor peak. A rank has as
many tokens and experts for every W, so W ranks would take `alone_ms`, the time of the same layer
without a group, if exchanging cost nothing. The layer quantizes its weights in every step.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common import OnResult, Record, environment, ignore, parser, row, show, write
from contender import Contender, Inputs, Shape, block, routing
from ep_team import Bf16Layer, Legs, Team
from fp8moe_cutlass.distributed.exchange import TRANSPORTS
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.ops import packed_row_bytes
from launch import processes
from timing import Limits, Runs

WORLDS = (1, 2, 4, 8)
SPARE = 1.25  # rows of a rank capacity over the mean of a balanced routing
OURS, LIMIT = "fp8moe", "limit"
ALL_TO_ALL = "bf16 all-to-all alone"
SAME_EXCHANGE = "bf16 torch, same exchange"
STEP = "layer, forward+backward"


# What one rank has, its own experts.
SHAPES: dict[str, dict[str, Shape]] = {
    "cuda": {
        "DeepSeek-V3": block(4096, 32, 8, 7168, 2048),
        "Qwen3-235B": block(4096, 16, 8, 4096, 1536),
        "Qwen3-30B": block(4096, 16, 8, 2048, 768),
    },
    "cpu": {"small": block(256, 8, 4, 512, 256)},
    "quick": {"tiny": block(32, 4, 2, 256, 128)},
}


class Group:
    """All rows of one shape on one group of ranks."""

    def __init__(
        self, name: str, mine: Shape, team: Team, limits: Limits, quick: bool, transport: str
    ) -> None:
        self.name, self.mine, self.team, self.limits = name, mine, team, limits
        self.transport = transport
        self.shape = {"W": team.size, **mine, "E": mine["E"] * team.size}
        self.count = 8 if team.cuda else 1
        self.rounds = 1 if quick else 7 if team.cuda else 3
        torch.manual_seed(team.rank)

    def rows(self) -> Iterator[Record]:
        """Exact sizes under both routings, then fixed ones."""
        for kind in ("random", "zipf"):
            yield from self._rows(kind, None)
        yield from self._rows("random", self.rank_capacity())

    def rank_capacity(self) -> tuple[int, int]:
        """Rows of a pair of ranks and assignments of a rank: SPARE times a balanced routing's."""
        w, t, s, e = (self.shape[name] for name in "WTSE")
        ids = routing("random", t, e, s, self.team.device) // (e // w)
        pairs = sum(float((ids == rank).any(1).sum()) for rank in range(w)) / w
        # Each rank counts its own tokens; all must agree.
        rows = self.team.reduce([pairs], dist.ReduceOp.MAX)[0]
        return min(t, math.ceil(SPARE * rows)), math.ceil(SPARE * t * s)

    def _rows(self, kind: str, rank_capacity: tuple[int, int] | None) -> Iterator[Record]:
        e, h, i = (self.shape[name] for name in "EHI")
        device = self.team.device
        options: Any = {"rank_capacity": rank_capacity, "device": device}
        layer = MoEExperts(e, h, i, group=self.team.group, transport=self.transport, **options)
        inputs = Inputs.random(self.shape, device, kind)
        legs = Legs(layer, inputs)
        variant = f"{kind}, {'exact' if rank_capacity is None else f'capacity {SPARE}'}"
        yield from self._exchanges(legs, variant)
        yield from self._layers(layer, Bf16Layer(layer, rank_capacity), inputs, legs, variant)

    def _exchanges(self, legs: Legs, variant: str) -> Iterator[Record]:
        h, s = self.mine["H"], self.mine["S"]
        packed, gradient = packed_row_bytes(h, s), packed_row_bytes(h, 0)
        alone = legs.bare(2 * h)
        runs: Runs = {OURS: legs.dispatch, LIMIT: legs.bare(packed), ALL_TO_ALL: alone}
        yield self._row("dispatch", variant, legs, packed, runs)
        runs = {OURS: legs.dispatch_gradient, LIMIT: legs.bare(gradient), ALL_TO_ALL: alone}
        yield self._row("dispatch of a gradient", variant, legs, gradient, runs)
        runs = {OURS: legs.combine, LIMIT: legs.bare_back(2 * h)}
        yield self._row("combine", variant, legs, 2 * h, runs)

    def _layers(
        self, layer: MoEExperts, bf16: nn.Module, inputs: Inputs, legs: Legs, variant: str
    ) -> Iterator[Record]:
        contenders = {
            OURS: Contender(layer, inputs, reuse=False),
            SAME_EXCHANGE: Contender(bf16, inputs),
            "alone": Contender(*self._alone(layer), reuse=False),
        }
        h, s = self.mine["H"], self.mine["S"]
        there, gradient = packed_row_bytes(h, s), packed_row_bytes(h, 0)
        # A step's four exchanges, each alone: two of forward, two of backward.
        exchanges: Runs = {
            "dispatch": legs.bare(there),
            "combine": legs.bare_back(2 * h),
            "dispatch of a gradient": legs.bare(gradient),
            "combine of dx": legs.bare_back(2 * h),
        }
        bare = [s.ms for s in self.team.measure(exchanges, self.count, self.rounds).values()]
        for way, parts in (("forward", 1), ("forward+backward", 3)):
            runs: Runs = {n: c.forward if parts == 1 else c.step for n, c in contenders.items()}
            width, exchange = there + 2 * h, sum(bare[:2])
            if parts == 3:
                width, exchange = width + gradient + 2 * h + 4 * s, sum(bare)
            found = self._row(f"layer, {way}", variant, legs, width, runs)
            alone_ms = found["peers"].pop("alone")
            flops = parts * 6 * self.mine["T"] * s * h * self.mine["I"]
            if layer.dropped is not None:
                found["dropped"] = int(sum(self.team.reduce(layer.dropped.tolist())))
            yield found | {
                "flops": flops,
                "exchange_ms": exchange,
                "limit_ms": flops / self.limits.tensor_tflops / 1e9 + exchange,
                "alone_ms": alone_ms,
                "efficiency": alone_ms / found["ms"],
                "tokens_per_s": 1e3 * self.team.size * self.mine["T"] / found["ms"],
            }

    def _alone(self, layer: MoEExperts) -> tuple[MoEExperts, Inputs]:
        """As many tokens and assignments, all to this rank's experts, without a group."""
        e, h, i = (self.mine[name] for name in "EHI")
        single = MoEExperts(e, h, i, device=self.team.device)
        single.gate_up_proj, single.down_proj = layer.gate_up_proj, layer.down_proj
        shape = {**self.mine, "S": min(self.mine["S"], e)}
        return single, Inputs.random(shape, self.team.device)

    def _row(self, op: str, variant: str, legs: Legs, width: int, runs: Runs) -> Record:
        """width: bytes of one row on its way there (and back)."""
        samples = self.team.measure(runs, self.count, self.rounds)
        ours, limit = samples.pop(OURS), samples.pop(LIMIT, None)
        sent = self.team.mean(legs.rows_to_others())
        return row(
            op,
            self.shape,
            variant,
            ours,
            bytes=round(sent * width),
            limit_ms=limit.ms if limit else None,
            peers={name: sample.ms for name, sample in samples.items()},
            model=self.name,
            rows_sent=sent,  # to other ranks, the mean over the ranks
        )


def groups_of(device: torch.device) -> Iterator[Team]:
    """The first W ranks for each W, whether this rank is one or not; the others wait for them."""
    world = dist.get_world_size()
    for size in sorted({*(w for w in WORLDS if w < world), world}):
        group: Any = dist.new_group(list(range(size))) if size < world else dist.group.WORLD
        if dist.get_rank() < size:
            yield Team(group, device)
        dist.barrier()


def run_ep(
    device: torch.device,
    quick: bool = False,
    on_result: OnResult = ignore,
    transport: str = "nccl",
) -> Record:
    """The record of every group and shape; collective. The first rank alone reports rows. quick:
    one tiny shape, all ranks at once."""
    limits = Limits(device)
    results: list[Record] = []
    world: Any = dist.group.WORLD
    for team in [Team(world, device)] if quick else groups_of(device):
        for name, mine in SHAPES["quick" if quick else device.type].items():
            for found in Group(name, mine, team, limits, quick, transport).rows():
                results.append(found)
                if team.rank == 0:
                    on_result(found)
            gc.collect()
            if team.cuda:
                torch.cuda.empty_cache()
    version = torch.cuda.nccl.version() if device.type == "cuda" else ()  # type: ignore[no-untyped-call]
    backend = f"nccl {'.'.join(map(str, version))}" if version else "gloo"
    place = {"ranks": dist.get_world_size(), "backend": backend, "transport": transport}
    return {"environment": environment(limits) | place, "results": results}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, help="processes; default: a GPU each, or 2")
    arguments.add_argument("--transport", choices=TRANSPORTS, default="nccl", help="of the rows")
    given = arguments.parse_args()
    ranks = given.ranks or (torch.cuda.device_count() if given.device == "cuda" else 2)
    with processes(ranks, torch.device(given.device)) as device:
        first = dist.get_rank() == 0
        record = run_ep(device, given.quick, show if first else ignore, given.transport)
        if first:
            write(record, given.json)


if __name__ == "__main__":
    main()
