"""plan_from_row_id_map against loops over the map's cells, and rows moved by its plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass.routing import RoutingPlan, buffer_words
from on_device import CPU_ONLY, ops
from reference_te import random_mask, rows_of

pytestmark = pytest.mark.usefixtures("device")

SPARE = 7  # rows that no cell names


def mask_map(mask: Tensor, align: int) -> tuple[Tensor, Tensor, list[tuple[int, int, int]], int]:
    """(row_id_map, pad_offsets, (token, slot, row in memory) of each row, rows), unused cells of
    the map holding anything."""
    of = rows_of(mask, align)
    tokens, experts = mask.shape
    made = torch.randint(-9, 9999, (tokens, 2 * experts + 1), dtype=torch.int32)
    cells = []
    for t in range(tokens):
        ids = [e for e in range(experts) if mask[t, e]][::-1]
        made[t, -1] = len(ids)
        for i, e in enumerate(ids):
            made[t, i], made[t, experts + i] = of.unpadded[t, e], e
            cells.append((t, e, int(of.row_of[t, e])))
    return made, of.pad_offsets, cells, len(of.token) + SPARE


def assert_plan(plan: RoutingPlan, cells: list[tuple[int, int, int]]) -> None:
    row_of = torch.full((plan.tokens, plan.slots), -1, dtype=torch.int32)
    token_of_row = torch.full((plan.rows,), -1, dtype=torch.int32)
    slot_of_row = token_of_row.clone()
    for token, slot, row in cells:
        row_of[token, slot] = row
        token_of_row[row], slot_of_row[row] = token, slot
    assert torch.equal(plan.row_of, row_of)
    assert torch.equal(plan.token_of_row, token_of_row)
    assert torch.equal(plan.slot_of_row, slot_of_row)
    assert plan.tokens_per_expert.tolist() == [plan.rows]
    assert plan.row_offsets.tolist() == [0, plan.rows]
    assert all(block == [0, 0, 0, -1] for block in plan.col_blocks.tolist())
    assert not plan.status.any()


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("sizes", [(1, 2), (33, 6), (300, 64)])
def test_mask_maps(sizes: tuple[int, int], align: int) -> None:
    torch.manual_seed(0)
    made, pads, cells, rows = mask_map(random_mask(*sizes), align)
    offsets = {"pad_offsets": pads} if align > 1 else {}
    plan = ops.plan_from_row_id_map(made, rows=rows, **offsets)
    assert_plan(plan, cells)
    assert torch.equal(plan.buffer, ops.plan_from_row_id_map(made, rows=rows, **offsets).buffer)


@pytest.mark.parametrize("sizes", [(1, 1), (33, 3), (700, 8)])
def test_index_maps(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    tokens, slots = sizes
    rows = tokens * slots + SPARE
    made = torch.randperm(rows)[: tokens * slots].int()
    made[torch.rand(made.shape) < 0.2] = -1
    plan = ops.plan_from_row_id_map(made, rows=rows, slots=slots)
    assert_plan(plan, [(i % tokens, i // tokens, r) for i, r in enumerate(made.tolist()) if r >= 0])


def test_of_nothing() -> None:
    """No tokens, no rows, no token with an expert."""
    nothing = torch.zeros(0, 5, dtype=torch.int32)
    assert_plan(ops.plan_from_row_id_map(nothing, rows=0), [])
    assert_plan(ops.plan_from_row_id_map(nothing, rows=4), [])
    assert_plan(ops.plan_from_row_id_map(nothing[:, 0], rows=4, slots=2), [])
    assert_plan(ops.plan_from_row_id_map(torch.zeros(3, 5, dtype=torch.int32), rows=0), [])


@pytest.mark.parametrize("probs", [False, True])
def test_rows_move_by_the_plan(probs: bool) -> None:
    """Sums of each token's rows, and back; rows between them that the map does not name."""
    torch.manual_seed(0)
    mask = random_mask(40, 6)
    made, pads, cells, rows = mask_map(mask, 16)
    plan = ops.plan_from_row_id_map(made, rows=rows, pad_offsets=pads)
    y, dout = torch.randn(rows, 32), torch.randn(40, 32)
    weights = torch.rand(40, 6) if probs else None
    out, dy = torch.zeros(40, 32, dtype=torch.float64), torch.zeros(rows, 32)
    for t, e, row in sorted(cells):
        weight = 1.0 if weights is None else weights[t, e]
        out[t] += y[row].double() * weight
        dy[row] = dout[t] * weight
    torch.testing.assert_close(ops.unpermute_unpad(y, plan, weights), out.float())
    if weights is None:
        assert torch.equal(ops.unpermute_unpad_backward(dout, plan).dy, dy)
        assert torch.equal(ops.permute_pad(dout, plan).y, dy)
    else:
        into: Any = (torch.full((rows, 32), 7.0), torch.full((40, 6), 7.0))
        found = ops.unpermute_unpad_backward(dout, plan, y, weights, out=into)
        assert torch.equal(found.dy, dy)
        assert not found.dprobs[~mask].any()


@pytest.mark.parametrize("probs", [False, True])
def test_the_gradient_of_no_tokens_is_zero(probs: bool) -> None:
    """Where no token is, every row is padding."""
    of_map = ops.plan_from_row_id_map(torch.zeros(0, 5, dtype=torch.int32), rows=4)
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    of_segments = ops.dispatch_plan(nothing, num_experts=4, ranks=2, segment=3).plan
    for plan in [of_map] if probs else [of_map, of_segments]:
        operands = (torch.randn(plan.rows, 32), torch.zeros(0, plan.slots)) if probs else ()
        into: Any = (torch.full((plan.rows, 32), 7.0), torch.zeros(0, 2) if probs else None)
        ops.unpermute_unpad_backward(torch.zeros(0, 32), plan, *operands, out=into)
        assert not into[0].any()


WRONG = {
    "a row at the end": (
        [[0, 4, 0, 1, 2]],
        {},
        r"name rows in \[0, 4\); got 4 for token 0, slot 1",
    ),
    "a row below 0": ([[-1, 0, 0, 1, 1]], {}, "got -1 for token 0"),
    "an expert past the last": (
        [[0, 0, 2, 0, 1]],
        {},
        r"name experts in \[0, 2\); got 2 for token",
    ),
    "too many experts": ([[0, 1, 0, 1, 3]], {}, "0 to 2 experts per token .*; got 3 for token 0"),
    "one row, two tokens": (
        [[2, 0, 0, 0, 1], [2, 0, 1, 0, 1]],
        {},
        "name a row once; got 2 for tokens 0 and 1",
    ),
    "a padded row at the end": ([[1, 0, 1, 0, 1]], {"pad_offsets": [0, 3]}, "got 4 for token 0"),
    "an index at the end": ([0, 4], {"slots": 1}, "got 4 for token 1"),
    "an index below -1": ([0, -2], {"slots": 2}, "got -2 for token 0, slot 1"),
}


@CPU_ONLY
@pytest.mark.parametrize("wrong", WRONG)
def test_bad_cells(wrong: str) -> None:
    cells, how, message = WRONG[wrong]
    given = {k: torch.tensor(v) if k == "pad_offsets" else v for k, v in how.items()}
    made = torch.tensor(cells, dtype=torch.int32)
    slots = how.get("slots", 2)
    tokens = len(made) // slots if "slots" in how else len(made)
    sizes = (tokens, slots, 1, 1, 4)
    out = RoutingPlan(torch.full((buffer_words(*sizes),), 7).int(), *sizes)
    with pytest.raises(ValueError, match=message):
        ops.plan_from_row_id_map(made, rows=4, out=out, **given)
    assert (out.buffer == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_cuda_counts_bad_cells() -> None:
    cells = [[0, 9, 0, 1, 2], [3, 1, 5, 1, 2], [2, 0, 0, 0, 7]]
    plan = ops.plan_from_row_id_map(torch.tensor(cells, dtype=torch.int32), rows=4)
    assert plan.status.tolist()[:2] == [1, 2]
    assert plan.row_of.tolist() == [[0, -1], [-1, 1], [-1, -1]]


def test_bad_arguments() -> None:
    made = torch.zeros(4, 5, dtype=torch.int32)
    plan = ops.route(2, topk_idx=torch.zeros(4, 2, dtype=torch.int64))
    for message, call in {
        "row_id_map must be one of int32; got int64": lambda: ops.plan_from_row_id_map(
            made.long(), rows=4
        ),
        r"row_id_map must be \[4, 3\]; got \[4, 4\]": lambda: ops.plan_from_row_id_map(
            made[:, :4].contiguous(), rows=4
        ),
        "row_id_map must have 3 cells per token; got 4": lambda: ops.plan_from_row_id_map(
            made[:, 0].contiguous(), rows=4, slots=3
        ),
        r"pad_offsets must be \[2\]": lambda: ops.plan_from_row_id_map(
            made, rows=4, pad_offsets=torch.zeros(3, dtype=torch.int64)
        ),
        "pad_offsets must be of a mask map": lambda: ops.plan_from_row_id_map(
            made[:, 0].contiguous(), rows=4, slots=1, pad_offsets=torch.zeros(1, dtype=torch.int64)
        ),
        "out must be a plan of": lambda: ops.plan_from_row_id_map(made, rows=4, out=plan),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
