"""count_codes against what the transposes did to the codes, counted one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fp8moe_cutlass.ops
from fp8moe_cutlass import Fp8Tensor, RoutingPlan
from fp8moe_cutlass.ops.quantize import COUNTS
from on_device import ops

pytestmark = pytest.mark.usefixtures("device")

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def codes_of(t: Fp8Tensor) -> torch.Tensor:
    """Magnitude bits [M, K]."""
    return (t.data.view(torch.uint8) & 0x7F).int()


def tokens_of(tokens: int, c: int, fp8: str, spread: int) -> Fp8Tensor:
    """Random codes, NaNs and zero rows among them, with power-of-two scales far apart."""
    codes = torch.randint(0, 256, (tokens, c), dtype=torch.uint8)
    codes[::9] = 0
    codes[4::9] &= 0x83
    codes[1::5, : c // 2] = 0x80
    scale_inv = torch.exp2(torch.randint(-spread, spread + 1, (tokens, -(-c // 128))).float())
    return Fp8Tensor(codes.view(FP8[fp8]), scale_inv)


def routed(tokens: int, slots: int, experts: int, **options: Any) -> RoutingPlan:
    topk_idx = torch.rand(tokens, max(experts, slots)).topk(slots).indices % experts
    topk_idx[::7, 0] = -1
    return ops.route(experts, topk_idx=topk_idx, **options)


def counted(t: Fp8Tensor, plan: RoutingPlan, stride: int, columns: Fp8Tensor) -> list[int]:
    """What count_codes adds, from the rows and their transposed copy."""
    found = [0] * COUNTS
    codes, blocks = codes_of(t), t.scale_inv.shape[1]
    moved = codes_of(columns)
    for token in range(0, len(codes), stride):
        for b in range(blocks):
            tile = codes[token, 128 * b : 128 * b + 128]
            if not tile.any():
                continue
            found[0] += len(tile)
            found[1] += int((tile == 0).sum())
            for row in plan.row_of[token].tolist():
                if row < 0:
                    continue
                e = max(e for e in range(plan.experts) if plan.row_offsets[e] <= row)
                column = int(plan.col_offsets[e]) + row - int(plan.row_offsets[e])
                after = moved[128 * b : 128 * b + 128, column]
                found[2] += int((tile != 0).sum())
                found[3] += int(((tile != 0) & (after == 0)).sum())
                if columns.scale_layout == "block":
                    to = float(columns.scale_inv[b, column // 128])
                else:
                    to = float(
                        columns.scale_inv[column // 128, 128 * b : 128 * b + len(tile)].max()
                    )
                k = round(math.log2(to) - math.log2(float(t.scale_inv[token, b])))
                found[4 + min(max(k, 0), 16)] += 1
    return found


@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize(("c", "spread", "stride"), [(208, 2, 1), (272, 9, 3), (128, 40, 1)])
def test_against_the_transpose(c: int, spread: int, stride: int, fp8: str, columns: Any) -> None:
    t = tokens_of(150, c, fp8, spread)
    plan = routed(150, 2, 4, align=16, capacity=280)
    turned = ops.permute_transpose_fp8(t, plan, columns=columns)
    counts = torch.zeros(COUNTS, dtype=torch.int64)
    ops.count_codes(t, plan, counts, columns=turned, stride=stride)
    want = counted(t, plan, stride, turned)
    assert counts.tolist() == want
    assert want[3] > 0
    # Without columns the first two words alone; counters are added to.
    ops.count_codes(t, plan, counts, stride=stride)
    assert counts.tolist() == [2 * want[0], 2 * want[1], *want[2:]]


@pytest.mark.parametrize("stride", [1, 4])
def test_rows_of_the_plan(stride: int) -> None:
    """Rows without an assignment are left out, whatever they hold."""
    plan = routed(90, 3, 5, align=16, capacity=300)
    rows, _ = ops.permute_pad(tokens_of(90, 208, "e4m3", 3), plan)
    undefined = torch.ones(plan.rows, dtype=torch.bool)
    undefined[: int(plan.row_offsets[-1])] = plan.token_of_row[: int(plan.row_offsets[-1])] < 0
    rows.data.view(torch.uint8)[undefined] = 0x55
    want = [0, 0]
    for row in codes_of(rows)[~undefined & (torch.arange(plan.rows) % stride == 0)]:
        for tile in row.split(128):
            want[0] += len(tile) if tile.any() else 0
            want[1] += int((tile == 0).sum()) if tile.any() else 0
    counts = torch.zeros(COUNTS, dtype=torch.int64)
    ops.count_codes(rows, plan, counts, stride=stride)
    assert counts.tolist() == want + [0] * (COUNTS - 2)
    assert want[1] > 0


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_rows(tokens: int) -> None:
    plan = ops.route(4, topk_idx=torch.full((tokens, 2), -1))
    t = tokens_of(tokens, 128, "e4m3", 1)
    counts = torch.full((COUNTS,), 5)
    turned = ops.permute_transpose_fp8(t, plan)
    ops.count_codes(t, plan, counts, columns=turned)
    assert counts[2:].tolist() == [5] * (COUNTS - 2)
    ops.count_codes(ops.permute_pad(t, plan)[0], plan, counts)
    assert counts[2:].tolist() == [5] * (COUNTS - 2)


def test_refusals() -> None:
    plan = routed(40, 2, 3)
    t = tokens_of(40, 128, "e4m3", 1)
    turned = ops.permute_transpose_fp8(t, plan)
    counts = torch.zeros(COUNTS, dtype=torch.int64)
    with pytest.raises(ValueError, match="stride must be at least 1; got 0"):
        ops.count_codes(t, plan, counts, stride=0)
    with pytest.raises(ValueError, match=r"counts must be \[21\]; got \[4\]"):
        ops.count_codes(t, plan, counts[:4])
    with pytest.raises(ValueError, match="counts must be one of int64; got int32"):
        ops.count_codes(t, plan, counts.int())
    with pytest.raises(ValueError, match="q must have scale layout row where columns are given"):
        ops.count_codes(ops.permute_pad(t, plan)[0], plan, counts, columns=turned)
    with pytest.raises(ValueError, match=r"q must be \[41, 128\]; got \[40, 128\]"):
        ops.count_codes(t, routed(41, 2, 3), counts)
    x = ops.quantize(torch.randn(40, 128), scale="fp32")
    with pytest.raises(ValueError, match="power-of-two scales"):
        ops.count_codes(x, plan, counts, columns=turned)
    assert not counts.any()


# ---- beside the CPU backend: over poison, twice, bit for bit ------------------------------------


def counts(op: Any, *args: Any, **options: Any) -> list[int]:
    """Of two calls."""
    found = torch.zeros(COUNTS, dtype=torch.int64)
    for _ in range(2):
        op.count_codes(*args, found, **options)
    return found.tolist()


@pytest.mark.parametrize("columns", [None, "block", "column"])
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "c"), [(515, 2, 4, 208), (300, 8, 33, 2880), (64, 40, 40, 128)]
)
@pytest.mark.parametrize("stride", [1, 8])
def test_tokens(tokens, slots, experts, c, stride, fp8, columns):
    t = tokens_of(tokens, c, fp8, 9)
    plan = routed(tokens, slots, experts, align=16)
    options = {"stride": stride}
    if columns is not None:
        options["columns"] = ops.permute_transpose_fp8(t, plan, columns=columns)
    want = counts(fp8moe_cutlass.ops, t, plan, **options)
    assert counts(ops, t, plan, **options) == want
    assert want[1] > 0
    assert (want[3] > 0) == (columns is not None)


@pytest.mark.parametrize("capacity", [200, 700])
def test_rows_of_plans(capacity):
    plan = routed(300, 2, 5, align=16, capacity=capacity)
    rows, _ = ops.permute_pad(tokens_of(300, 272, "e4m3", 3), plan)
    rows.data.view(torch.uint8)[int(plan.row_offsets[-1]) :] = 0x55
    assert counts(ops, rows, plan) == counts(fp8moe_cutlass.ops, rows, plan)
