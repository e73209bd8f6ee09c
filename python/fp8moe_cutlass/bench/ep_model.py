"""What expert parallelism sends, and how long that should take: plain arithmetic over parameters.

    python -m fp8moe_cutlass.bench.ep_model LAYER.json     prints the tables of docs/scale-out.md

LAYER.json is a record of `bench --layer`: the time of the experts is measured, that of the exchange
is a model. Letters as in docs/layouts.md, and W ranks, N nodes, D distinct ranks a token goes to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from fp8moe_cutlass.ops import packed_row_bytes

WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
Line = tuple[str, ...]


@dataclass(frozen=True)
class Links:
    """One GPU's share of the links, one way. The defaults are assumptions, not measurements of this
    library: what an all-to-all of megabytes reaches on Hopper's NVLink, and 0.9 of 400 Gb/s."""

    nvlink_gb_s: float = 320.0
    network_gb_s: float = 45.0
    node: int = 8  # GPUs that NVLink joins
    collective_us: float = 30.0  # an all-to-all of nothing
    message_us: float = 1.5  # more for each peer across the network
    host_us: float = 40.0  # exact mode's exchange of sizes, beside its collective: the host read


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


def zipf(experts: int, slots: int, ranks: int, tokens: int = 4096) -> tuple[float, float]:
    """Sampled, expert e drawn with a weight of 1 / (e + 1): distinct ranks of a token, and the rows
    of the rank that gets most over those of the mean."""
    u = np.random.default_rng(0).random((tokens, experts))
    score = -np.log(-np.log(u)) - np.log(np.arange(1, experts + 1))  # the best are such a draw
    chosen = np.argsort(-score, axis=1)[:, :slots] // (experts // ranks)
    rows = np.stack([(chosen == rank).any(axis=1) for rank in range(ranks)], axis=1)
    of_rank = rows.sum(axis=0)
    return float(rows.sum() / tokens), float(of_rank.max() / of_rank.mean())


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
    """Rows a token sends over NVLink and over the network, and the peers across it."""

    nvlink: float
    network: float
    peers: int


def flat(layer: Layer, ranks: int, links: Links) -> Rows:
    """One all-to-all over all ranks: a row for each distinct rank."""
    d = distinct(layer.experts, layer.slots, ranks)
    near = min(ranks, links.node)
    return Rows(d * (near - 1) / ranks, d * (ranks - near) / ranks, ranks - near)


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
    return Rows(d * (links.node - 1) / links.node, across, nodes - 1)


def exchange_ms(layer: Layer, rows: Rows, size: int, links: Links, ranks: int) -> float:
    """One exchange of rows of `size` bytes, balanced: the slower of the two kinds of link."""
    if ranks == 1:
        return 0.0
    token = layer.tokens * size / 1e6  # MB a row a token; MB / (GB/s) = ms
    near = token * rows.nvlink / links.nvlink_gb_s
    far = token * rows.network / links.network_gb_s + rows.peers * links.message_us / 1e3
    return links.collective_us / 1e3 + max(near, far)


@dataclass(frozen=True)
class Step:
    """Milliseconds of a forward and backward of the block."""

    compute: float
    exchange: float  # all four
    exposed: float  # of it, what nothing hides

    @property
    def total(self) -> float:
        return self.compute + self.exposed

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
) -> Step:
    """A balanced step. Of the exchange, FP8's backward hides dx's behind the weight gradients; bf16
    torch, whose autograd waits for it, hides nothing. spare: capacity over the mean (1.25: a
    quarter more bytes, no exchange of sizes); 0: exact."""
    layer = layer.over(ranks)
    rows = hierarchical(layer, ranks, links, limit) if tiered else flat(layer, ranks, links)
    w = wire(layer, fp8)
    sent = [round(size * (spare or 1.0)) for size in vars(w).values()]
    times = [exchange_ms(layer, rows, size, links, ranks) for size in sent]
    sizes = (links.collective_us + links.host_us) / 1e3 if not spare and ranks > 1 else 0.0
    hidden = min(times[-1], layer.wgrad_ms) if fp8 else 0.0
    compute = layer.ms if fp8 else layer.bf16_ms
    return Step(compute, sum(times) + sizes, sum(times) + sizes - hidden)


# ---- tables -------------------------------------------------------------------------------------


def markdown(lines: Iterable[Line]) -> str:
    head, *rest = lines
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rest))


def table_of_ranks(experts: int = 256) -> Iterator[Line]:
    """Distinct ranks a token goes to: what deduplication leaves of top-k rows."""
    tops = (1, 2, 4, 6, 8)
    yield ("W", *(f"top-{k}" for k in tops), "Zipf: top-8", "fullest rank over the mean")
    for ranks in WORLDS:
        if ranks <= experts:
            skewed = (f"{value:.2f}" for value in zipf(experts, 8, ranks))
            yield (str(ranks), *(f"{distinct(experts, k, ranks):.2f}" for k in tops), *skewed)


def table_of_bytes(layer: Layer) -> Iterator[Line]:
    """KB a token sends to other ranks in a step, and the dispatch of it alone."""
    yield (
        "W",
        "rows to others, top-k copies",
        "deduplicated",
        "dispatch bf16, copies",
        "dispatch bf16",
        "dispatch FP8",
        "step bf16",
        "step FP8",
    )
    fp8, bf16 = wire(layer), wire(layer, fp8=False)
    for ranks in WORLDS[1:]:
        if ranks > layer.experts:
            break
        share = (ranks - 1) / ranks
        copies, rows = layer.slots * share, distinct(layer.experts, layer.slots, ranks) * share
        sizes = (copies * bf16.dispatch, rows * bf16.dispatch, rows * fp8.dispatch)
        steps = (rows * bf16.total, rows * fp8.total)
        yield (
            str(ranks),
            f"{copies:.2f}",
            f"{rows:.2f}",
            *(f"{size / 1e3:.1f}" for size in sizes + steps),
        )


def table_of_steps(layer: Layer, links: Links = Links()) -> Iterator[Line]:
    """The block's forward and backward, balanced, in ms: the model."""
    yield (
        "W",
        "experts",
        "exchange, bf16",
        "exchange, FP8",
        "not hidden",
        "step, FP8",
        "efficiency",
        "x bf16",
        "hierarchical: exchange",
        "efficiency",
        "on 4 nodes at most: exchange",
        "efficiency",
    )
    for ranks in WORLDS:
        ours, theirs = step(layer, ranks, links), step(layer, ranks, links, fp8=False)
        tiered = [step(layer, ranks, links, tiered=True, limit=limit) for limit in (0, 4)]
        far = [(f"{s.exchange:.2f}", f"{100 * s.efficiency:.0f}%") for s in tiered]
        yield (
            str(ranks),
            str(layer.over(ranks).experts),
            f"{theirs.exchange:.2f}",
            f"{ours.exchange:.2f}",
            f"{ours.exposed:.2f}",
            f"{ours.total:.2f}",
            f"{100 * ours.efficiency:.0f}%",
            f"{theirs.total / ours.total:.2f}",
            *(cell if ranks > links.node else "" for pair in far for cell in pair),
        )


def table_of_modes(layer: Layer, links: Links = Links()) -> Iterator[Line]:
    """What exact sizes and capacities cost, balanced, in ms: the model."""
    yield (
        "W",
        "exact: exchange",
        "step",
        "capacity 1.1: exchange",
        "step",
        "1.25: exchange",
        "step",
    )
    for ranks in (2, 4, 8, 16, 64):
        steps = [step(layer, ranks, links, spare=spare) for spare in (0.0, 1.1, 1.25)]
        yield (str(ranks), *(f"{ms:.2f}" for s in steps for ms in (s.exchange, s.total)))


WGRAD = ("transpose x", "wgrad-1", "transpose dout", "wgrad-2")


def measured(record: dict[str, Any], model: str, experts: int) -> Layer:
    """The layer of a record's forward+backward row of `model`, with `experts` over all ranks."""
    for row in record["results"]:
        if row["variant"] == "forward+backward" and row["model"] == model:
            shape, kernels = row["shape"], row["kernels"]
            wgrad = sum(kernels[role] for role in WGRAD) / 1e3
            sizes = (shape["T"], shape["S"], experts, shape["H"])
            return Layer(model, *sizes, row["ms"], wgrad, row["peers"]["torch bf16"])
    raise ValueError(f"[ep_model] the record must have a forward+backward row of {model}; got none")


MODELS = (("DeepSeek-V3, 32 experts", 256), ("Qwen3-235B, 16 experts", 128))


def tables(record: dict[str, Any]) -> list[str]:
    """What docs/scale-out.md shows, in that order."""
    layers = [measured(record, *model) for model in MODELS]
    return [
        markdown(table_of_ranks()),
        markdown(table_of_bytes(layers[0])),
        markdown(table_of_modes(layers[0])),
        *(
            f"{layer.name} a rank at W = 8:\n\n{markdown(table_of_steps(layer))}"
            for layer in layers
        ),
    ]


if __name__ == "__main__":
    print("\n\n".join(tables(json.loads(Path(sys.argv[1]).read_text()))))
