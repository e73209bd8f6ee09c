"""Expert parallelism beside its limits: dispatch, combine, and the whole layer, under torchrun.

Every row is what a group of W ranks does: calls in turn with their peers, ranks beginning together,
the slowest one's time. `limit_ms` of an exchange is the bare all-to-all of the same bytes; of the
layer, its four bare exchanges and its arithmetic at the tensor peak. Weak scaling: tokens and
experts of a rank are the same for every W, so `alone_ms`, the same layer without a group, is what
W ranks would take if exchanging cost nothing. `captured_ms`, of a capacity on GPUs, is the step
replayed from a CUDA graph: what the host costs is the difference.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.ops import packed_row_bytes

from .ep_runs import Bf16Peer, Legs, Team
from .layer import block
from .layer_runs import Contender, Inputs, Runs, Shape, routing
from .timing import Limits, Sample

Record = dict[str, Any]
WORLDS = (1, 2, 4, 8)
SPARE = 1.25  # capacity over the mean of a balanced routing
CAPTURED = "captured"


# What one rank has, its own experts.
SHAPES: dict[str, dict[str, Shape]] = {
    "cuda": {
        "DeepSeek-V3": block(4096, 32, 8, 7168, 2048),
        "Qwen3-235B": block(4096, 16, 8, 4096, 1536),
        "Qwen3-30B": block(4096, 16, 8, 2048, 768),
    },
    "cpu": {"small": block(256, 8, 4, 512, 256)},
}
QUICK = {"tiny": block(32, 4, 2, 256, 128)}


class Group:
    """All rows of one shape on one group of ranks."""

    def __init__(self, name: str, mine: Shape, team: Team, limits: Limits, quick: bool) -> None:
        self.name, self.mine, self.team, self.limits = name, mine, team, limits
        self.shape = {"W": team.size, **mine, "E": mine["E"] * team.size}
        self.count = 8 if team.cuda else 1
        self.rounds = 1 if quick else 7 if team.cuda else 3
        torch.manual_seed(team.rank)

    def rows(self) -> Iterator[Record]:
        """Exact sizes under both routings, then fixed ones."""
        for kind in ("random", "zipf"):
            yield from self._rows(kind, None)
        yield from self._rows("random", self.capacity())

    def capacity(self) -> tuple[int, int]:
        """Rows of a pair of ranks and assignments of a rank: SPARE times a balanced routing's."""
        w, t, s, e = (self.shape[name] for name in "WTSE")
        ids = routing("random", t, e, s, self.team.device) // (e // w)
        pairs = sum(float((ids == rank).any(1).sum()) for rank in range(w)) / w
        # Counted by each rank from its own tokens, so agreed upon.
        rows = self.team.reduce([pairs], dist.ReduceOp.MAX)[0]
        return min(t, math.ceil(SPARE * rows)), math.ceil(SPARE * t * s)

    def _rows(self, kind: str, capacity: tuple[int, int] | None) -> Iterator[Record]:
        e, h, i = (self.shape[name] for name in "EHI")
        device = self.team.device
        layer = MoEExperts(e, h, i, group=self.team.group, capacity=capacity, device=device)
        inputs = Inputs.random(self.shape, device, kind)
        legs = Legs(layer, inputs)
        variant = f"{kind}, {'exact' if capacity is None else f'capacity {SPARE}'}"
        yield from self._exchanges(legs, variant)
        bare = self._bare_ms(legs)
        peer = Bf16Peer(layer, capacity)
        yield from self._layers(layer, peer, inputs, legs, bare, variant)

    def _exchanges(self, legs: Legs, variant: str) -> Iterator[Record]:
        h, s = self.mine["H"], self.mine["S"]
        packed, gradient = packed_row_bytes(h, s), packed_row_bytes(h, 0)
        yield self._row(
            "dispatch", variant, legs, packed,
            {
                "fp8moe": legs.dispatch,
                "limit": legs.bare(packed),
                "bf16 all-to-all alone": legs.bare(2 * h),
                "bf16 torch, gather and all-to-all": legs.dispatch_bf16,
            },
        )  # fmt: skip
        yield self._row(
            "dispatch of a gradient", variant, legs, gradient,
            {
                "fp8moe": legs.dispatch_gradient,
                "limit": legs.bare(gradient),
                "bf16 all-to-all alone": legs.bare(2 * h),
            },
        )  # fmt: skip
        yield self._row(
            "combine", variant, legs, 2 * h,
            {"fp8moe": legs.combine, "limit": legs.bare_back(2 * h)},
        )  # fmt: skip
        yield self._row("plan and sizes", variant, legs, 0, {"fp8moe": legs.sizes_again})

    def _bare_ms(self, legs: Legs) -> dict[str, float]:
        """Of a step's four exchanges, each by itself: forward's two, backward's two."""
        h, s = self.mine["H"], self.mine["S"]
        runs: Runs = {
            "dispatch": legs.bare(packed_row_bytes(h, s)),
            "combine": legs.bare_back(2 * h),
            "dispatch of a gradient": legs.bare(packed_row_bytes(h, 0)),
            "combine of dx": legs.bare_back(2 * h),
        }
        samples = self.team.measure(runs, self.count, self.rounds)
        return {name: sample.ms for name, sample in samples.items()}

    def _layers(
        self,
        layer: MoEExperts,
        peer: nn.Module,
        inputs: Inputs,
        legs: Legs,
        bare: dict[str, float],
        variant: str,
    ) -> Iterator[Record]:
        ours, theirs = Contender(layer, inputs), Contender(peer, inputs)
        alone = Contender(*self._alone(layer))
        h, s = self.mine["H"], self.mine["S"]
        flops = 6 * self.mine["T"] * s * h * self.mine["I"]
        contenders = {"fp8moe": ours, "bf16 torch, same exchange": theirs, "alone": alone}
        for way, parts in (("forward", 1), ("forward+backward", 3)):
            runs: Runs = {n: c.forward if parts == 1 else c.step for n, c in contenders.items()}
            width = packed_row_bytes(h, s) + 2 * h
            exchange = bare["dispatch"] + bare["combine"]
            if parts == 3:
                width += packed_row_bytes(h, 0) + 2 * h + 4 * s
                exchange = sum(bare.values())
            if parts == 3 and self.team.cuda and legs.exchange.segment:
                runs |= self._captured(ours)
            row = self._row(f"layer, {way}", variant, legs, width, runs)
            alone_ms = row["peers"].pop("alone")
            if CAPTURED in row["peers"]:
                row["captured_ms"] = row["peers"].pop(CAPTURED)
            arithmetic = parts * flops / self.limits.tensor_tflops / 1e9
            row |= {
                "flops": parts * flops,
                "exchange_ms": exchange,
                "limit_ms": arithmetic + exchange,
                "alone_ms": alone_ms,
                "efficiency": alone_ms / row["ms"],
                "tokens_per_s": 1e3 * self.team.size * self.mine["T"] / row["ms"],
            }
            if layer.dropped is not None:
                row["dropped"] = int(sum(self.team.reduce(layer.dropped.tolist())))
            yield row

    def _captured(self, ours: Contender) -> Runs:
        """The step as a CUDA graph's replay; none if a rank's capture fails, which its log says."""
        ours.step()
        try:
            replay = {CAPTURED: ours.graph(ours.step)}
        except RuntimeError as error:
            print(f"[ep] rank {self.team.rank} cannot capture a step: {error}", file=sys.stderr)
            replay = {}
        return replay if self.team.reduce([len(replay)], dist.ReduceOp.MIN)[0] else {}

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
        ours: Sample = samples.pop("fp8moe")
        limit = samples.pop("limit", None)
        sent = self.team.mean(legs.rows_to_others())
        copies = self.team.mean(legs.copies_to_others())
        return {
            "op": op,
            "model": self.name,
            "shape": self.shape,
            "variant": variant,
            "ms": ours.ms,
            "host_us": None,
            "bytes": round(sent * width),
            "flops": 0,
            "limit_ms": limit.ms if limit else None,
            "peers": {name: sample.ms for name, sample in samples.items()},
            "repeat": ours.repeat,
            # Of a rank, the mean: rows to other ranks, and without deduplication.
            "rows_sent": sent,
            "copies": copies,
        }


def groups_of(device: torch.device) -> Iterator[Team]:
    """The first W ranks for each W, this rank in it or not; the others wait for them."""
    world = dist.get_world_size()
    for size in sorted({*(w for w in WORLDS if w < world), world}):
        group: Any = dist.new_group(list(range(size))) if size < world else dist.group.WORLD
        if dist.get_rank() < size:
            yield Team(group, device)
        dist.barrier()


def run_ep(
    device: torch.device,
    quick: bool = False,
    on_result: Callable[[Record], None] = lambda row: None,
) -> Record:
    """The record, as `bench` has it, of every group and shape, on every rank. quick: a tiny shape,
    all ranks alone."""
    from . import environment

    limits = Limits(device)
    results: list[Record] = []
    world: Any = dist.group.WORLD
    teams = [Team(world, device)] if quick else groups_of(device)
    for team in teams:
        for name, mine in (QUICK if quick else SHAPES[device.type]).items():
            for row in Group(name, mine, team, limits, quick).rows():
                results.append(row)
                on_result(row)
            gc.collect()
            if team.cuda:
                torch.cuda.empty_cache()
    return {"environment": environment(limits) | world_of(device), "results": results}


def world_of(device: torch.device) -> Record:
    """What else the environment of a record of several ranks has."""
    backend = "gloo"
    if device.type == "cuda":
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        backend = f"nccl {'.'.join(map(str, version))}"
    return {"ranks": dist.get_world_size(), "backend": backend}
