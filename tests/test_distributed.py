"""Expert parallelism over gloo: equal to the layer of one process on the concatenated batch.

What is not a sum over ranks is bit-equal: gradients of the probs and of the weights. out and dx are
sums over the ranks a token went to of partial sums rounded to bfloat16, added in float32 in rank
order and rounded once: bit-equal to the same sum of the single-process layer's outputs when each
rank's experts alone are routed to; and so within the bound below of the single-process layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import MoEExperts
from moe_problem import Problem, problem
from ranks import MEMBERS, Pool, results
from reference import Result

EXPERTS, SLOTS, HIDDEN, INTERMEDIATE = (
    24,
    3,
    208,
    112,
)  # off every tile; 24 divides by 1, 2, 3, 4, 8
FP8, BF16 = Fp8Recipe(), None


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(8, MEMBERS)
    yield made
    made.close()


# ---- the batch, its shares, and what one process makes of it ------------------------------------


def batch(tokens: int, **options: Any) -> Problem:
    return problem(tokens, SLOTS, EXPERTS, HIDDEN, INTERMEDIATE, **options)


def shares(counts: list[int]) -> list[slice]:
    ends = list(itertools.accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def share(p: Problem, part: slice) -> Problem:
    """The tokens of one rank."""
    mine = (t[part] for t in (p.x, p.topk_idx, p.probs, p.dout))
    x, topk_idx, probs, dout = (t.clone() for t in mine)
    return replace(p, x=x, topk_idx=topk_idx, probs=probs, dout=dout)


def layer_of(p: Problem, group: Any, **options: Any) -> MoEExperts:
    """This rank's part of the layer with the problem's weights."""
    dtype = options.pop("dtype", p.gate_up.dtype)
    layer = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, dtype=dtype, group=group, **options)
    mine = layer.local_experts
    with torch.no_grad():
        layer.gate_up_proj.copy_(p.gate_up[mine.start : mine.stop])
        layer.down_proj.copy_(p.down[mine.start : mine.stop])
    return layer


def rank_of(group: Any) -> int:
    return torch.distributed.get_rank(group)


def on_a_rank(group: Any, p: Problem, counts: list[int], options: dict[str, Any]) -> Any:
    """Run the layer on this rank's share, twice; (Result, dropped)."""
    layer = layer_of(p, group, **options)
    mine = share(p, shares(counts)[rank_of(group)])
    first = mine.run(layer)
    dropped = layer.dropped.clone()
    layer.zero_grad()
    again = mine.run(layer)
    for name in vars(first):
        assert torch.equal(getattr(first, name), getattr(again, name)), f"two runs: {name}"
    assert torch.equal(layer.dropped, 2 * dropped)
    return first, dropped.tolist()


def joined(found: list[Result]) -> Result:
    """The results of all ranks as one."""
    return Result(*(torch.cat([getattr(r, name) for r in found]) for name in vars(found[0])))


def expected(p: Problem, ranks: int, **options: Any) -> tuple[Result, Result, Result]:
    """(single process, what `ranks` ranks must give, the bound on the difference of out and dx).

    A rounding to bfloat16 moves a value by at most 2^-8 of itself: each partial sum's, and both
    final ones'. 2^-16 is more than enough for the float32 sums.
    """
    single = p.run(p.experts(**options))
    owner = p.topk_idx.div(EXPERTS // ranks, rounding_mode="floor")
    parts = []
    for r in range(ranks):
        there = replace(p, topk_idx=p.topk_idx.masked_fill(owner != r, -1))
        parts.append(there.run(there.experts(**options)))
    want, bound = replace(single), replace(single)
    for name in ("out", "dx"):
        terms = torch.stack([getattr(part, name).bfloat16().float() for part in parts])
        if options["recipe"] is None:
            total = terms.transpose(0, 1).contiguous().sum(dim=1)
        else:
            total = torch.zeros_like(terms[0])
            for term in terms:
                total += term
        value = getattr(single, name)
        setattr(want, name, total.bfloat16().to(value.dtype))
        limit = 2**-8 * (terms.abs().sum(0) + total.abs() + value.float().abs())
        setattr(bound, name, limit + 2**-16 * terms.abs().sum(0))
    alone = (owner.sort(dim=1).values.diff(dim=1) == 0).all(dim=1)  # tokens of a single rank
    for name in ("out", "dx"):
        assert torch.equal(getattr(want, name)[alone], getattr(single, name)[alone])
        assert ((getattr(want, name) - getattr(single, name)).abs() <= getattr(bound, name)).all()
    return single, want, bound


def assert_equal(got: Result, want: Result) -> None:
    for name in vars(want):
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} differ"


def check(pool: Pool, counts: list[int], p: Problem, **options: Any) -> None:
    found = results(pool.run(len(counts), on_a_rank, p, counts, options))
    assert [dropped for _, dropped in found] == [[0, 0, 0]] * len(counts)
    options.pop("capacity", None)
    _, want, _ = expected(p, len(counts), **options)
    assert_equal(joined([r for r, _ in found]), want)


# ---- the same as one process --------------------------------------------------------------------

COUNTS = {1: [90], 2: [70, 41], 3: [30, 0, 75], 4: [40, 33, 1, 50], 8: [9, 30, 0, 17, 22, 1, 12, 8]}


@pytest.mark.parametrize("recipe", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("capacity", [None, 80], ids=["exact", "capacity"])
@pytest.mark.parametrize("ranks", COUNTS)
def test_equals_one_process(pool: Pool, ranks: int, capacity: Any, recipe: Any) -> None:
    counts = COUNTS[ranks]
    check(pool, counts, batch(sum(counts)), recipe=recipe, capacity=capacity and max(counts))


OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"recipe": FP8, "recompute": "expert"},
    "recompute_bf16": {"recipe": BF16, "recompute": "expert"},
    "fp8_z": {"recipe": FP8, "save_preactivation": "fp8"},
    "column": {"recipe": Fp8Recipe(columns="column")},
    "fp32_scales": {"recipe": Fp8Recipe(scale="fp32", columns="column")},
    "e5m2_gradients": {"recipe": Fp8Recipe(grad_dtype="e5m2")},
    "both_capacities": {"recipe": FP8, "capacity": (64, 300)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(pool: Pool, name: str) -> None:
    check(pool, [40, 33, 1, 50], batch(124), **OPTIONS[name])


@pytest.mark.parametrize("recipe", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes(pool: Pool, dtype: torch.dtype, recipe: Any) -> None:
    check(pool, [25, 31], batch(56, dtype=dtype), recipe=recipe)


def routings() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    some = torch.randint(0, EXPERTS, (120, SLOTS), generator=g)
    return {
        "one_rank_takes_all": some % 6 + 6,  # rank 1 of 4
        "one_expert_takes_all": torch.full((120, SLOTS), 17),
        "dropped": some.masked_fill(torch.rand(some.shape, generator=g) < 0.5, -1),
        "all_dropped": torch.full((120, SLOTS), -1),
        "named_twice": some[:, :1].expand(-1, SLOTS).contiguous(),
        "int32": some.int(),
    }


@pytest.mark.parametrize("recipe", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("capacity", [None, 60], ids=["exact", "capacity"])
@pytest.mark.parametrize("name", routings())
def test_routings(pool: Pool, name: str, capacity: Any, recipe: Any) -> None:
    p = batch(120, topk_idx=routings()[name])
    check(pool, [60, 20, 0, 40], p, recipe=recipe, capacity=capacity)


@pytest.mark.parametrize("recipe", [FP8, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("capacity", [None, 8], ids=["exact", "capacity"])
def test_nobody_has_tokens(pool: Pool, capacity: Any, recipe: Any) -> None:
    check(pool, [0, 0], batch(0), recipe=recipe, capacity=capacity)
