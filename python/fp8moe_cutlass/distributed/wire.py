"""Packed rows: what a token is on its way to another rank.

In FP8 as ops.quantize_pack lays them out. Without a recipe, bytes: H bf16 | S i32 ids, of all
experts | S f32 probs, rounded up to 16; of a gradient, H bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.distributed.peers import Place
from fp8moe_cutlass.ops.exchange import packed_fp8
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan


def pack(
    x: Tensor,
    topk_idx: Tensor,
    probs: Tensor,
    plan: RoutingPlan,
    recipe: Fp8Recipe | None,
    num_experts: int,
    place: Place | None,
) -> Tensor:
    """x [T, H], topk_idx [T, S] and probs [T, S] f32 -> rows [plan.rows, bytes]; in FP8, where
    `place` says so, at the peers."""
    if recipe is not None:
        routed = (topk_idx, probs)
        return _quantize_pack(x, plan, recipe, "e4m3", place, *routed, num_experts=num_experts)
    tokens, hidden = x.shape
    slots = topk_idx.shape[1]
    width = row_bytes(hidden, slots, recipe)
    # Every token as its packed row, and one that goes nowhere.
    packed = torch.empty(tokens + 1, width, dtype=torch.uint8, device=x.device)
    rows, ids, weights = _parts(packed, hidden, slots)
    rows[:tokens], ids[:tokens], weights[:tokens] = x, topk_idx, probs
    rows[tokens], ids[tokens], weights[tokens] = 0, -1, 0
    return packed.view(torch.int64)[_tokens_of(plan)].view(torch.uint8)  # not byte by byte


def unpack(
    rows: Tensor, hidden: int, slots: int, recipe: Fp8Recipe | None, local_experts: range
) -> tuple[Any, Tensor, Tensor]:
    """Splits rows that arrived: x [R, H] as a body takes it, local ids [R, S] (-1: of another
    rank), probs."""
    if recipe is not None:
        made: Any = ops.unpack(rows, hidden, slots, fp8_dtype="e4m3", pow2=recipe.scale == "pow2")
        return made  # type: ignore[no-any-return]
    x, ids, probs = _parts(rows, hidden, slots)
    ids = ids - local_experts.start
    return x, ids.masked_fill((ids < 0) | (ids >= len(local_experts)), -1), probs


def row_bytes(hidden: int, slots: int, recipe: Fp8Recipe | None) -> int:
    """Bytes of a token's row."""
    if recipe is not None:
        return ops.packed_row_bytes(hidden, slots)
    return (2 * hidden + 8 * slots + 15) // 16 * 16


def owned(saved: Any, recipe: Fp8Recipe | None) -> Any:
    """Puts the packed rows in the place of the x that `unpack` gave and a body has saved."""
    if saved.x is None:
        return saved
    view = (saved.x if recipe is None else saved.x.data).view(torch.uint8)
    packed = view.as_strided((view.shape[0], view.stride(0)), (view.stride(0), 1), 0)
    return saved._replace(x=packed) if recipe is not None else saved._replace(x=packed, probs=None)


def viewed(saved: Any, hidden: int, slots: int, recipe: Fp8Recipe | None) -> Any:
    """The reverse of `owned`."""
    packed = saved.x
    if packed is None:
        return saved
    if recipe is None:
        x, _, probs = _parts(packed, hidden, slots)
        return saved._replace(x=x, probs=probs)
    return saved._replace(x=packed_fp8(packed, hidden, "e4m3", recipe.scale == "pow2"))


def pack_grad(
    dout: Tensor, plan: RoutingPlan, recipe: Fp8Recipe | None, place: Place | None
) -> Tensor:
    """dout [T, H] -> rows [plan.rows, bytes], or [plan.rows, H] bf16."""
    if recipe is not None:
        return _quantize_pack(dout, plan, recipe, recipe.grad_dtype, place)
    if dout.shape[0] == 0:
        return dout.new_zeros(plan.rows, dout.shape[1], dtype=torch.bfloat16)
    return dout.bfloat16()[_tokens_of(plan).clamp(max=dout.shape[0] - 1)]


def unpack_grad(rows: Tensor, hidden: int, recipe: Fp8Recipe | None) -> Any:
    """The gradient that arrived, as a body takes it."""
    if recipe is None:
        return rows
    return packed_fp8(rows, hidden, recipe.grad_dtype, recipe.scale == "pow2")


def _quantize_pack(
    t: Tensor,
    plan: RoutingPlan,
    recipe: Fp8Recipe,
    fp8_dtype: Any,
    place: Place | None,
    *ids: Tensor,
    **of: int,
) -> Tensor:
    given: dict[str, Any] = {"fp8_dtype": fp8_dtype, "scale": recipe.scale, "eps": recipe.eps, **of}
    if place is not None:
        given |= {"peers": place.peers, "first": place.first, "out": place.rows}
    packed: Tensor = ops.quantize_pack(t.contiguous(), plan, *ids, **given)
    return packed


def _tokens_of(plan: RoutingPlan) -> Tensor:
    """[plan.rows] the token of each row; plan.tokens where there is none, or nothing is defined."""
    token: Tensor = plan.token_of_row
    return token.masked_fill((token < 0) | (token >= plan.tokens), plan.tokens)


def _parts(packed: Tensor, hidden: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of packed rows [R, bytes]: x [R, H] bf16, topk_idx [R, S] i32, probs [R, S] f32."""
    ends = (2 * hidden, 2 * hidden + 4 * slots, 2 * hidden + 8 * slots)
    return (
        packed[:, : ends[0]].view(torch.bfloat16),
        packed[:, ends[0] : ends[1]].view(torch.int32),
        packed[:, ends[1] : ends[2]].view(torch.float32),
    )
