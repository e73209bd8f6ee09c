"""Checks, their random inputs, and the ways to compare with the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops

from . import reference as ref

Pairs = list[tuple[NDArray[Any], NDArray[Any]]]
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Check:
    """One contract and what was measured."""

    op: str
    case: str
    contract: str
    measured: str
    passed: bool


class Inputs:
    """Random inputs of one run, the same on every machine."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, spread: float = 2.0) -> torch.Tensor:
        """bf16; every row has a magnitude of its own, 2^(N(0, spread))."""
        row = np.exp2(self.rng.normal(size=(*shape[:-1], 1)) * spread)
        x = self.rng.normal(size=shape) * row
        return torch.from_numpy(x.astype(np.float32)).bfloat16().to(self.device)

    def hard(self, m: int, k: int) -> torch.Tensor:
        """float32 rows of what goes wrong first: zeros, subnormals, huge, Inf and NaN values."""
        x = (self.rng.normal(size=(m, k)) * 3).astype(np.float32)
        x[0::9] = 0.0
        x[1::9] *= np.float32(1e-40)
        x[2::9] *= np.float32(1e37)
        x[3::9, 5] = np.inf
        x[4::9, 7] = np.nan
        x[5::9] = -0.0
        x[6::9] = np.exp2(self.rng.integers(-12, 12, size=k))
        return torch.from_numpy(x).to(self.device)

    def probs(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.random(shape).astype(np.float32)).to(self.device)

    def ids(self, tokens: int, experts: int, slots: int) -> torch.Tensor:
        """Top-k ids with dropped slots, int64 [T, S]."""
        ids = self.rng.integers(-1, experts, size=(tokens, slots))
        return torch.from_numpy(ids).to(self.device)

    def routing(
        self, tokens: int, experts: int, slots: int, align: int
    ) -> tuple[RoutingPlan, ref.Plan]:
        """A routing with dropped slots and an empty expert, as the library and as the reference."""
        ids = self.rng.integers(-1, experts - 1, size=(tokens, slots))  # none for the last expert
        ids_here = torch.from_numpy(ids).to(self.device)
        plan = ops.route(experts, topk_idx=ids_here, align=align)
        return plan, ref.route(ids, experts, align, ids.size)


# ---- comparing ----------------------------------------------------------------------------------


def array(t: Any) -> NDArray[Any]:
    """On the host, in NumPy; FP8 as its codes, bf16 as float32."""
    t = t.detach().cpu()
    if t.dtype in FP8_DTYPES:
        t = t.view(torch.uint8)
    elif t.dtype in (torch.bfloat16, torch.float16):
        t = t.float()
    out: NDArray[Any] = t.numpy()
    return out


def quantized(t: Fp8Tensor, rows: int | None = None) -> ref.Quantized:
    """Codes and scales as [tiles of M, tiles of K] of any layout; `rows` cuts off the tail."""
    codes, scale = array(t.data), array(t.scale_inv)
    if t.scale_layout == "gemm":
        scale = scale.T[: codes.shape[0]]
    return ref.Quantized(codes[:rows], scale[:rows] if t.scale_layout != "block" else scale)


def pairs_of(mine: ref.Quantized, wanted: ref.Quantized) -> Pairs:
    """Codes with codes, scales with scales."""
    return [(mine.codes, wanted.codes), (mine.scale, wanted.scale)]


def bit_equal(op: str, case: str, pairs: Pairs) -> Check:
    """All pairs agree in every bit (any NaN equals any NaN)."""
    differ = total = 0
    for mine, wanted in pairs:
        if mine.shape != wanted.shape:
            return Check(op, case, "bit-equal", f"shape {mine.shape}, not {wanted.shape}", False)
        same = mine == wanted
        if mine.dtype.kind == "f":
            same = (same & (np.signbit(mine) == np.signbit(wanted))) | (
                np.isnan(mine) & np.isnan(wanted)
            )
        differ += int((~same).sum())
        total += same.size
    return Check(op, case, "bit-equal", f"{differ} of {total} differ", differ == 0)


def within(op: str, case: str, contract: str, measured: float, limit: float) -> Check:
    return Check(op, case, contract, f"{measured:.3g}", bool(measured <= limit))


def rounded(x: NDArray[Any]) -> NDArray[Any]:
    """float32 -> bf16 -> float32, to nearest even."""
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()


def tile_rows(columns: str) -> int:
    return 128 if columns == "block" else 1


def column_pairs(t: Fp8Tensor, wanted: list[ref.Quantized], p: ref.Plan) -> Pairs:
    """Each expert's segment of a transposed operand, its zero tail and its scales."""
    codes, scale = array(t.data), array(t.scale_inv)
    if t.scale_layout == "gemm":
        scale = scale.T[: codes.shape[0]]
    pairs = []
    for e, w in enumerate(wanted):
        first, last = p.col_offsets[e], p.col_offsets[e + 1]
        padded = np.zeros((codes.shape[0], last - first), np.uint8)
        padded[:, : w.codes.shape[1]] = w.codes
        pairs += [
            (codes[:, first:last], padded),
            (scale[:, first // 128 : last // 128], w.scale),
        ]
    return pairs


def code_steps(mine: ref.Quantized, wanted: ref.Quantized) -> tuple[int, int]:
    """(largest distance in codes where the scales agree, tiles whose scales differ)."""
    signed = [
        np.where(q.codes & 0x80, -1, 1) * (q.codes & 0x7F).astype(np.int64) for q in (mine, wanted)
    ]
    agree = mine.scale == wanted.scale
    same = np.repeat(agree, 128, axis=1)[:, : mine.codes.shape[1]]
    return int(np.abs(signed[0] - signed[1])[same].max(initial=0)), int((~agree).sum())


def expand(t: Fp8Tensor, rows: int) -> NDArray[np.float64]:
    return ref.dequantize(quantized(t), rows)


def gemm_error(d: NDArray[Any], exact: NDArray[Any], unit: NDArray[Any], rounding: float) -> float:
    """The largest error past the output's rounding, in units of the bound."""
    past = np.abs(d - exact) - rounding * np.abs(exact)
    return float((past / np.maximum(unit, 1e-300)).max(initial=0.0))
