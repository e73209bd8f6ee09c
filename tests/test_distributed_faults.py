"""Expert parallelism when something is wrong, and what it may not do: wait for the device."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ranks
from fp8moe_cutlass import Fp8Recipe, ops, telemetry
from fp8moe_cutlass.integrations import deepep
from fp8moe_cutlass.nn import MoE, MoEExperts, Router, SharedExpert
from ranks import Pool, results

HIDDEN, INTERMEDIATE, EXPERTS = 128, 64, 6
FP8_AND_BF16 = pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])


pytestmark = pytest.mark.slow
pool = ranks.pool(4, {2: [1, 3], 3: [0, 2, 3]})


def inputs(
    tokens: int = 20, slots: int = 2, hidden: int = HIDDEN, experts: int = EXPERTS
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, hidden).bfloat16().requires_grad_()
    idx = torch.rand(tokens, experts).topk(slots).indices
    return x, idx, torch.rand(tokens, slots).requires_grad_()


# ---- ranks that disagree ------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"hidden": 144}, "hidden_size must .*128 on ranks 0, 3; 144 on rank 2"),
    "slots": ({"slots": 3}, "number of slots must .*2 on ranks 0, 3; 3 on rank 2"),
    "experts": ({"experts": 12}, "num_experts must .*6 on ranks 0, 3; 12 on rank 2"),
    "bf16": ({"recipe": None}, r"recipe must .*pow2 .* on ranks 0, 3; none \(bfloat16\) on rank 2"),
    "scale": (
        {"recipe": Fp8Recipe(scale="fp32", columns="column")},
        "recipe must .*pow2 scales, .* on ranks 0, 3; fp32 scales, .* on rank 2",
    ),
    "gradient": ({"recipe": Fp8Recipe(grad_dtype="e5m2")}, "gradients in e5m2 on rank 2"),
    "weighting": ({"recipe": Fp8Recipe(weighting="output")}, "weighting output, .* on rank 2"),
    "rounding": ({"recipe": Fp8Recipe.rollout("vllm")}, "rounding silu on rank 2"),
    "rank_capacity": ({"rank_capacity": 7}, "rank_capacity must .* on ranks 0, 3; 7 on rank 2"),
    "x_grad": ({"detach": "x"}, "x.requires_grad must .*True on ranks 0, 3; False on rank 2"),
    "no_grad": ({"detach": "all"}, "requires_grad must .*True on ranks 0, 3; False on rank 2"),
}


def disagree(group: Any, wrong: dict[str, Any], rank_capacity: Any) -> tuple[str, list[int]]:
    """The error of this rank, and the bytes per row of each exchange before it had."""
    wrong = dict(wrong) if dist.get_rank() == 2 else {}
    experts, hidden = wrong.get("experts", EXPERTS), wrong.get("hidden", HIDDEN)
    layer = MoEExperts(
        experts,
        hidden,
        INTERMEDIATE,
        recipe=wrong.get("recipe", Fp8Recipe()),
        rank_capacity=wrong.get("rank_capacity", rank_capacity),
        group=group,
    )
    x, idx, probs = inputs(20 + dist.get_rank(), wrong.get("slots", 2), hidden, experts)
    if "detach" in wrong:
        x = x.detach()
    if wrong.get("detach") == "all":
        probs = probs.detach()
        layer.requires_grad_(False)
    original, widths = dist.all_to_all_single, []

    def watched(out: Tensor, *args: Any, **kwargs: Any) -> Any:
        widths.append(out.shape[1] * out.element_size())
        return original(out, *args, **kwargs)

    dist.all_to_all_single = watched
    try:
        layer(x, idx, probs)
    except ValueError as error:
        return str(error), widths
    finally:
        dist.all_to_all_single = original
    return "", widths


@pytest.mark.parametrize("rank_capacity", [None, 50], ids=["exact", "capacity"])
@pytest.mark.parametrize("name", WRONG)
def test_ranks_that_disagree_all_raise(pool: Pool, name: str, rank_capacity: Any) -> None:
    wrong, message = WRONG[name]
    for error, widths in results(pool.run(3, disagree, wrong, rank_capacity)):
        assert error.startswith("[MoEExperts] ")
        assert re.search(message, error), error
        assert widths == [4 * (2 + 8 + 1)]  # the sizes and the words alone: no row has travelled
    found = results(pool.run(3, disagree, {}, rank_capacity))  # and the group is as good as before
    assert [error for error, _ in found] == [""] * 3


# ---- peers that die or do not come --------------------------------------------------------------


def losing_a_peer(group: Any, how: str, when: str) -> tuple[str, float]:
    """The error of the rank that is left, and how long it took."""
    layer = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group)
    x, idx, probs = inputs()
    layer(x, idx, probs)  # all is well
    out = layer(x, idx, probs) if when == "backward" else None
    if dist.get_rank() == 1:
        time.sleep(0.2)
        os._exit(1) if how == "dies" else time.sleep(1000)
    start = time.monotonic()
    try:
        out.sum().backward() if out is not None else layer(x, idx, probs)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_peer_is_an_error_in_bounded_time(how: str, when: str) -> None:
    pool = Pool(2, {2: [0, 1]}, timeout=3.0)
    try:
        error, seconds = results(pool.run(2, losing_a_peer, how, when, wait_for=[0]))[0]
    finally:
        pool.close()
    assert "gloo" in error
    assert seconds < 20


# ---- what waits for the device ------------------------------------------------------------------

READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


def events_of(group: Any, rank_capacity: Any) -> list[list[str]]:
    """What a first and a second step do, in order: reads, exchanges, weight gradients, waits."""
    layer = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group, rank_capacity=rank_capacity)
    seen: list[str] = []

    def logged(call: Any, what: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.append(what if isinstance(what, str) else what(*args, **kwargs))
            return call(*args, **kwargs)

        return run

    for name in READS:
        setattr(torch.Tensor, name, logged(getattr(torch.Tensor, name), "read"))
    exchange = dist.all_to_all_single

    def all_to_all(out: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        kind = str(out.dtype).removeprefix("torch.")
        seen.append(f"{kind} {'starts' if async_op else 'travels'}")
        work = exchange(out, *args, async_op=async_op, **kwargs)
        if async_op:
            wait = work.wait
            work = type("Work", (), {"wait": lambda _: (seen.append(f"{kind} awaited"), wait())})()
        return work

    dist.all_to_all_single = all_to_all
    ops.quantize_pack = logged(ops.quantize_pack, "pack")
    ops.quantize_weight = logged(ops.quantize_weight, "weight")
    ops.grouped_gemm = logged(ops.grouped_gemm, "gemm")
    ops.grouped_gemm_wgrad = logged(ops.grouped_gemm_wgrad, "wgrad")
    steps = []
    for _ in range(2):
        out = layer(*inputs())
        out.backward(torch.ones_like(out))
        steps.append(list(seen))
        seen.clear()
    return steps


AGREED = ["pack", "weight", "weight"]
SIZES = ["int32 starts", *AGREED, "int32 awaited", "read"]
EXPERT_RUN = ["uint8 travels", "gemm", "gemm", "bfloat16 travels"]
BACKWARD = [
    *("pack", "uint8 travels", "gemm", "gemm", "float32 starts", "bfloat16 starts"),
    *("wgrad", "wgrad", "float32 awaited", "bfloat16 awaited"),
]


@pytest.mark.parametrize("rank_capacity", [None, 30], ids=["exact", "capacity"])
def test_one_read_a_forward_and_none_in_backward(rank_capacity: Any) -> None:
    """Exact: the sizes, while the rows are packed. Capacity: one, in the first forward. Weights are
    quantized before the rows travel; gradients of the probs and dx leave before the weight
    gradients."""
    pool = Pool(2, {2: [0, 1]})
    try:
        found = results(pool.run(2, events_of, rank_capacity))
    finally:
        pool.close()
    later = SIZES if rank_capacity is None else AGREED
    assert found == [[[*SIZES, *EXPERT_RUN, *BACKWARD], [*later, *EXPERT_RUN, *BACKWARD]]] * 2


class ReadsAValue(Exception):
    pass


def without_values(group: Any, recipe: Any, rank_capacity: Any) -> str:
    """A second step in which any read of a tensor's value raises."""
    experts = MoEExperts(
        EXPERTS, HIDDEN, INTERMEDIATE, recipe=recipe, group=group, rank_capacity=rank_capacity
    )
    layer = MoE(Router(HIDDEN, EXPERTS, 2), experts, SharedExpert(HIDDEN, 64))
    x = torch.randn(20, HIDDEN, requires_grad=True)
    layer(x).sum().backward()  # the ranks agree

    def read(*_: Any) -> Any:
        raise ReadsAValue

    names = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__")
    before = {name: getattr(torch.Tensor, name) for name in (*names, "any")}
    for name in names:
        setattr(torch.Tensor, name, read)
    # The check that ids are in range, which the CPU alone makes, reads.
    torch.Tensor.any = lambda self: False  # type: ignore[assignment]
    try:
        layer(x).sum().backward()
    except ReadsAValue:
        return "reads a value"
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)
    return ""


@FP8_AND_BF16
def test_with_a_capacity_nothing_depends_on_values(pool: Pool, recipe: Any) -> None:
    """So that a CUDA graph can hold forward and backward."""
    assert results(pool.run(2, without_values, recipe, 30)) == [""] * 2
    assert results(pool.run(2, without_values, recipe, None)) == ["reads a value"] * 2


# ---- refusals -----------------------------------------------------------------------------------


def refusals(group: Any) -> None:
    sizes = (HIDDEN, INTERMEDIATE)
    with pytest.raises(ValueError, match=r"num_experts must be a multiple .* 7 experts, 2 ranks"):
        MoEExperts(7, *sizes, group=group)
    bad: Any
    for bad in (0, -1, 2.5, (4, 0), (0, 4), (1, 2, 3), [4, 4], "4"):
        with pytest.raises(ValueError, match="rank_capacity must be"):
            MoEExperts(EXPERTS, *sizes, group=group, rank_capacity=bad)
    router = Router(HIDDEN, EXPERTS, 2, group=group)
    for bad, why in (
        (dist.GroupMember.NON_GROUP_MEMBER, "contain this rank"),
        (3, "be a torch.distributed.ProcessGroup; got 3"),
        ([0, 1], "be a torch.distributed.ProcessGroup"),
        (dist.group, "be a torch.distributed.ProcessGroup"),
    ):
        with pytest.raises(ValueError, match=rf"\[MoEExperts\] group must {why}"):
            MoEExperts(EXPERTS, *sizes, group=bad)
        with pytest.raises(ValueError, match=rf"\[Router\] group must {why}"):
            Router(HIDDEN, EXPERTS, 2, group=bad)
        with pytest.raises(ValueError, match=rf"\[Router\] group must {why}"):
            router.group = bad
    assert router.group is group
    layer = MoEExperts(EXPERTS, *sizes, group=group)
    x, idx, probs = inputs()
    with pytest.raises(ValueError, match=r"telemetry.snr.*group"):
        telemetry.snr(layer, x.detach(), idx, probs.detach(), x.detach())
    with pytest.raises(ValueError, match=r"deepep.*got one with a group"):
        deepep.experts(layer, None, x, idx, probs, num_experts=EXPERTS)
    for recipe in (Fp8Recipe(), None):
        for rank_capacity in (None, 40):
            layer = MoEExperts(
                EXPERTS, *sizes, recipe=recipe, group=group, rank_capacity=rank_capacity
            )
            with pytest.raises(ValueError, match=r"topk_idx must lie in \[-1, 6\); got 6"):
                layer(x, idx.clone().fill_(EXPERTS), probs)


def test_refusals(pool: Pool) -> None:
    results(pool.run(2, refusals))
    with pytest.raises(ValueError, match="rank_capacity needs group="):
        MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, rank_capacity=3)


# ---- ranks out of step, with a rank capacity ----------------------------------------------------


def out_of_step(group: Any, how: str, recipe: Any) -> list[str]:
    """What check() says, and the next first forward of a kind, after both ranks have agreed upon
    every kind that they run."""
    second = dist.get_rank(group) == 1
    layer = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, recipe=recipe, group=group, rank_capacity=30)
    slots = (2, 3) if how == "slots" else (1,)  # whose rows have as many bytes: gloo checks that
    batches = {s: inputs(slots=s) for s in slots}
    batches = {s: (x, idx, probs.detach()) for s, (x, idx, probs) in batches.items()}
    for batch in batches.values():
        layer(*batch).sum().backward()
        with torch.no_grad():
            layer(*batch)
    layer.check()
    if how == "slots":
        layer(*batches[3 if second else 2])
    elif second:  # evaluates twice while the other trains
        with torch.no_grad():
            for _ in range(2):
                layer(*batches[1])
    else:
        layer(*batches[1]).sum().backward()
    said = []
    for run in (layer.check, lambda: layer(*inputs(slots=4))):
        try:
            run()
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("how", ["slots", "evaluates"])
def test_ranks_out_of_step_are_noticed(pool: Pool, how: str) -> None:
    for rank, said in zip((1, 3), results(pool.run(2, out_of_step, how, Fp8Recipe())), strict=True):
        other = 4 - rank
        assert len(said) == 2
        for error in said:
            assert error.startswith("[MoEExperts] ranks with a rank_capacity must be in step")
            times = 1 if how == "slots" else 2
            assert f"rank {other} in {times} exchanges of rank {rank}" in error


def in_step(group: Any, recipe: Any) -> None:
    layer = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, recipe=recipe, group=group, rank_capacity=30)
    for slots in (1, 2, 1):
        for _ in range(2):
            layer(*inputs(slots=slots)).sum().backward()
            with torch.no_grad():
                layer(*inputs(slots=slots))
    layer.check()


@FP8_AND_BF16
def test_ranks_in_step_are_not_accused(pool: Pool, recipe: Any) -> None:
    results(pool.run(3, in_step, recipe))
