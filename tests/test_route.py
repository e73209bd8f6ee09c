"""route and plan_from_counts against the reference of `verify`."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from backends import ROUTINGS, poison, routing
from fp8moe_cutlass import RoutingPlan
from fp8moe_cutlass.tools.verify import reference as ref
from on_device import CPU_ONLY, LARGE, ops

pytestmark = pytest.mark.usefixtures("device")

ALIGNS = [1, 16, 32, 128]


def ids_of_map(routing_map: Tensor) -> Tensor:
    """A mask [T, E] as ids [T, E]: slot e names expert e, or none."""
    expert = torch.arange(routing_map.shape[1]).expand(routing_map.shape)
    return torch.where(routing_map != 0, expert, -1)


def assert_plan(plan: RoutingPlan, ids: Tensor, experts: int, align: int, capacity: int) -> None:
    """Every section of the buffer. ids [T, S], -1: none."""
    want = ref.route(ids.numpy(), experts, align, capacity)
    rows = want.row_offsets[-1]
    assert rows <= plan.rows
    assert want.col_offsets[-1] <= plan.columns
    assert plan.tokens_per_expert.tolist() == want.counts.tolist()
    assert plan.row_offsets.tolist() == want.row_offsets.tolist()
    assert plan.col_offsets.tolist() == want.col_offsets.tolist()
    blocks = []  # the first row, tokens, rows, the expert
    for e, held in enumerate(want.counts.tolist()):
        first, last = want.row_offsets[e : e + 2].tolist()
        for at in range(first, first + held, 128):
            blocks.append([at, min(128, first + held - at), min(128, last - at), e])
    blocks += (plan.columns // 128 - len(blocks)) * [[0, 0, 0, -1]]
    assert plan.col_blocks.tolist() == blocks
    assert plan.row_of.tolist() == want.row_of[: plan.tokens].tolist()
    token, slot = want.sources().T
    assert plan.token_of_row.tolist()[:rows] == token.tolist()
    assert plan.slot_of_row.tolist()[:rows] == slot.tolist()
    overflow = int((ids >= 0).sum()) - int(want.counts.sum())
    assert plan.status.tolist() == [overflow] + [0] * 7


def assert_mask_plan(mask: Tensor, experts: int, align: int, capacity: int) -> None:
    """A mask is S == E slots, slot e being expert e."""
    plan = ops.route(experts, routing_map=mask, capacity=capacity, align=align)
    assert_plan(plan, ids_of_map(mask), experts, align, capacity)


def check(idx: Tensor, experts: int, align: int = 1, capacity: int | None = None) -> RoutingPlan:
    """A plan, and one written over poison."""
    plan = ops.route(experts, topk_idx=idx, align=align, capacity=capacity)
    out = RoutingPlan(poison(torch.empty_like(plan.buffer)), *plan.sizes)
    ops.route(experts, topk_idx=idx, align=align, capacity=capacity, out=out)
    for one in (plan, out):
        assert_plan(one, idx, experts, align, idx.numel() if capacity is None else capacity)
    return plan


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize("kind", ROUTINGS)
def test_routings(kind: str, align: int) -> None:
    for tokens, experts, slots in ((1, 1, 1), (33, 5, 2), (1500, 64, 8), (4096, 256, 8)):
        idx = routing(kind, tokens, experts, slots)
        check(idx, experts, align).check()
        check(idx.int(), experts, align, capacity=tokens)  # overflows


@pytest.mark.parametrize(
    "idx",
    [
        torch.zeros(0, 2, dtype=torch.int32),
        torch.full((5, 2), -1),
        torch.full((40, 2), 3),  # every token names one expert twice
        torch.tensor([[0], [2], [0]]),  # experts 1 and 3 have none
        torch.tensor([[3, 3, -1, 0]]),
    ],
    ids=["no tokens", "all dropped", "one expert, twice", "empty experts", "one token"],
)
@pytest.mark.parametrize("align", ALIGNS)
def test_corners(idx: Tensor, align: int) -> None:
    check(idx, 4, align)


def test_random_sizes() -> None:
    """Three hundred sizes off every tile, dropped ids among them."""
    draw = random.Random(7)
    for _ in range(300):
        experts = draw.choice((1, 2, 7, 31, 32, 33, 100, 512, 1023, 1024))
        tokens, slots = draw.randrange(0, 700), draw.randrange(1, 12)
        idx = torch.randint(-1, experts, (tokens, slots))
        capacity = draw.choice((None, 0, 1, draw.randrange(0, tokens * slots + 200)))
        check(idx, experts, draw.choice(ALIGNS), capacity)


@LARGE
@pytest.mark.parametrize("experts", [8, 1024])
def test_three_launches(experts: int) -> None:
    """Past 65,536 tokens CUDA sums the counts by a launch of their own; the CPU works in chunks."""
    for tokens, slots in ((65_537, 2), (300_001, 3)):
        idx = torch.randint(-1, experts, (tokens, slots))
        check(idx, experts, 16)
        idx[:] = experts - 1
        check(idx, experts, 128)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_masks(dtype: torch.dtype) -> None:
    for tokens, experts in ((1, 1), (70, 3), (77, 6), (515, 33), (1024, 256)):
        mask = (torch.rand(tokens, experts) < 0.1).to(dtype)
        if dtype not in (torch.bool, torch.uint8):
            mask *= 5  # any value but zero routes
        kept = int((mask != 0).sum())
        for capacity, align in ((max(kept, 1), 16), (kept + 9, 16), (kept // 2, 128), (0, 1)):
            assert_mask_plan(mask, experts, align, capacity)


@LARGE
def test_from_counts() -> None:
    draw = random.Random(3)
    corners = [[3, 0, 200, 1], [0, 0], [129], [0, 5, 0]]
    for i in range(100):
        experts = draw.choice((1, 2, 33, 256, 1024))
        some = [draw.choice((0, 1, draw.randrange(300))) for _ in range(experts)]
        counts = corners[i] if i < len(corners) else some
        total = sum(counts)
        for capacity in (total, total + 77, total // 2):
            align = draw.choice(ALIGNS)
            given = torch.tensor(counts, dtype=draw.choice((torch.int32, torch.int64)))
            plan = ops.plan_from_counts(given, capacity=capacity, align=align)
            packed = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            ids = torch.nn.functional.pad(packed, (0, max(0, capacity - total)), value=-1)
            assert_plan(plan, ids[:, None], len(counts), align, capacity)


def test_overflow_is_counted_and_reported() -> None:
    plan = ops.route(2, topk_idx=torch.zeros(10, 1, dtype=torch.int32), capacity=4)
    assert plan.row_of.flatten().tolist() == [0, 1, 2, 3] + [-1] * 6
    assert int(plan.status[0]) == 6
    with pytest.raises(ValueError, match="6 assignments dropped"):
        plan.check()


@CPU_ONLY
@pytest.mark.parametrize("bad", [4, -2, 2**31 - 1])
def test_bad_id_is_an_error_and_writes_nothing(bad: int) -> None:
    out = ops.route(4, topk_idx=torch.zeros(5, 2, dtype=torch.int64))
    before = out.buffer.clone()
    idx = torch.ones(5, 2, dtype=torch.int64)
    idx[3, 1] = bad
    with pytest.raises(ValueError, match=rf"\[route\].*got {bad} at token 3, slot 1"):
        ops.route(4, topk_idx=idx, out=out)
    assert torch.equal(out.buffer, before)


@CPU_ONLY
def test_bad_counts_are_errors() -> None:
    with pytest.raises(ValueError, match="got -1 for expert 1"):
        ops.plan_from_counts(torch.tensor([2, -1]), capacity=4)
    huge = torch.tensor([2**62, 2**62])
    with pytest.raises(ValueError, match="sum to less than"):
        ops.plan_from_counts(huge, capacity=4)


def test_bad_arguments_are_errors() -> None:
    idx = torch.zeros(3, 2, dtype=torch.int32)
    mask = torch.ones(3, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="exactly one"):
        ops.route(4)
    with pytest.raises(ValueError, match="exactly one"):
        ops.route(4, topk_idx=idx, routing_map=mask, capacity=3)
    with pytest.raises(ValueError, match="capacity"):
        ops.route(4, routing_map=mask)
    with pytest.raises(ValueError, match=r"\[route\] plan.align must be 1, 16, 32 or 128; got 8"):
        ops.route(4, topk_idx=idx, align=8)
    with pytest.raises(ValueError, match="int32, int64; got float32"):
        ops.route(4, topk_idx=idx.float())
    with pytest.raises(ValueError, match=r"slots must be plan\.experts"):
        ops.route(5, routing_map=mask, capacity=3)
    with pytest.raises(ValueError, match="2 dimensions"):
        ops.route(4, topk_idx=idx[0])
    with pytest.raises(ValueError, match=r"plan needs .*experts >= 1"):
        ops.route(0, topk_idx=idx)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"align": 0}, "plan.align must be 1, 16, 32 or 128; got 0"),
        ({"align": -16}, "plan.align must be 1, 16, 32 or 128; got -16"),
        ({"capacity": -1000}, "plan needs .*capacity >= 0; got .*-1000"),
    ],
)
def test_sizes_of_which_no_plan_can_be(sizes: dict[str, int], message: str) -> None:
    counts = torch.tensor([2, 1])
    with pytest.raises(ValueError, match=r"\[route\] " + message):
        ops.route(4, topk_idx=torch.zeros(3, 2, dtype=torch.int32), **sizes)
    with pytest.raises(ValueError, match=r"\[plan_from_counts\] " + message):
        ops.plan_from_counts(counts, **{"capacity": 3, **sizes})
