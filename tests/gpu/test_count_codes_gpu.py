"""count_codes: CUDA counts what the CPU backend counts, two times the same."""

from __future__ import annotations

import pytest
import torch

from fp8moe_cutlass import ops
from fp8moe_cutlass.ops.quantize import COUNTS
from on_device import moved
from test_count_codes import FP8, routed, tokens_of

pytestmark = pytest.mark.gpu


def counts(device, t, plan, **options):
    found = torch.zeros(COUNTS, dtype=torch.int64, device=device)
    t, plan = moved(t, device), moved(plan, device)
    options = {name: moved(value, device) for name, value in options.items()}
    for _ in range(2):
        ops.count_codes(t, plan, found, **options)
    return found.tolist()


@pytest.mark.parametrize("columns", [None, "block", "column"])
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "c"), [(515, 2, 4, 208), (300, 8, 33, 2880), (64, 40, 40, 128)]
)
@pytest.mark.parametrize("stride", [1, 8])
def test_tokens(tokens, slots, experts, c, stride, fp8, columns, device):
    t = tokens_of(tokens, c, fp8, 9)
    plan = routed(tokens, slots, experts, align=16)
    options = {"stride": stride}
    if columns is not None:
        options["columns"] = ops.permute_transpose_fp8(t, plan, columns=columns)
    want = counts("cpu", t, plan, **options)
    assert counts(device, t, plan, **options) == want
    assert want[1] > 0
    assert (want[3] > 0) == (columns is not None)


@pytest.mark.parametrize("capacity", [200, 700])
def test_rows_of_the_plan(capacity, device):
    plan = routed(300, 2, 5, align=16, capacity=capacity)
    rows, _ = ops.permute_pad(tokens_of(300, 272, "e4m3", 3), plan)
    rows.data.view(torch.uint8)[int(plan.row_offsets[-1]) :] = 0x55
    want = counts("cpu", rows, plan)
    assert counts(device, rows, plan) == want


def test_no_rows(device):
    plan = ops.route(4, topk_idx=torch.full((0, 2), -1))
    assert counts(device, tokens_of(0, 128, "e4m3", 1), plan) == [0] * COUNTS
