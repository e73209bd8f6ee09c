"""route and plan_from_counts: CUDA against the CPU backend, bit for bit over defined content."""

from __future__ import annotations

import random

import pytest
import torch
from backends import ROUTINGS, poison, routing
from torch import Tensor

from fp8moe_cutlass import RoutingPlan, ops
from fp8moe_cutlass.routing import STATUS_WORDS


def assert_same_plan(expected: RoutingPlan, got: RoutingPlan) -> None:
    got = got.to("cpu")
    sections = ("status", "tokens_per_expert", "row_offsets", "col_offsets", "row_of", "col_blocks")
    for name in sections:
        assert torch.equal(getattr(expected, name), getattr(got, name)), name
    rows = int(expected.row_offsets[-1])
    for name in ("token_of_row", "slot_of_row"):
        assert torch.equal(getattr(expected, name)[:rows], getattr(got, name)[:rows]), name


def check(experts: int, **given: object) -> None:
    """route on both devices, twice on CUDA, over poisoned buffers."""
    expected = ops.route(experts, **given)
    on_gpu = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in given.items()}
    for _ in range(2):
        out = RoutingPlan(poison(torch.empty_like(expected.buffer, device="cuda")), *expected.sizes)
        assert_same_plan(expected, ops.route(experts, **on_gpu, out=out))


@pytest.mark.parametrize("align", [1, 16, 32, 128])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_routings(kind: str, align: int) -> None:
    for tokens, experts, slots in ((1, 1, 1), (33, 5, 2), (1500, 64, 8), (4096, 256, 8)):
        idx = routing(kind, tokens, experts, slots)
        check(experts, topk_idx=idx, align=align)
        check(experts, topk_idx=idx.int(), align=align, capacity=tokens)  # overflows


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_masks(dtype: torch.dtype) -> None:
    for tokens, experts in ((1, 1), (70, 3), (515, 33), (1024, 256)):
        mask = (torch.rand(tokens, experts) < 0.1).to(dtype)
        kept = int((mask != 0).sum())
        check(experts, routing_map=mask, capacity=max(kept, 1), align=16)
        check(experts, routing_map=mask, capacity=kept // 2, align=128)


def test_random_sizes() -> None:
    """Three hundred sizes off every tile, ids out of range among them."""
    draw = random.Random(7)
    for _ in range(300):
        experts = draw.choice((1, 2, 7, 31, 32, 33, 100, 512, 1023, 1024))
        tokens, slots = draw.randrange(0, 700), draw.randrange(1, 12)
        idx = torch.randint(-1, experts, (tokens, slots))
        capacity = draw.choice((None, 0, 1, draw.randrange(0, tokens * slots + 200)))
        check(experts, topk_idx=idx, align=draw.choice((1, 16, 32, 128)), capacity=capacity)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_are_dropped_and_counted(dtype: torch.dtype) -> None:
    """The CPU raises; CUDA routes as if they were -1 and says how many there were."""
    idx = torch.randint(0, 10, (300, 4), dtype=dtype)
    bad = torch.rand(300, 4) < 0.2
    expected = ops.route(10, topk_idx=torch.where(bad, -1, idx))
    wrong = torch.where(torch.rand(300, 4) < 0.5, torch.iinfo(dtype).max, -2).to(dtype)
    got = ops.route(10, topk_idx=torch.where(bad, wrong, idx).cuda())
    assert int(got.status[1]) == int(bad.sum())
    got.status.zero_()
    assert_same_plan(expected, got)
    with pytest.raises(ValueError, match=r"\[route\] topk_idx must lie"):
        ops.route(10, topk_idx=torch.where(bad, wrong, idx))


@pytest.mark.parametrize("experts", [8, 1024])
def test_three_launches(experts: int) -> None:
    """Past 65,536 tokens the counts are summed by a launch of their own."""
    for tokens, slots in ((65_537, 2), (300_001, 3)):
        idx = torch.randint(-1, experts, (tokens, slots))
        check(experts, topk_idx=idx, align=16)
        idx[:] = experts - 1
        check(experts, topk_idx=idx, align=128)


def test_from_counts() -> None:
    draw = random.Random(3)
    for _ in range(100):
        experts = draw.choice((1, 2, 33, 256, 1024))
        counts = torch.tensor([draw.choice((0, 1, draw.randrange(300))) for _ in range(experts)])
        total = int(counts.sum())
        for capacity in (total, total + 77, total // 2):
            align = draw.choice((1, 16, 32, 128))
            dtype = draw.choice((torch.int32, torch.int64))
            expected = RoutingPlan.from_counts(counts.to(dtype), capacity, align)
            got = RoutingPlan.from_counts(counts.to(dtype).cuda(), capacity, align)
            assert_same_plan(expected, got)


def test_negative_counts_are_none() -> None:
    got = RoutingPlan.from_counts(torch.tensor([3, -5, 2], device="cuda"), 8, 16)
    assert got.tokens_per_expert.tolist() == [3, 0, 2]
    assert got.status.tolist() == [0, 1] + [0] * (STATUS_WORDS - 2)


def test_too_many_experts_is_an_error() -> None:
    idx = torch.zeros(4, 1, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"at most 1024 experts; got 1025"):
        ops.route(1025, topk_idx=idx)
