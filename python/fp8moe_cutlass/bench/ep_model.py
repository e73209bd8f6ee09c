"""What expert parallelism sends, and how long that should take: plain arithmetic over parameters.

The time of the experts is measured, that of the exchange is a model, whose constants ep_fit finds
in a record of `bench --ep`; ep_page writes its tables into docs/scale-out.md. Letters as in
docs/layouts.md, and W ranks, N nodes, D distinct ranks a token goes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from fp8moe_cutlass.ops import packed_row_bytes

WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
Line = tuple[str, ...]


@dataclass(frozen=True)
class Links:
    """One GPU's share of the links, one way, and what a step costs beside bytes. Of the defaults,
    those within a node are about what ep_fit found on 2 and 4 H200s at 290a748; the network's are
    assumptions: 0.9 of 400 Gb/s."""

    nvlink_gb_s: float = 290.0
    network_gb_s: float = 45.0
    node: int = 8  # GPUs that NVLink joins
    collective_us: float = 32.0  # an all-to-all of nothing
    peer_us: float = 7.0  # more for each peer in the node
    message_us: float = 1.5  # more for each peer across the network
    host_us: float = 130.0  # exact mode's plan and sizes, beside their collective
    gaps_us: float = 500.0  # of a step with a group: launches, waits for the slowest, all the rest
    copy_gb_s: float = 4200.0  # read and written, by what packs, sums and combines rows


@dataclass(frozen=True)
class Layer:
    """An expert block as one rank sees it, and its measured times on one GPU."""

    name: str
    tokens: int
    slots: int
    experts: int  # of all ranks together
    hidden: int
    ms: float = 0.0  # forward + backward, FP8, without exchange
    wgrad_ms: float = 0.0  # of that, what backward can put beside the exchange of dx
    bf16_ms: float = 0.0

    def over(self, ranks: int) -> Layer:
        """With as many experts as ranks, where there were fewer."""
        return Layer(**{**vars(self), "experts": max(self.experts, ranks)})


# ---- rows and bytes -----------------------------------------------------------------------------


def distinct(experts: int, slots: int, parts: int) -> float:
    """Expected parts (ranks, nodes) among the owners of `slots` distinct experts chosen uniformly:
    parts (1 - C(E - E/parts, S) / C(E, S))."""
    elsewhere = experts - experts // parts
    return parts * (1.0 - comb(elsewhere, slots) / comb(experts, slots))


@dataclass(frozen=True)
class Skew:
    """What a skewed routing makes of distinct ranks a token, and of the rank that gets most: its
    rows and its assignments, over the mean's."""

    ranks: float
    rows: float
    load: float


def zipf(experts: int, slots: int, ranks: int, tokens: int = 4096) -> Skew:
    """Sampled, expert e drawn with a weight of 1 / (e + 1)."""
    u = np.random.default_rng(0).random((tokens, experts))
    score = -np.log(-np.log(u)) - np.log(np.arange(1, experts + 1))  # the best are such a draw
    chosen = np.argsort(-score, axis=1)[:, :slots] // (experts // ranks)
    rows = np.stack([(chosen == rank).any(axis=1) for rank in range(ranks)], axis=1)
    of_rank = rows.sum(axis=0)
    load = np.bincount(chosen.ravel(), minlength=ranks)
    return Skew(
        float(rows.sum() / tokens),
        float(of_rank.max() / of_rank.mean()),
        float(load.max() / load.mean()),
    )


@dataclass(frozen=True)
class Wire:
    """Bytes of one row in each of a step's four exchanges."""

    dispatch: int
    combine: int
    dispatch_grad: int
    combine_grad: int

    @property
    def total(self) -> int:
        return self.dispatch + self.combine + self.dispatch_grad + self.combine_grad


def wire(layer: Layer, fp8: bool = True) -> Wire:
    """FP8: the packed rows, and bf16 for what is summed. bf16: the same exchange, no scales."""
    h, s = layer.hidden, layer.slots
    back = 2 * h + 4 * s  # dx and the gradients of the probs
    if fp8:
        return Wire(packed_row_bytes(h, s), 2 * h, packed_row_bytes(h, 0), back)
    return Wire(2 * h + 8 * s, 2 * h, 2 * h, back)


# ---- time ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Rows a token sends over NVLink and over the network, and the peers there."""

    nvlink: float
    network: float
    near: int
    far: int


def flat(layer: Layer, ranks: int, links: Links) -> Rows:
    """One all-to-all over all ranks: a row for each distinct rank."""
    d = distinct(layer.experts, layer.slots, ranks)
    near = min(ranks, links.node)
    return Rows(d * (near - 1) / ranks, d * (ranks - near) / ranks, near - 1, ranks - near)


def hierarchical(layer: Layer, ranks: int, links: Links, limit: int = 0) -> Rows:
    """A row for each distinct node over the network, spread by NVLink inside it. limit: a token's
    experts are on so many nodes at most, as group-limited routing has it."""
    if ranks <= links.node:
        return flat(layer, ranks, links)
    nodes = ranks // links.node
    d = distinct(layer.experts, layer.slots, ranks)
    of = min(limit or nodes, nodes)
    spread = distinct(layer.experts * of // nodes, layer.slots, of)
    across = spread * (nodes - 1) / nodes
    return Rows(d * (links.node - 1) / links.node, across, links.node - 1, nodes - 1)


def exchange_ms(layer: Layer, rows: Rows, size: int, links: Links, ranks: int) -> float:
    """One exchange of rows of `size` bytes, balanced: the slower of the two kinds of link."""
    if ranks == 1:
        return 0.0
    token = layer.tokens * size / 1e6  # MB a row a token; MB / (GB/s) = ms
    near = token * rows.nvlink / links.nvlink_gb_s
    far = token * rows.network / links.network_gb_s + rows.far * links.message_us / 1e3
    return fixed_ms(rows.near, links) + max(near, far)


def fixed_ms(near: int, links: Links) -> float:
    """An all-to-all of nothing among `near` peers."""
    return (links.collective_us + near * links.peer_us) / 1e3


@dataclass(frozen=True)
class Step:
    """Milliseconds of a forward and backward of the block."""

    compute: float
    exchange: float  # all four
    rest: float  # what a group costs beside: sizes, rows handled once more, gaps
    hidden: float = 0.0  # of the exchange, what runs beside the experts

    @property
    def total(self) -> float:
        return self.compute + self.exchange + self.rest - self.hidden

    @property
    def efficiency(self) -> float:
        return self.compute / self.total if self.total else 1.0


def step(
    layer: Layer,
    ranks: int,
    links: Links = Links(),
    *,
    fp8: bool = True,
    spare: float = 0.0,
    tiered: bool = False,
    limit: int = 0,
    hide: bool = False,
) -> Step:
    """A balanced step; ranks 1: without a group.

    spare: capacity over the mean (1.25: a quarter more bytes, no exchange of sizes); 0: exact.
    hide: dx's exchange behind the weight gradients, which today's GEMMs do not do (docs). bf16: as
    on one GPU, its four exchanges, and nothing else.
    """
    layer = layer.over(ranks)
    rows = hierarchical(layer, ranks, links, limit) if tiered else flat(layer, ranks, links)
    w = wire(layer, fp8)
    sent = [round(size * (spare or 1.0)) for size in vars(w).values()]
    times = [exchange_ms(layer, rows, size, links, ranks) for size in sent]
    if ranks == 1 or not fp8:
        return Step(layer.ms if fp8 else layer.bf16_ms, sum(times), 0.0)
    rest = handling_ms(layer, ranks, links) + links.gaps_us / 1e3
    if not spare:
        rest += sizes_ms(rows, links)
    return Step(layer.ms, sum(times), rest, min(times[-1], layer.wgrad_ms) if hide else 0.0)


def sizes_ms(rows: Rows, links: Links) -> float:
    """Exact mode's plan, exchange of sizes and host read."""
    far = rows.far * links.message_us / 1e3
    return links.host_us / 1e3 + fixed_ms(rows.near, links) + far


def handling_ms(layer: Layer, ranks: int, links: Links) -> float:
    """What D rows a token cost over the one of a single GPU in the GPU's own memory, in a forward
    and backward: packed and summed D times, and the sums read again."""
    d, w = distinct(layer.experts, layer.slots, ranks), wire(layer)
    packed = (d - 1) * (w.dispatch + w.dispatch_grad)
    summed = (d - 1) * (w.combine + w.combine_grad) + (d + 1) * (w.combine + w.combine_grad)
    return layer.tokens * (packed + summed) / links.copy_gb_s / 1e6
