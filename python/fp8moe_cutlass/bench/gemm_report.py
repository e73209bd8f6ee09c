"""A record of `bench --gemm` as a table: rates, and how ours stands to each peer."""

from __future__ import annotations

import math
from typing import Any

from .report import environment_text, plot, shape_text

__all__ = ["COLUMNS", "cells", "environment_text", "lines", "plot", "summary"]

Record = dict[str, Any]
COLUMNS = ("gemm", "variant", "shape", "ms", "TFLOP/s", "of the limit", "ours / peer", "sustained")


def ratios(ms: float, peers: dict[str, float]) -> str:
    return ", ".join(f"{name} {other / ms:.3f}" for name, other in peers.items())


def cells(row: Record) -> tuple[str, ...]:
    """One line of the table, in the order of COLUMNS. A ratio above 1 is a faster call of ours."""
    failed = [f"{name} failed" for name in row.get("peers_failed", {})]
    long = row.get("sustained_ms")
    return (
        row["op"],
        row["variant"],
        shape_text(row["shape"]),
        f"{row['ms']:.3f}",
        f"{row['flops'] / row['ms'] / 1e9:.3g}",
        f"{100 * row['limit_ms'] / row['ms']:.0f}%",
        ", ".join(filter(None, [ratios(row["ms"], row["peers"]), *failed])),
        ""
        if long is None
        else f"{row['flops'] / long / 1e9:.3g}; {ratios(long, row['peers_sustained'])}",
    )


def lines(row: Record) -> list[tuple[str, ...]]:
    return [cells(row)]


def summary(record: Record) -> list[str]:
    """The geometric mean of ours over a peer for each gemm, burst and sustained."""
    found = []
    for gemm in dict.fromkeys(row["op"] for row in record["results"]):
        rows = [row for row in record["results"] if row["op"] == gemm]
        for kind, ms, peers in (
            ("burst", "ms", "peers"),
            ("sustained", "sustained_ms", "peers_sustained"),
        ):
            for name in dict.fromkeys(name for row in rows for name in row.get(peers, {})):
                both = [row for row in rows if name in row.get(peers, {})]
                logs = [math.log(row[peers][name] / row[ms]) for row in both]
                mean = math.exp(sum(logs) / len(logs))
                found.append(f"{gemm}, {kind}: {mean:.3f} of {name} over {len(logs)} cases")
    found += [f"left out: {what}" for what in record["left_out"]]
    return found
