"""The operators once more, in NumPy and by their definitions: tables of code values, nearest by
comparison, loops over tiles. Shares no code and no trick with the library; slow on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
TILE = 128


@dataclass(frozen=True)
class Format:
    """An FP8 format by its fields."""

    mantissa: int
    bias: int
    largest: int  # code of the largest finite value
    first_special: int  # from here on Inf or NaN

    @cached_property
    def values(self) -> F64:
        """The values of codes 0..255; Inf and NaN codes are NaN here."""
        code = np.arange(256)
        exponent, fraction = (code & 0x7F) >> self.mantissa, code & ((1 << self.mantissa) - 1)
        unit = 2.0**-self.mantissa
        subnormal = fraction * unit * 2.0 ** (1 - self.bias)
        normal = (1 + fraction * unit) * 2.0 ** (exponent.astype(float) - self.bias)
        value = np.where(exponent == 0, subnormal, normal)
        value[(code & 0x7F) >= self.first_special] = np.nan
        return np.where(code & 0x80, -value, value)

    @property
    def maximum(self) -> float:
        return float(self.values[self.largest])

    def encode(self, x: NDArray[Any]) -> U8:
        """The nearest code, ties to the even one, saturating; NaN is 0x7F."""
        grid = self.values[: self.largest + 1]
        size = np.minimum(np.nan_to_num(np.abs(x.astype(np.float64)), posinf=np.inf), grid[-1])
        low = np.clip(np.searchsorted(grid, size, side="right") - 1, 0, self.largest)
        high = np.minimum(low + 1, self.largest)
        to_low, to_high = size - grid[low], grid[high] - size
        up = (to_high < to_low) | ((to_high == to_low) & (low % 2 == 1))
        code = np.where(up & (high > low), high, low) | np.where(np.signbit(x), 0x80, 0)
        return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


FORMATS = {"e4m3": Format(3, 7, 0x7E, 0x7F), "e5m2": Format(2, 15, 0x7B, 0x7C)}
LARGEST = {"float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38, "float16": 65504.0}


class Quantized(NamedTuple):
    """codes [M, K] and one scale_inv a tile, [tiles of M, tiles of K]."""

    codes: U8
    scale: F32


def scale_of(tile: F32, fmt: Format, rule: str, eps: float, largest: float) -> tuple[Any, Any]:
    """(scale, scale_inv) of a tile by the written rule; values are divided by "amax"'s scale."""
    finite = np.abs(tile[~np.isnan(tile)])
    amax = np.float32(finite.max()) if finite.size else np.float32(0)
    amax = max(amax, np.float32(eps))
    if amax == 0 or np.isinf(amax):
        return np.float32(1), np.float32(1)
    if rule == "amax":
        scale = max(amax / np.float32(fmt.maximum), np.float32(2.0**-126))
        return scale, scale
    with np.errstate(over="ignore"):
        scale = np.float32(fmt.maximum) / amax
    if rule == "approx":  # as the CPU divides: a GPU's scale may be 2 ulp off
        scale_inv = amax * (np.float32(1) / np.float32(fmt.maximum))
        tiny = np.float32(2.0**-126)
        return (np.float32(2.0**126), tiny) if scale_inv < tiny else (scale, scale_inv)
    if rule == "pow2":
        scale = np.float32(2.0 ** min(np.floor(np.log2(np.float64(scale))), 126.0))
    elif np.isinf(scale):
        scale = np.float32(largest)
    return scale, np.float32(1) / scale


def quantize(
    x: F32,
    rows: int = 1,
    fp8: str = "e4m3",
    rule: str = "pow2",
    eps: float = 1e-10,
    largest: float = LARGEST["bfloat16"],
) -> Quantized:
    """x [M, K] by rows x 128 tiles."""
    fmt = FORMATS[fp8]
    m, k = x.shape
    codes = np.zeros((m, k), np.uint8)
    scales = np.zeros((-(-m // rows), -(-k // TILE)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = np.s_[i * rows : (i + 1) * rows, j * TILE : (j + 1) * TILE]
            scale, scales[i, j] = scale_of(x[at], fmt, rule, eps, largest)
            with np.errstate(over="ignore", invalid="ignore"):
                codes[at] = fmt.encode(x[at] / scale if rule == "amax" else x[at] * scale)
    return Quantized(codes, scales)


def parts(x: F32, of_w2: bool) -> Quantized:
    """The codes of x [M, 16] and of what rounding left, as a2 or w2 of a grouped GEMM."""
    rows, fmt = 128 if of_w2 else 1, FORMATS["e4m3"]
    high = quantize(x, rows, largest=LARGEST["float32"])
    scale = np.repeat(high.scale, rows, 0)[: len(x)]
    left = (x / scale - fmt.values[high.codes]).astype(np.float32)
    low = fmt.encode(left)
    order = [high.codes, high.codes, low] if of_w2 else [high.codes, low, high.codes]
    return Quantized(np.concatenate(order, 1), high.scale)


def dequantize(q: Quantized, rows: int = 1) -> F64:
    """The values of E4M3 codes [M, K] in rows x 128 tiles."""
    m, k = q.codes.shape
    scale = np.repeat(np.repeat(q.scale, rows, 0)[:m], TILE, 1)[:, :k]
    return FORMATS["e4m3"].values[q.codes] * scale


# ---- routing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The rows of assignments: row_of [T, S], and each expert's rows and columns."""

    row_of: I64
    counts: I64
    row_offsets: I64
    col_offsets: I64

    def tokens(self, expert: int) -> I64:
        """Rows of the expert that carry an assignment."""
        first, count = int(self.row_offsets[expert]), int(self.counts[expert])
        return np.arange(first, first + count)

    def sources(self) -> I64:
        """(token, slot) of each row [rows, 2]; -1 on padding."""
        found = np.full((self.row_offsets[-1], 2), -1)
        found[self.row_of[self.row_of >= 0]] = np.argwhere(self.row_of >= 0)
        return found


def route(experts: I64, count: int, align: int, capacity: int) -> Plan:
    """experts [T, S] (-1: dropped): expert by expert, token by token, slot by slot."""
    flat, row_of = experts.reshape(-1), np.full(experts.size, -1, np.int64)
    routed = np.nonzero(flat >= 0)[0]
    kept = routed[np.argsort(flat[routed], kind="stable")][:capacity]
    counts = np.bincount(flat[kept], minlength=count)
    rows, columns = (
        np.concatenate(([0], np.cumsum(-(-counts // unit) * unit))) for unit in (align, TILE)
    )
    first = np.cumsum(counts) - counts
    row_of[kept] = rows[flat[kept]] + np.arange(len(kept)) - first[flat[kept]]
    return Plan(row_of.reshape(experts.shape), counts, rows, columns)


@dataclass(frozen=True)
class Dispatch:
    """Tokens to ranks: row_of [T, ranks]; counts [ranks, 2], rows and entries on them; the first
    row of each rank."""

    row_of: NDArray[np.int32]
    counts: NDArray[np.int32]
    overflow: int
    first_row: list[int]


def router_topk(logits: F32, dweights: F32) -> tuple[I64, F64, F64]:
    """The largest logits of each row, of equal ones the lower column; the softmax of these, which
    the softmax of all, normalized, is; the gradient of the logits. As many as dweights has."""
    idx = np.argsort(-logits, axis=1, kind="stable")[:, : dweights.shape[1]]
    exps = np.exp(np.take_along_axis(logits, idx, 1).astype(np.float64))
    weights = exps / exps.sum(axis=1, keepdims=True)
    mean = (weights * dweights).sum(axis=1, keepdims=True)
    gradient = np.zeros(logits.shape)
    np.put_along_axis(gradient, idx, weights * (dweights - mean), 1)
    return idx, weights, gradient


def dispatch(
    experts: I64,
    count: int,
    ranks: int,
    segment: int = 0,
    spare: int = 0,
    capacity: int | None = None,
) -> Dispatch:
    """experts [T, S] (-1: none), rank by rank. segment: rows that a rank may have, and `spare` ones
    stay free behind them; 0: one rank's rows after another's, `capacity` in all."""
    row_of = np.full((len(experts), ranks), -1, np.int32)
    counts = np.zeros((ranks, 2), np.int32)
    first = overflow = 0
    first_row = []
    for r in range(ranks):
        entries = ((experts >= 0) & (experts // (count // ranks) == r)).sum(axis=1)
        tokens = np.nonzero(entries)[0]
        left = len(tokens) if capacity is None else max(0, capacity - first)
        kept = tokens[: segment or left]
        row_of[kept, r] = first + np.arange(len(kept))
        counts[r] = len(kept), entries[kept].sum()
        overflow += len(tokens) - len(kept)
        first_row.append(first)
        first += segment + spare if segment else len(kept)
    return Dispatch(row_of, counts, overflow, first_row)


def local_ids(experts: I64, probs: F32, d: Dispatch, here: int) -> tuple[NDArray[np.int32], F32]:
    """Ids and probs of the rows of `d`, token by token, rank by rank; `here` experts a rank."""
    tokens, ranks = np.nonzero(d.row_of >= 0)
    local = experts[tokens] - here * ranks[:, None]
    inside = (local >= 0) & (local < here)
    weights = np.where(inside, probs[tokens], np.float32(0))
    return np.where(inside, local, -1).astype(np.int32), weights


def permute(x: NDArray[Any], plan: Plan) -> NDArray[Any]:
    """x [T, ...] -> [rows, ...]; padding zero."""
    y = np.zeros((plan.row_offsets[-1], *x.shape[1:]), x.dtype)
    for (t, _), row in np.ndenumerate(plan.row_of):
        if row >= 0:
            y[row] = x[t]
    return y


def gather_sum(y: F32, plan: Plan, probs: F32 | None = None) -> F32:
    """out[t] = sum over slots ascending of (probs *) y[row], in float32, each product fused."""
    out = np.zeros((len(plan.row_of), y.shape[1]), np.float32)
    for (t, s), row in np.ndenumerate(plan.row_of):
        if row >= 0:
            term = y[row].astype(np.float64)  # float64 holds the product exactly
            out[t] = out[t] + (term if probs is None else probs[t, s].astype(np.float64) * term)
    return out


def pinned_dot(a: F32, b: F32) -> float:
    """<a, b>: products in float32, 128 at a time as a tree of neighbours, tiles in order."""
    terms = a * b
    total = np.float32(0)
    for first in range(0, len(terms), TILE):
        tile = np.zeros(TILE, np.float32)
        tile[: len(terms[first : first + TILE])] = terms[first : first + TILE]
        while len(tile) > 1:
            tile = tile[0::2] + tile[1::2]
        total = total + tile[0]
    return float(total)


# ---- operands contracted over tokens ------------------------------------------------------------


def transpose_fp8(q: Quantized, tile_rows: int, fp8: str = "e4m3") -> Quantized:
    """One expert's [m, C] with 1x128 power-of-two scales -> [C, m] by tile_rows x 128 tiles.

    The scale is, for 128, the largest of a row tile with a nonzero code; for 1, the smallest power
    of two that holds the tile. Every code is the nearest to code * row scale / that scale.
    """
    fmt = FORMATS[fp8]
    m, c = q.codes.shape
    codes = np.zeros((c, m), np.uint8)
    scales = np.ones((-(-c // tile_rows), -(-m // TILE)), np.float32)
    values = fmt.values
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            of = np.s_[j * TILE : (j + 1) * TILE, i * tile_rows : (i + 1) * tile_rows]
            tile = q.codes[of]
            row_scale = q.scale[of[0], i * tile_rows // TILE].astype(np.float64)
            value = values[tile] * row_scale[:, None]
            special = (tile & 0x7F) >= fmt.first_special
            used = (tile & 0x7F).any(axis=1) & (row_scale > 0)
            largest = np.abs(value[~special]).max(initial=0.0)
            if tile_rows == TILE and used.any():
                scales[i, j] = row_scale[used].max()
            elif tile_rows == 1 and largest > 0:
                scales[i, j] = max(2.0 ** np.ceil(np.log2(largest / fmt.maximum)), 2.0**-126)
            codes[of[1], of[0]] = np.where(special, tile, fmt.encode(value / scales[i, j])).T
    return Quantized(codes, scales)


# ---- activation and GEMM ------------------------------------------------------------------------


def sigmoid(x: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-x))


def swiglu(z: F64, probs: F64) -> F64:
    gate, up = np.split(z, 2, axis=1)
    return gate * sigmoid(gate) * up * probs[:, None]


def swiglu_backward(dh: F64, z: F64, probs: F64) -> tuple[F64, F64]:
    """(dz, dprobs)"""
    gate, up = np.split(z, 2, axis=1)
    s = sigmoid(gate)
    dout = dh * probs[:, None]
    dgate = dout * up * s * (1 + gate * (1 - s))
    return np.concatenate([dgate, dout * gate * s], axis=1), (gate * s * up * dh).sum(axis=1)


def gemm(a: F64, b: F64) -> tuple[F64, F64]:
    """a [M, K] b [N, K]^T in float64, and the unit of its error bound.

    The unit is 2^-13 of what an accumulator has to hold, summed over 128-blocks of K: the largest
    magnitude among the block's products and their ascending partial sums.
    """
    exact, unit = a @ b.T, np.zeros((len(a), len(b)))
    for first in range(0, a.shape[1], TILE):
        left, right = a[:, first : first + TILE], b[:, first : first + TILE]
        for i, row in enumerate(left):
            products = right * row
            held = np.maximum(np.abs(products), np.abs(np.cumsum(products, axis=1)))
            unit[i] += held.max(axis=1)
    return exact, unit * 2.0**-13
