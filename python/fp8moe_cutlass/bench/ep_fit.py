"""The constants of the model of expert parallelism, from a record of `bench --ep`, and how far the
model is off each of its balanced rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fp8moe_cutlass.ops import packed_row_bytes

from .ep_model import Layer, Links, fixed_ms, flat, handling_ms, sizes_ms, step, zipf
from .ep_report import ALONE, LAYER

Record = dict[str, Any]
EXACT = "random, exact"
WGRAD = ("transpose x", "wgrad-1", "transpose dout", "wgrad-2")


@dataclass(frozen=True)
class Bare:
    """A measured all-to-all by itself: bytes to other ranks, a rank."""

    row: Record
    what: str
    bytes: float
    ms: float


def bare(record: Record) -> Iterator[Bare]:
    """Every balanced one between ranks."""
    for row in record["results"]:
        shape, sent = row["shape"], row["rows_sent"]
        if shape["W"] == 1 or row["variant"].startswith("zipf"):
            continue
        wide = 2 * shape["H"]
        if row["op"] in ("dispatch", "dispatch of a gradient"):
            slots = shape["S"] if row["op"] == "dispatch" else 0
            width = packed_row_bytes(shape["H"], slots)
            yield Bare(row, f"{row['op']}, FP8", sent * width, row["limit_ms"])
            yield Bare(row, f"{row['op']}, bf16", sent * wide, row["peers"][ALONE])
        elif row["op"] == "combine":
            yield Bare(row, "combine", sent * wide, row["limit_ms"])


def fit(record: Record) -> Links:
    """Least squares of the relative error, over the bare all-to-alls: a collective, a peer, a byte.
    Medians over the exact rows between ranks: the sizes' host part, then the gaps of a step."""
    runs = list(bare(record))
    terms = np.array([[1.0, run.row["shape"]["W"] - 1.0, run.bytes / 1e6] for run in runs])
    ms = np.array([run.ms for run in runs])
    found = np.linalg.lstsq(terms / ms[:, None], np.ones(len(ms)), rcond=None)[0]
    links = Links(
        nvlink_gb_s=float(1.0 / found[2]),
        collective_us=float(1e3 * found[0]),
        peer_us=float(1e3 * found[1]),
        copy_gb_s=1e3 * record["environment"]["copy_tb_s"],
    )
    rows = [r for r in record["results"] if r["shape"]["W"] > 1 and r["variant"] == EXACT]
    host = [
        r["ms"] - fixed_ms(r["shape"]["W"] - 1, links) for r in rows if r["op"] == "plan and sizes"
    ]
    links = replace(links, host_us=1e3 * statistics.median(host))
    gaps = []
    for row in (r for r in rows if r["op"] == LAYER):
        mine, ranks = layer_of(row), row["shape"]["W"]
        beside = handling_ms(mine, ranks, links) + sizes_ms(flat(mine, ranks, links), links)
        gaps.append(row["ms"] - row["alone_ms"] - row["exchange_ms"] - beside)
    return replace(links, gaps_us=1e3 * statistics.median(gaps))


def layer_of(row: Record) -> Layer:
    """The layer of a row, its experts' time as that row measured it."""
    s = row["shape"]
    return Layer(row["model"], s["T"], s["S"], s["E"], s["H"], ms=row["alone_ms"])


def modelled(row: Record, links: Links) -> float:
    """What the model says of an exact step: balanced, or as long as the fullest rank's experts."""
    layer, ranks = layer_of(row), row["shape"]["W"]
    skewed = row["variant"].startswith("zipf")
    load = zipf(layer.experts, layer.slots, ranks, layer.tokens).load if skewed else 1.0
    return step(layer, ranks, links).total + (load - 1.0) * layer.ms


def measured(layers: Record, record: Record, name: str, model: str, experts: int) -> Layer:
    """`model` with `experts` over all ranks: FP8's time from the steps of a record of bench --ep,
    where it ran alone; bf16's and the weight gradients' from `name` in one of bench --layer."""
    for row in layers["results"]:
        if row["variant"] == "forward+backward" and row["model"] == name:
            alone = [
                r["alone_ms"]
                for r in record["results"]
                if (r["op"], r["variant"], r["model"]) == (LAYER, EXACT, model)
            ]
            shape, kernels = row["shape"], row["kernels"]
            wgrad = sum(kernels[role] for role in WGRAD) / 1e3
            sizes = (shape["T"], shape["S"], experts, shape["H"])
            bf16 = row["peers"]["torch bf16"]
            return Layer(model, *sizes, statistics.median(alone), wgrad, bf16)
    raise ValueError(f"[ep_fit] the record must have a forward+backward row of {name}; got none")
