"""Operands contracted over tokens, expert by expert, by verify's reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8moe_cutlass.tools.verify import reference as ref

Codes = NDArray[np.uint8]
Scales = NDArray[np.float32]


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


def _columns(
    c: int,
    groups: list[Group],
    kcap: int,
    columns: str,
    of: Callable[[slice, int], ref.Quantized],
) -> tuple[Codes, Scales]:
    """Codes [C, Kcap]; scales [cdiv(C, 128), Kcap / 128] of "block", [Kcap / 128, C] of "column".
    of: rows and the tile's rows (of channels) -> those rows' codes [C, m] and scales."""
    tile = 128 if columns == "block" else 1
    codes = np.zeros((c, kcap), np.uint8)
    scales = np.zeros((-(-c // tile), kcap // 128), np.float32)
    for g in groups:
        if g.tokens:
            q = of(slice(g.row, g.row + g.tokens), tile)
            codes[:, g.col : g.col + g.tokens] = q.codes
            scales[:, g.col // 128 : g.col // 128 + q.scale.shape[1]] = q.scale
    return codes, scales if columns == "block" else scales.T


def transpose(
    codes: Codes, scale_inv: Scales, groups: list[Group], kcap: int, fp8: str, columns: str
) -> tuple[Codes, Scales]:
    """codes [R, C], scale_inv [R, cdiv(C, 128)], transposed in the FP8 domain."""

    def of(rows: slice, tile: int) -> ref.Quantized:
        return ref.transpose_fp8(ref.Quantized(codes[rows], scale_inv[rows]), tile, fp8)

    return _columns(codes.shape[1], groups, kcap, columns, of)


def quantize_columns(
    x: Scales, groups: list[Group], kcap: int, fp8: str, columns: str, rule: str = "pow2"
) -> tuple[Codes, Scales]:
    """x [R, C] float32 quantized along the tokens of each group."""

    def of(rows: slice, tile: int) -> ref.Quantized:
        return ref.quantize(x[rows].T, tile, fp8, rule, largest=ref.LARGEST["float32"])

    return _columns(x.shape[1], groups, kcap, columns, of)
