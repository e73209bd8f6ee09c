"""Expert parallelism by both transports: on one GPU a group of one, on several as many ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import MoE, MoEExperts, Router, SharedExpert
from moe_problem import assert_same, moved
from on_device import capture
from ranks import Pool, results
from reference import relative_error
from test_distributed import (
    BIASES,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    SLOTS,
    assert_equal,
    batch,
    expected,
    joined,
    layer_of,
    on_a_rank,
    rank_of,
)

FP8_AND_BF16 = pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
TRANSPORTS = pytest.mark.parametrize("transport", ["nccl", "auto"])


@TRANSPORTS
@FP8_AND_BF16
@pytest.mark.parametrize("rank_capacity", [None, 300])
def test_a_group_of_one(
    world: Any, recipe: Any, rank_capacity: Any, transport: str, device: torch.device
) -> None:
    p = moved(batch(300), device)
    want = p.run(layer_of(p, None, recipe=recipe))
    options = {"recipe": recipe, "rank_capacity": rank_capacity, "transport": transport}
    layer = layer_of(p, world, **options)
    assert_same(p.run(layer), want)
    layer.check()


@TRANSPORTS
@FP8_AND_BF16
def test_with_a_capacity_nothing_waits(
    world: Any, recipe: Any, transport: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    sizes = EXPERTS, HIDDEN, INTERMEDIATE
    options: Any = {"group": world, "rank_capacity": 200, "transport": transport}
    layer = MoE(
        Router(HIDDEN, EXPERTS, SLOTS, group=world, device=device),
        MoEExperts(*sizes, recipe=recipe, device=device, **options),
        SharedExpert(HIDDEN, 128, device=device),
    )
    x = torch.randn(200, HIDDEN, device=device).bfloat16().requires_grad_()

    def step() -> None:
        out = layer(x)
        out.backward(torch.ones_like(out))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    layer.experts.check()


@TRANSPORTS
@FP8_AND_BF16
def test_one_graph_for_every_routing(
    world: Any, recipe: Any, transport: str, device: torch.device
) -> None:
    p = moved(batch(200), device)
    capacity = (200, 200 * SLOTS)
    layer = layer_of(p, world, recipe=recipe, rank_capacity=capacity, transport=transport)
    x, probs, idx = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_(), p.topk_idx
    leaves = (x, probs, *layer.parameters())

    def run() -> Any:
        out = layer(x, idx, probs)
        return out, torch.autograd.grad(out, leaves, p.dout)

    graph, (out, grads) = capture(run)
    for seed in range(4):
        q = moved(batch(200, seed=seed), device)
        with torch.no_grad():
            for into, value in ((x, q.x), (probs, q.probs), (idx, q.topk_idx)):
                into.copy_(value)
        graph.replay()
        eager_out, eager_grads = run()
        assert torch.equal(out, eager_out)
        for captured, eager in zip(grads, eager_grads, strict=True):
            assert torch.equal(captured, eager)


def test_exact_sizes_cannot_be_captured(world: Any, device: torch.device) -> None:
    p = moved(batch(50), device)
    layer = layer_of(p, world)
    layer(p.x, p.topk_idx, p.probs)
    with (
        pytest.raises(RuntimeError, match="a captured forward needs rank_capacity="),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layer(p.x, p.topk_idx, p.probs)


def test_ids_out_of_range_are_dropped_and_counted(world: Any, device: torch.device) -> None:
    for recipe in (Fp8Recipe(), None):
        p = moved(batch(50), device)
        layer = layer_of(p, world, recipe=recipe)
        kept = p.topk_idx.clone()
        p.topk_idx[3, 1], kept[3, 1] = EXPERTS, -1
        got = p.run(layer)
        with pytest.raises(ValueError, match="1 expert ids out of range"):
            layer.check()
        p.topk_idx = kept
        assert_same(got, p.run(layer_of(p, None, recipe=recipe)))


# ---- several GPUs -------------------------------------------------------------------------------


def on_a_gpu(group: Any, p: Any, counts: list[int], options: dict[str, Any]) -> Any:
    found, dropped = on_a_rank(group, moved(p, f"cuda:{rank_of(group)}"), counts, options)
    return moved(found, "cpu"), dropped


@TRANSPORTS
@FP8_AND_BF16
@pytest.mark.parametrize("rank_capacity", [None, 90], ids=["exact", "capacity"])
@pytest.mark.parametrize("how", [{}, BIASES], ids=["plain", "biases"])
def test_equals_one_gpu(
    pool: Pool, how: Any, rank_capacity: Any, recipe: Any, transport: str, device: torch.device
) -> None:
    (size,) = pool.members
    counts = [90, 0, 55, 17, 90, 1, 64, 33][:size]
    p, how = batch(sum(counts)), {"recipe": recipe, **how}
    options = {**how, "rank_capacity": rank_capacity, "transport": transport}
    found = results(pool.run(size, on_a_gpu, p, counts, options))
    assert [dropped for _, dropped in found] == [[0, 0, 0]] * size
    got = joined([r for r, _ in found])
    want = moved(expected(moved(p, device), size, {**how, "device": device}), "cpu")
    if recipe is not None:
        assert_equal(got, want)
    else:  # torch's grouped_mm may choose its tiles by the sizes
        for name in vars(want):
            assert relative_error(getattr(got, name), getattr(want, name)) < 0.005, name


def disagreeing(group: Any) -> str:
    hidden = 256 if rank_of(group) == 1 else HIDDEN
    layer = MoEExperts(EXPERTS, hidden, INTERMEDIATE, group=group, device="cuda")
    x = torch.randn(9, hidden, device="cuda").bfloat16()
    idx = torch.zeros(9, SLOTS, dtype=torch.int64, device="cuda")
    try:
        layer(x, idx, torch.ones(9, SLOTS, device="cuda"))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_all_raise(pool: Pool) -> None:
    (size,) = pool.members
    for error in results(pool.run(size, disagreeing)):
        assert "hidden_size must be equal on all ranks" in error
        assert "256 on rank 1" in error
