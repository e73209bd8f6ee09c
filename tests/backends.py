"""The CPU backend is the oracle: the same call on the device under test, outputs poisoned, bits
compared.

Equality is over defined content: rows below row_offsets[E], columns below col_offsets[E], scales of
those; the rest is cut off by `defined`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops
from on_device import moved
from on_device import ops as tested

POISON = 0xA5


def poison(thing: Any) -> Any:
    """Fills tensors, Fp8Tensors and tuples of them with a pattern no op writes by chance."""
    if isinstance(thing, Fp8Tensor):
        poison(thing.data), poison(thing.scale_inv)
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            poison(part)
    elif isinstance(thing, Tensor) and thing.numel():
        thing.view(torch.uint8).fill_(POISON)
    return thing


def on_both(name: str, *args: Any, device: Any = None, **kwargs: Any) -> tuple[Any, Any, Any]:
    """The CPU backend's result, and two of the device under test, which were written over poison
    and are moved to the CPU."""
    op, device = getattr(ops, name), device or tested.device
    expected = op(*args, **kwargs)
    args = tuple(moved(a, device) for a in args)
    kwargs = {key: moved(value, device) for key, value in kwargs.items()}
    first = op(*args, **kwargs, out=poison(op(*args, **kwargs)))
    again = op(*args, **kwargs, out=poison(op(*args, **kwargs)))
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return expected, moved(first, "cpu"), moved(again, "cpu")


def check(name: str, *args: Any, **kwargs: Any) -> None:
    """The operator's bits on the device under test are the CPU backend's, twice."""
    plan = next((a for a in (*args, *kwargs.values()) if isinstance(a, RoutingPlan)), None)
    expected, first, again = on_both(name, *args, **kwargs)
    assert_same(expected, first, plan, name)
    assert_same(first, again, plan, f"{name}, second run")


def bits(t: Tensor) -> Tensor:
    """The bits of a tensor, every NaN of a float the same."""
    if t.dtype.is_floating_point and t.element_size() > 1:
        t = torch.where(t.isnan(), torch.full_like(t, float("nan")), t)
        return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])
    return t.view(torch.uint8) if t.element_size() == 1 else t


def assert_same(expected: Any, got: Any, plan: RoutingPlan | None = None, name: str = "") -> None:
    """Bit for bit, NaNs in the same places, over defined content."""
    if isinstance(expected, (tuple, list)):
        assert len(expected) == len(got)
        for i, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert_same(a, b, plan, f"{name}[{i}]")
        return
    if expected is None or got is None:
        assert expected is got, name
        return
    if isinstance(expected, Fp8Tensor):
        data, scale = defined(expected, plan)
        got_data, got_scale = defined(got, plan)
        assert_same(scale, got_scale, None, f"{name}.scale_inv")
        assert_same(data, got_data, None, f"{name}.data")
        return
    assert (expected.shape, expected.dtype) == (got.shape, got.dtype), name
    if plan is not None and expected.shape[0] == plan.rows:
        rows = int(plan.row_offsets[-1])
        expected, got = expected[:rows], got[:rows]
    wrong = bits(expected) != bits(got)
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, first at {at}: "
            f"expected {expected[at].float()}, got {got[at].float()}"
        )


def defined(q: Fp8Tensor, plan: RoutingPlan | None) -> tuple[Tensor, Tensor]:
    """Data and scales of q without what the plan leaves unspecified.

    Rows of a plan are recognized by plan.rows, columns by plan.columns.
    """
    data, scale = q.data.view(torch.uint8), q.scale_inv
    m, k = data.shape[-2:]
    if q.scale_layout == "gemm":
        scale = scale[:, :m]
    if plan is None:
        return data, scale
    if m == plan.rows and q.scale_layout != "block" and k != plan.columns:
        rows = int(plan.row_offsets[-1])
        return data[:rows], scale[:rows] if q.scale_layout == "row" else scale[:, :rows]
    columns = int(plan.col_offsets[-1])
    blocks = columns // 128
    return data[:, :columns], scale[:, :blocks] if q.scale_layout == "block" else scale[:blocks]


def assert_same_plan(expected: RoutingPlan, got: RoutingPlan) -> None:
    """All of the buffer that is defined."""
    got, rows = got.to("cpu"), int(expected.row_offsets[-1])
    sections = ("status", "tokens_per_expert", "row_offsets", "col_offsets", "row_of", "col_blocks")
    for name in sections:
        assert torch.equal(getattr(expected, name), getattr(got, name)), name
    for name in ("token_of_row", "slot_of_row"):
        assert torch.equal(getattr(expected, name)[:rows], getattr(got, name)[:rows]), name


# ---- random routings ----------------------------------------------------------------------------

ROUTINGS = ("random", "ragged", "one expert", "empty experts", "dropped", "twice")


def routing(kind: str, tokens: int, experts: int, slots: int) -> Tensor:
    """topk_idx [T, S] int64 of a kind of ROUTINGS."""
    scores = torch.rand(tokens, experts)
    if kind == "ragged":
        scores = scores ** torch.linspace(0.2, 4.0, experts)
    idx = scores.topk(min(slots, experts), dim=-1).indices
    idx = idx[:, torch.arange(slots) % idx.shape[1]]
    if kind == "one expert":
        idx = torch.full_like(idx, experts - 1)
    elif kind == "empty experts":
        idx = idx // 2 * 2
    elif kind == "dropped":
        idx[torch.rand(idx.shape) < 0.3] = -1
    elif kind == "twice" and slots > 1:
        idx[:, 1] = idx[:, 0]
    return idx


def plan_of(
    kind: str, tokens: int, experts: int, slots: int, align: int = 1
) -> tuple[Tensor, RoutingPlan]:
    """A routing and its plan, on the CPU."""
    idx = routing(kind, tokens, experts, slots)
    return idx, ops.route(experts, topk_idx=idx, align=align)


def awkward(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random normal values whose rows differ by many octaves, with zeros, and a whole zero row."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 8, (*shape[:-1], 1)).float())
    x[torch.rand(shape) < 0.02] = 0.0
    if x.numel():
        x.view(-1, shape[-1])[0] = 0.0
    return x.to(dtype)
