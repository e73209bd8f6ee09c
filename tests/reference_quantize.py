"""Blockwise FP8 in plain NumPy, written from the rules alone: tables and searches, no bit tricks.

Everything works in float64, which holds every product here exactly, except where the rule itself
says float32 (the scale, and x * scale).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
Floats = NDArray[np.float64]

F32_MAX = float(np.finfo(np.float32).max)
OVERFLOW = {"float32": F32_MAX, "bfloat16": float.fromhex("0x1.fep127"), "float16": 65504.0}


@dataclass(frozen=True)
class Format:
    """An FP8 format: 1 sign bit, `exponent` and `mantissa` bits, the largest finite code."""

    name: str
    mantissa: int
    bias: int
    max_code: int

    @property
    def finite(self) -> Floats:
        """Values of the codes 0 .. max_code, ascending."""
        code = np.arange(self.max_code + 1)
        exponent, fraction = code >> self.mantissa, (code & (2**self.mantissa - 1))
        normal = (1 + fraction / 2**self.mantissa) * 2.0 ** (exponent - self.bias)
        return np.where(exponent > 0, normal, fraction * 2.0 ** (1 - self.bias - self.mantissa))

    @property
    def table(self) -> Floats:
        """Values of all 256 codes."""
        positive = np.full(128, np.nan)
        positive[: self.max_code + 1] = self.finite
        if self.name == "e5m2":
            positive[0x7C] = np.inf
        return np.concatenate([positive, -positive])

    @property
    def max(self) -> float:
        return float(self.finite[-1])

    def decode(self, code: Codes) -> Floats:
        return self.table[code]

    def encode(self, value: Floats) -> Codes:
        """The nearest code, ties to the even one; too large becomes the largest, NaN 0x7F."""
        finite = self.finite
        magnitude = np.abs(np.asarray(value, np.float64))
        above = np.clip(np.searchsorted(finite, magnitude), 1, self.max_code)
        below = above - 1
        to_below, to_above = magnitude - finite[below], finite[above] - magnitude
        tie = np.where(below % 2 == 0, below, above)
        code = np.where(to_below < to_above, below, np.where(to_above < to_below, above, tie))
        code = np.where(magnitude >= finite[-1], self.max_code, code)
        code = np.where(np.signbit(value), code | 0x80, code)
        return np.where(np.isnan(value), 0x7F, code).astype(np.uint8)


E4M3 = Format("e4m3", mantissa=3, bias=7, max_code=0x7E)
E5M2 = Format("e5m2", mantissa=2, bias=15, max_code=0x7B)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def scale_of(amax: float, fmt: Format, rule: str, eps: float, overflow: float) -> np.float32:
    """Step by step, spec: floor at eps; 0 or Inf -> 1; FMAX / a in float32; power of two below.
    For "amax" a / FMAX, at least 2^-126."""
    a = np.float32(amax)
    if a < np.float32(eps):
        a = np.float32(eps)
    if a == 0 or np.isinf(a):
        return np.float32(1)
    if rule == "amax":
        return max(a / np.float32(fmt.max), np.float32(2.0**-126))
    with np.errstate(over="ignore"):
        scale = np.float32(fmt.max) / a
    if rule == "pow2":
        scale = np.float32(min(2.0 ** np.floor(np.log2(np.float64(scale))), 2.0**126))
    elif np.isinf(scale):
        scale = np.float32(overflow)
    return scale


def quantize_tile(
    x: NDArray[np.float32], fmt: Format, rule: str, eps: float, overflow: float
) -> tuple[Codes, np.float32]:
    """Codes and scale_inv of one tile."""
    magnitudes = np.abs(x[~np.isnan(x)])
    amax = float(magnitudes.max()) if magnitudes.size else 0.0
    scale = scale_of(amax, fmt, rule, eps, overflow)
    with np.errstate(over="ignore", invalid="ignore"):
        if rule == "amax":
            return fmt.encode((x / scale).astype(np.float64)), scale
        return fmt.encode((x * scale).astype(np.float64)), np.float32(1) / scale


def quantize(
    x: NDArray[np.float32],
    fmt: Format,
    *,
    tile: tuple[int, int],
    scale: str = "pow2",
    eps: float = 1e-10,
    dtype: str = "float32",
) -> tuple[Codes, NDArray[np.float32]]:
    """x [M, K] by tiles: codes [M, K], scale_inv [cdiv(M, tile[0]), cdiv(K, tile[1])]."""
    m, k = x.shape
    codes = np.zeros((m, k), np.uint8)
    scale_inv = np.zeros((-(-m // tile[0]), -(-k // tile[1])), np.float32)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            at = np.s_[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
            codes[at], scale_inv[i, j] = quantize_tile(x[at], fmt, scale, eps, OVERFLOW[dtype])
    return codes, scale_inv


@dataclass(frozen=True)
class Group:
    """One expert: `tokens` rows from `row` on, columns from `col` on."""

    row: int
    col: int
    tokens: int


def groups_of(counts: list[int], align: int) -> list[Group]:
    """Where a plan of these counts puts its experts."""
    groups, row, col = [], 0, 0
    for tokens in counts:
        groups.append(Group(row, col, tokens))
        row += -(-tokens // align) * align
        col += -(-tokens // 128) * 128
    return groups


def shift_tile(
    codes: Codes, scale_inv: NDArray[np.float32], fmt: Format
) -> tuple[Codes, np.float64]:
    """codes [n, c] with a power-of-two scale a row, onto S = the largest scale that matters."""
    nonzero = ((codes & 0x7F) != 0).any(1) & (scale_inv > 0)
    s = np.float64(scale_inv[nonzero].max()) if nonzero.any() else np.float64(1)
    return shift_onto(codes, scale_inv, s, fmt), s


def shift_channel(
    codes: Codes, scale_inv: NDArray[np.float32], fmt: Format
) -> tuple[Codes, np.float64]:
    """codes [n] of one channel, onto the smallest power of two that holds its largest value."""
    values = fmt.decode(codes & 0x7F) * scale_inv.astype(np.float64)
    values = values[np.isfinite(values)]
    amax = values.max() if values.size else 0.0
    s = np.float64(1)
    if amax > 0:
        s = np.float64(2.0 ** np.ceil(np.log2(amax / fmt.max)))
        while amax <= fmt.max * s / 2:  # log2 may round up
            s /= 2
        while amax > fmt.max * s:
            s *= 2
        s = max(s, np.float64(2.0**-126))
    return shift_onto(codes, scale_inv, s, fmt), s


def shift_onto(codes: Codes, scale_inv: NDArray[np.float32], s: np.float64, fmt: Format) -> Codes:
    """RNE(code * scale_inv / s), NaN and Inf codes as they are."""
    ratio = scale_inv.astype(np.float64) / s
    values = fmt.decode(codes)
    special = ~np.isfinite(values)
    ratio = ratio if codes.ndim == 1 else ratio[:, None]
    return np.where(special, codes, fmt.encode(np.where(special, 0, values) * ratio))


def transpose(
    codes: Codes,
    scale_inv: NDArray[np.float32],
    groups: list[Group],
    kcap: int,
    fmt: Format,
    columns: str,
) -> tuple[Codes, NDArray[np.float32]]:
    """codes [R, C], scale_inv [R, cdiv(C, 128)] -> [C, Kcap] and its scales by 128-token tiles.

    Scales: "block" [cdiv(C, 128), Kcap / 128], "column" [Kcap / 128, C]. Unwritten tiles are zero.
    """
    c = codes.shape[1]
    out = np.zeros((c, kcap), np.uint8)
    scales = np.zeros((-(-c // 128), kcap // 128) if columns == "block" else (kcap // 128, c))
    for g in groups:
        for t in range(0, g.tokens, 128):
            n = min(128, g.tokens - t)
            rows, col = slice(g.row + t, g.row + t + n), g.col + t
            for j in range(0, c, 128):
                tile, s = codes[rows, j : j + 128], scale_inv[rows, j // 128]
                if columns == "block":
                    shifted, scales[j // 128, col // 128] = shift_tile(tile, s, fmt)
                    out[j : j + 128, col : col + n] = shifted.T
                else:
                    for i in range(tile.shape[1]):
                        shifted, scales[col // 128, j + i] = shift_channel(tile[:, i], s, fmt)
                        out[j + i, col : col + n] = shifted
    return out, scales.astype(np.float32)


def quantize_columns(
    x: NDArray[np.float32],
    groups: list[Group],
    kcap: int,
    fmt: Format,
    columns: str,
    *,
    scale: str = "pow2",
    eps: float = 1e-10,
    dtype: str = "float32",
) -> tuple[Codes, NDArray[np.float32]]:
    """x [R, C] quantized along the tokens of each group: layouts as in `transpose`."""
    c = x.shape[1]
    out = np.zeros((c, kcap), np.uint8)
    scales = np.zeros((-(-c // 128), kcap // 128) if columns == "block" else (kcap // 128, c))
    tile = (128, 128) if columns == "block" else (1, 128)
    for g in groups:
        if g.tokens == 0:
            continue
        codes, scale_inv = quantize(
            np.ascontiguousarray(x[g.row : g.row + g.tokens].T),
            fmt,
            tile=tile,
            scale=scale,
            eps=eps,
            dtype=dtype,
        )
        out[:, g.col : g.col + g.tokens] = codes
        at = slice(g.col // 128, g.col // 128 + -(-g.tokens // 128))
        if columns == "block":
            scales[:, at] = scale_inv
        else:
            scales[at] = scale_inv.T
    return out, scales.astype(np.float32)
