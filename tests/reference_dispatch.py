"""Dispatch to ranks in plain Python and NumPy, written from the rules alone: dicts and loops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference_quantize import FORMATS, quantize

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int64]


@dataclass
class Dispatch:
    """What a dispatch plan says. rows[r]: the tokens of rank r that have a row, in order."""

    rows: list[list[int]]
    first_row: list[int]
    row_of: NDArray[np.int32]  # [T, ranks]
    counts: NDArray[np.int32]  # [ranks, 2]
    overflow: int


def ranks_of(ids: Ids, experts_a_rank: int) -> list[int]:
    """The ranks one token travels to, ascending."""
    return sorted({int(i) // experts_a_rank for i in ids if i >= 0})


def dispatch(
    ids: Ids,
    num_experts: int,
    ranks: int,
    segment: int = 0,
    capacity: int | None = None,
    spare: int = 0,
) -> Dispatch:
    """ids [T, S], -1: none."""
    each = num_experts // ranks
    wanted = [[t for t in range(len(ids)) if r in ranks_of(ids[t], each)] for r in range(ranks)]
    left = ids.size * ranks if capacity is None else capacity
    rows, first_row = [], []
    for r, tokens in enumerate(wanted):
        first_row.append(r * (segment + spare) if segment else sum(len(kept) for kept in rows))
        room = segment if segment else max(0, left - first_row[-1])
        rows.append(tokens[:room])
    row_of = np.full((len(ids), ranks), -1, np.int32)
    counts = np.zeros((ranks, 2), np.int32)
    for r, kept in enumerate(rows):
        for i, t in enumerate(kept):
            row_of[t, r] = first_row[r] + i
            counts[r] += (1, sum(1 for e in ids[t] if e >= 0 and e // each == r))
    overflow = sum(map(len, wanted)) - sum(map(len, rows))
    return Dispatch(rows, first_row, row_of, counts, overflow)


def wire(
    d: Dispatch,
    x: NDArray[np.float32],
    dtype: str,
    ids: Ids | None,
    probs: NDArray[np.float32] | None,
    num_experts: int,
    fp8: str,
    scale: str,
) -> dict[int, Bytes]:
    """The bytes of each row that has a token. dtype: the one x was given in."""
    q, scale_inv = quantize(x, FORMATS[fp8], tile=(1, 128), scale=scale, dtype=dtype)
    each = num_experts // len(d.rows)
    found = {}
    for r, kept in enumerate(d.rows):
        for i, t in enumerate(kept):
            parts = [q[t].tobytes(), scale_inv[t].astype("<f4").tobytes()]
            if ids is not None and probs is not None:
                here = [e >= 0 and e // each == r for e in ids[t]]
                local = [e - r * each if h else -1 for e, h in zip(ids[t], here, strict=True)]
                parts.append(np.array(local, "<i4").tobytes())
                parts.append(np.where(here, probs[t], np.float32(0)).astype("<f4").tobytes())
            row = b"".join(parts)
            row += b"\0" * (-len(row) % 16)
            found[d.first_row[r] + i] = np.frombuffer(row, np.uint8)
    return found
