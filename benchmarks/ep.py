"""Expert parallelism over N processes: dispatch, combine, and a step of the layer.

A row is what a group of W ranks does by one transport; both take turns in one run. `graph_ms` is
the same captured and replayed, without the host. `limit_ms` of an exchange is the bare all-to-all
of the same bytes by torch.distributed; of the layer, its four bare exchanges and its arithmetic at
the tensor peak. A rank has as many tokens and experts for every W, so W ranks would take
`alone_ms`, the time of the same layer without a group, if exchanging cost nothing. The layer
quantizes its weights in every step, unless a row says that it reuses them.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common import OnResult, Record, environment, ignore, parser, row, show, write
from contender import Contender, Inputs, Shape, block, routing
from ep_team import Bf16Layer, Legs, Team
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.ops import packed_row_bytes
from launch import processes
from timing import Limits, Runs, Sample

WORLDS = (1, 2, 4, 8)
SPARE = 1.25  # rows of a rank capacity over the mean of a balanced routing
TRANSPORTS = ("nccl", "peer")
LIMIT, ALONE = "limit", "alone"
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


class Asked(NamedTuple):
    """What a run is to measure, if not everything."""

    models: Sequence[str] = ()  # none: all
    worlds: Sequence[int] = WORLDS
    routings: Sequence[str] = ("random", "zipf")  # with exact sizes


EVERYTHING = Asked()


class Group:
    """All rows of one shape on one group of ranks."""

    def __init__(
        self, name: str, mine: Shape, team: Team, limits: Limits, quick: bool, asked: Asked
    ) -> None:
        self.name, self.mine, self.team, self.limits = name, mine, team, limits
        self.asked = asked
        self.shape = {"W": team.size, **mine, "E": mine["E"] * team.size}
        self.count = 8 if team.cuda else 1
        self.rounds = 1 if quick else 7 if team.cuda else 3
        torch.manual_seed(team.rank)

    def rows(self) -> Iterator[Record]:
        """Exact sizes under both routings, then fixed ones."""
        for kind in self.asked.routings:
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
        inputs = Inputs.random(self.shape, self.team.device, kind)
        layers = {t: self._layer(t, rank_capacity) for t in TRANSPORTS}
        first = layers[TRANSPORTS[0]]
        for layer in layers.values():
            layer.gate_up_proj, layer.down_proj = first.gate_up_proj, first.down_proj
        legs = {t: Legs(layer, inputs) for t, layer in layers.items()}
        variant = f"{kind}, {'exact' if rank_capacity is None else f'capacity {SPARE}'}"
        yield from self._exchanges(legs, variant)
        yield from self._layers(layers, inputs, legs[TRANSPORTS[0]], variant)
        if variant == "random, exact":
            # By itself: each step leaves the next one a colder host.
            bf16 = {SAME_EXCHANGE: Contender(Bf16Layer(layers[TRANSPORTS[0]]), inputs)}
            beside = f"{variant}, beside bf16"
            yield from self._layers(layers, inputs, legs[TRANSPORTS[0]], beside, bf16)

    def _layer(self, transport: str, rank_capacity: tuple[int, int] | None) -> MoEExperts:
        e, h, i = (self.shape[name] for name in "EHI")
        options: Any = {"rank_capacity": rank_capacity, "device": self.team.device}
        return MoEExperts(e, h, i, group=self.team.group, transport=transport, **options)

    def _exchanges(self, legs: dict[str, Legs], variant: str) -> Iterator[Record]:
        h, s = self.mine["H"], self.mine["S"]
        packed, gradient = packed_row_bytes(h, s), packed_row_bytes(h, 0)
        bare = legs[TRANSPORTS[0]]
        alone = {ALL_TO_ALL: bare.bare(2 * h)}
        runs: Runs = {t: of.dispatch for t, of in legs.items()}
        runs |= {LIMIT: bare.bare(packed), **alone}
        yield from self._pair("dispatch", variant, bare, packed, runs, True)
        runs = {t: of.dispatch_gradient for t, of in legs.items()}
        runs |= {LIMIT: bare.bare(gradient), **alone}
        yield from self._pair("dispatch of a gradient", variant, bare, gradient, runs, True)
        runs = {t: of.combine for t, of in legs.items()} | {LIMIT: bare.bare_back(2 * h)}
        yield from self._pair("combine", variant, bare, 2 * h, runs, True)

    def _layers(
        self,
        layers: dict[str, MoEExperts],
        inputs: Inputs,
        legs: Legs,
        variant: str,
        others: Mapping[str, Contender] = MappingProxyType({}),
    ) -> Iterator[Record]:
        layer = layers[TRANSPORTS[0]]
        contenders = {t: Contender(of, inputs, reuse=False) for t, of in layers.items()}
        contenders[ALONE] = Contender(*self._alone(layer), reuse=False)
        contenders |= others
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
        reusing = {t: Contender(of, inputs, reuse=True) for t, of in layers.items()}
        kinds: list[tuple[str, int, Runs]] = [
            ("forward, weights reused", 1, {n: c.forward for n, c in reusing.items()}),
            ("forward", 1, {n: c.forward for n, c in contenders.items()}),
            ("forward+backward", 3, {n: c.step for n, c in contenders.items()}),
        ]
        for way, parts, runs in kinds[1:] if others else kinds:
            width, exchange = there + 2 * h, sum(bare[:2])
            if parts == 3:
                width, exchange = width + gradient + 2 * h + 4 * s, sum(bare)
            captured = parts == 3 and layer.rank_capacity is not None
            flops = parts * 6 * self.mine["T"] * s * h * self.mine["I"]
            for found in self._pair(f"layer, {way}", variant, legs, width, runs, captured):
                alone = found["peers"].pop(ALONE, None)
                if layer.dropped is not None:
                    found["dropped"] = int(sum(self.team.reduce(layer.dropped.tolist())))
                yield found | {
                    "flops": flops,
                    "exchange_ms": exchange,
                    "limit_ms": flops / self.limits.tensor_tflops / 1e9 + exchange,
                    "alone_ms": alone,
                    "efficiency": alone and alone / found["ms"],
                    "tokens_per_s": 1e3 * self.team.size * self.mine["T"] / found["ms"],
                }

    def _alone(self, layer: MoEExperts) -> tuple[MoEExperts, Inputs]:
        """As many tokens and assignments, all to this rank's experts, without a group."""
        e, h, i = (self.mine[name] for name in "EHI")
        single = MoEExperts(e, h, i, device=self.team.device)
        single.gate_up_proj, single.down_proj = layer.gate_up_proj, layer.down_proj
        shape = {**self.mine, "S": min(self.mine["S"], e)}
        return single, Inputs.random(shape, self.team.device)

    def _pair(
        self, op: str, variant: str, legs: Legs, width: int, runs: Runs, captured: bool
    ) -> Iterator[Record]:
        """A row of each transport. width: bytes of one row on its way there (and back)."""
        samples = self.team.measure(runs, self.count, self.rounds)
        graphs: dict[str, Sample] = {}
        if captured and self.team.cuda:
            in_graph = 1 if op.startswith("layer") else self.count
            graphs = self.team.replayed(runs, in_graph, self.rounds)
        sent = self.team.mean(legs.rows_to_others())
        others = {name: s.ms for name, s in samples.items() if name not in (*TRANSPORTS, LIMIT)}
        replayed = {name: s.ms for name, s in graphs.items() if name not in TRANSPORTS}
        limit = samples.get(LIMIT)
        for transport in TRANSPORTS:
            yield row(
                op,
                self.shape,
                variant if transport == "nccl" else f"{variant}, {transport}",
                samples[transport],
                bytes=round(sent * width),
                limit_ms=limit.ms if limit else None,
                peers=dict(others),
                model=self.name,
                transport=transport,
                graph_ms=graphs[transport].ms if graphs else None,
                graph_peers=replayed,
                rows_sent=sent,  # to other ranks, the mean over the ranks
            )


def groups_of(device: torch.device, worlds: Sequence[int]) -> Iterator[Team]:
    """The first W ranks for each W, whether this rank is one or not; the others wait for them."""
    world = dist.get_world_size()
    for size in sorted({*(w for w in worlds if w < world), world}):
        group: Any = dist.new_group(list(range(size))) if size < world else dist.group.WORLD
        if dist.get_rank() < size:
            yield Team(group, device)
        dist.barrier()


def run_ep(
    device: torch.device,
    quick: bool = False,
    on_result: OnResult = ignore,
    asked: Asked = EVERYTHING,
    keep: OnResult = ignore,
) -> Record:
    """The record of every group and shape; collective. The first rank alone reports rows. quick:
    one tiny shape, all ranks at once. keep: takes the record so far, after each shape."""
    limits = Limits(device)
    version = torch.cuda.nccl.version() if device.type == "cuda" else ()  # type: ignore[no-untyped-call]
    backend = f"nccl {'.'.join(map(str, version))}" if version else "gloo"
    place = {"ranks": dist.get_world_size(), "backend": backend}
    results: list[Record] = []
    record = {"environment": environment(limits) | place, "results": results}
    world: Any = dist.group.WORLD
    for team in [Team(world, device)] if quick else groups_of(device, asked.worlds):
        for name, mine in SHAPES["quick" if quick else device.type].items():
            if asked.models and name not in asked.models:
                continue
            for found in Group(name, mine, team, limits, quick, asked).rows():
                results.append(found)
                if team.rank == 0:
                    on_result(found)
            keep(record)
            gc.collect()
            if team.cuda:
                torch.cuda.empty_cache()
    return record


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, help="processes; default: a GPU each, or 2")
    arguments.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="groups' sizes")
    arguments.add_argument("--model", action="append", default=[], help="only this; repeatable")
    arguments.add_argument("--routings", nargs="+", default=("random", "zipf"))
    given = arguments.parse_args()
    ranks = given.ranks or (torch.cuda.device_count() if given.device == "cuda" else 2)
    with processes(ranks, torch.device(given.device)) as device:
        first = dist.get_rank() == 0
        on_result: OnResult = ignore
        keep: OnResult = ignore
        if first:  # a run that is ended keeps the shapes it has done
            on_result, keep = show, lambda record: write(record, given.json)
        asked = Asked(given.model, given.worlds, given.routings)
        run_ep(device, given.quick, on_result, asked, keep)


if __name__ == "__main__":
    main()
