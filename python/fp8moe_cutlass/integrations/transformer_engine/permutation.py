"""The permutation functions of transformer_engine.pytorch, over this library's operators.

Names, arguments, results and gradients are TransformerEngine's. What differs:
docs/how-to/from-transformer-engine.md.
`inp` is float32, float16 or bfloat16 of a hidden size that is a multiple of 16, or an Fp8Tensor,
which is permuted as it is: any number of tokens, scales in the layout of `inp`, no gradient. CPU
tensors are taken too. uint8, float8_e4m3fn and float8_e5m2 are
codes of one scale per tensor (a Float8Tensor's `_data`), moved as they are: a hidden size that is
a multiple of 32, no gradient.

Row counts: an output has exactly the rows TransformerEngine's has. Reading that number from the
device is a host synchronization; where a function forces one, num_out_tokens= avoids it.
"""

from __future__ import annotations

import warnings
from typing import TypeVar, cast

import torch
from torch import Tensor

from fp8moe_cutlass import autograd, ops
from fp8moe_cutlass.autograd.streams import now_on
from fp8moe_cutlass.integrations.transformer_engine import row_id_map as maps
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import ScaleLayout

T = TypeVar("T", Tensor, Fp8Tensor)

# An index does not say how many experts there are; the plan only needs a bound.
MAX_EXPERTS = 1024

_CODES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def moe_permute(
    inp: T,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
    *,
    num_experts: int = MAX_EXPERTS,
) -> tuple[T, Tensor]:
    """Copies tokens [T, H] to rows grouped by expert, in token order within an expert.

    map_type "mask": routing_map [T, E] bool or integer. num_out_tokens rows: at least the number of
      assignments (fewer: ValueError on the CPU, the last ones dropped on CUDA), or 0, which drops
      all; rows past the assignments are unspecified. row_id_map [T, 2E+1] int32.
    map_type "index": routing_map [T, K] int32 or int64 expert ids below num_experts, -1: dropped.
      num_out_tokens rows, T*K if not positive; assignments past it are dropped. row_id_map [K*T].
    max_token_num sizes a workspace in TransformerEngine; nothing here depends on it.
    Returns (permuted [num_out_tokens, H], row_id_map). A differentiable move.
    """
    if map_type == "mask":
        _check_rows("moe_permute", inp, num_out_tokens)
        out, _, row_id_map = permute_by_mask("moe_permute", inp, None, routing_map, num_out_tokens)
        return out, row_id_map
    if map_type != "index":
        raise ValueError(f"[moe_permute] map_type must be 'mask' or 'index'; got {map_type!r}")
    _check_tokens("moe_permute", inp, routing_map)
    if inp.shape[0] == 0:
        return inp.clone(), routing_map.new_empty(0, dtype=torch.int32)
    rows = num_out_tokens if num_out_tokens > 0 else routing_map.numel()
    plan = ops.route(num_experts, topk_idx=routing_map.contiguous(), capacity=rows)
    out, _ = _move("moe_permute", inp, plan, None)
    return out, maps.index_map(plan)


def moe_permute_with_probs(
    inp: T,
    probs: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
) -> tuple[T, Tensor, Tensor]:
    """moe_permute by a mask, with the probs [T, E] (float32, float16 or bfloat16) of the rows.

    Rows whose prob is exactly 0 are zero: data, and the scales of an Fp8Tensor.
    Returns (permuted [num_out_tokens, H], permuted_probs [num_out_tokens], row_id_map).
    """
    op = "moe_permute_with_probs"
    _check_given(op, probs=probs)
    _check_rows(op, inp, num_out_tokens)
    out, permuted_probs, row_id_map = permute_by_mask(op, inp, probs, routing_map, num_out_tokens)
    assert permuted_probs is not None
    return out, permuted_probs, row_id_map


def moe_permute_and_pad_with_probs(
    inp: T,
    probs: Tensor,
    routing_map: Tensor,
    tokens_per_expert: Tensor,
    align_size: int,
    *,
    num_out_tokens: int | None = None,
) -> tuple[T, Tensor, Tensor, Tensor | None, Tensor]:
    """moe_permute_with_probs, each expert's rows padded to a multiple of align_size.

    tokens_per_expert [E]: the column sums of routing_map. align_size: 1, 16, 32 or 128.
    Padding rows are zero in data, scales and probs.
    num_out_tokens None: the output has exactly the rows it needs, which costs one host read.
    num_out_tokens a bound on the number of assignments (as of moe_permute; T*K if none is dropped):
      no host read; the output has the most rows these can need, those past the last expert's are
      unspecified, and pad_offsets is always given. More assignments: ValueError on the CPU, the
      last ones dropped on CUDA.
    Returns (permuted [R, H], permuted_probs [R], row_id_map [T, 2E+1] int32, pad_offsets [E] int64
    or None where nothing is padded, target_tokens_per_expert [E] int64: the padded counts).
    """
    op = "moe_permute_and_pad_with_probs"
    _check_given(op, probs=probs, tokens_per_expert=tokens_per_expert)
    if align_size not in (1, 16, 32, 128):
        raise ValueError(f"[{op}] align_size must be 1, 16, 32 or 128; got {align_size}")
    _check_tokens(op, inp, routing_map)
    tokens, experts = routing_map.shape
    if tuple(tokens_per_expert.shape) != (experts,):
        raise ValueError(
            f"[{op}] tokens_per_expert must be [{experts}]; got {tuple(tokens_per_expert.shape)}"
        )
    bound = tokens * experts if num_out_tokens is None else num_out_tokens
    plan = ops.route(experts, routing_map=_mask(routing_map), align=align_size, capacity=bound)
    pad_offsets: Tensor | None = maps.pad_offsets_of(plan)
    if num_out_tokens is None:
        plan, padded = _exact(op, plan, tokens_per_expert)
        pad_offsets = pad_offsets if padded else None
    else:
        _check_plan(plan)
    out, permuted_probs = _move(op, inp, plan, probs, zero_unweighted=True)
    assert permuted_probs is not None
    target = plan.row_offsets.long().diff()
    return out, permuted_probs, maps.mask_map(plan, pad_offsets), pad_offsets, target


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | tuple[int, int] | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
    *,
    plan: RoutingPlan | None = None,
) -> Tensor:
    """Sums the rows inp [R, H] of each token, weighted by merging_probs if given.

    merging_probs: [T, E] with a mask map, [T, K] with an index map; float32, float16 or bfloat16.
    Summed in float32, experts (index: slots) ascending, rounded once. A token without rows is zero.
    row_id_map, pad_offsets: what the permute function returned. A row that inp does not have is an
      error on the CPU, and left out on CUDA.
    plan: ops.plan_from_row_id_map of the three, for callers that use one map several times.
    restore_shape: (T, H), which a mask map says too. An index map without merging_probs merges
      nothing: its K*T elements are K*T tokens, as in TransformerEngine.
    probs: the deprecated name of merging_probs.
    """
    op = "moe_unpermute"
    if probs is not None:
        if merging_probs is not None:
            raise ValueError(f"[{op}] probs is the old name of merging_probs; got both")
        warnings.warn(f"{op}: probs is deprecated, use merging_probs", stacklevel=2)
        merging_probs = probs
    if isinstance(inp, Fp8Tensor):
        raise ValueError(f"[{op}] sums rows, which FP8 cannot hold; dequantize inp")
    if map_type not in ("mask", "index"):
        raise ValueError(f"[{op}] map_type must be 'mask' or 'index'; got {map_type!r}")
    if row_id_map.dim() != (2 if map_type == "mask" else 1):
        raise ValueError(
            f"[{op}] row_id_map must be of map_type {map_type!r}; got one of shape "
            f"{tuple(row_id_map.shape)}"
        )
    weights = None if merging_probs is None else _float32(op, merging_probs)
    rows = inp.shape[0]
    if map_type == "mask":
        if restore_shape is not None and tuple(restore_shape) != (len(row_id_map), inp.shape[1]):
            raise ValueError(
                f"[{op}] restore_shape must be ({len(row_id_map)}, {inp.shape[1]}), the tokens of "
                f"row_id_map and the width of inp; got {tuple(restore_shape)}"
            )
        experts = row_id_map.shape[1] // 2
        if pad_offsets is not None and tuple(pad_offsets.shape) != (experts,):
            raise ValueError(
                f"[{op}] pad_offsets must be [{experts}]; got {tuple(pad_offsets.shape)}"
            )
        if plan is None:
            plan = ops.plan_from_row_id_map(row_id_map, rows=rows, pad_offsets=pad_offsets)
        return autograd.unpermute_unpad(inp.contiguous(), plan, weights)
    if pad_offsets is not None:
        raise ValueError(f"[{op}] an index map is never padded; got pad_offsets")
    if weights is not None and (weights.dim() != 2 or weights.numel() != row_id_map.numel()):
        raise ValueError(
            f"[{op}] merging_probs must be [T, K] of the {row_id_map.numel()} = K*T elements of "
            f"row_id_map; got {tuple(weights.shape)}"
        )
    slots = 1 if weights is None else weights.shape[1]
    if plan is None:
        plan = ops.plan_from_row_id_map(row_id_map, rows=rows, slots=slots)
    return autograd.unpermute_unpad(inp.contiguous(), plan, weights)


def moe_sort_chunks_by_index(
    inp: T,
    split_sizes: Tensor,
    sorted_index: Tensor,
) -> T:
    """The chunks of inp [N, H], split_sizes [C] rows each, in the order sorted_index [C], integers.

    ValueError where split_sizes on the CPU do not sum to N, or sorted_index on the CPU is no
    permutation. On CUDA nobody reads them: rows past the last chunk are dropped, and what the
    output holds in their place is unspecified.
    """
    op = "moe_sort_chunks_by_index"
    _check_chunks(op, inp, split_sizes, sorted_index)
    if inp.shape[0] == 0:
        return inp.clone()
    return _move(op, inp, _chunks(inp, split_sizes, sorted_index), None)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: T,
    probs: Tensor,
    split_sizes: Tensor,
    sorted_index: Tensor,
) -> tuple[T, Tensor]:
    """moe_sort_chunks_by_index, and the probs [N] of the rows likewise (float32, float16 or
    bfloat16)."""
    op = "moe_sort_chunks_by_index_with_probs"
    _check_given(op, probs=probs)
    _check_chunks(op, inp, split_sizes, sorted_index)
    if inp.shape[0] == 0:
        return inp.clone(), probs.clone()
    plan = _chunks(inp, split_sizes, sorted_index)
    out, sorted_probs = _move(op, inp, plan, probs.reshape(-1, 1))
    assert sorted_probs is not None
    return out, sorted_probs


# ---- what they share ----------------------------------------------------------------------------


def permute_by_mask(
    op: str,
    inp: T,
    probs: Tensor | None,
    routing_map: Tensor,
    num_out_tokens: int,
    zero_unweighted: bool = True,
) -> tuple[T, Tensor | None, Tensor]:
    """moe_permute(_with_probs) by a mask; zero_unweighted: rows of prob 0 are zero."""
    _check_tokens(op, inp, routing_map)
    tokens, experts = routing_map.shape
    if tokens == 0:
        empty = routing_map.new_empty((0, 2 * experts + 1), dtype=torch.int32)
        none = None if probs is None else probs.flatten()
        return inp.clone(), none, empty
    plan = ops.route(experts, routing_map=_mask(routing_map), capacity=num_out_tokens)
    if num_out_tokens > 0:
        _check_plan(plan)
    zero = probs is not None and zero_unweighted
    out, permuted_probs = _move(op, inp, plan, probs, zero_unweighted=zero)
    return out, permuted_probs, maps.mask_map(plan, None)


def _move(
    op: str,
    inp: T,
    plan: RoutingPlan,
    probs: Tensor | None,
    *,
    zero_unweighted: bool = False,
) -> tuple[T, Tensor | None]:
    """autograd.permute_pad, probs in their own dtype."""
    if isinstance(inp, Tensor) and inp.dtype in _CODES:  # two move as one bfloat16
        if inp.shape[1] % 32:
            raise ValueError(
                f"[{op}] inp of {inp.dtype} must have a hidden size that is a multiple of 32; got "
                f"{inp.shape[1]}"
            )
        pairs = inp.detach().contiguous().view(torch.bfloat16)
        moved, permuted = _move(op, pairs, plan, probs, zero_unweighted=zero_unweighted)
        return moved.view(inp.dtype), permuted
    weights = None if probs is None else _float32(op, probs)
    layout: ScaleLayout = "gemm"
    x: T = inp
    if isinstance(inp, Fp8Tensor):
        layout = cast(ScaleLayout, inp.scale_layout)
    else:
        x = inp.contiguous()
    out, permuted = autograd.permute_pad(
        x, plan, weights, scale_layout=layout, zero_unweighted=zero_unweighted
    )
    return out, None if probs is None or permuted is None else permuted.to(probs.dtype)


def _float32(op: str, probs: Tensor) -> Tensor:
    """The probs as the operators take them; their gradient comes back in their own dtype."""
    if probs.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"[{op}] probs must be float32, float16 or bfloat16; got {probs.dtype}")
    return probs.float().contiguous()


def _exact(op: str, plan: RoutingPlan, counts: Tensor) -> tuple[RoutingPlan, bool]:
    """The plan with no row more than its experts have, and whether any is padded: one host read."""
    own = plan.tokens_per_expert
    wrong = (counts.to(own.device) != own).any()
    rows, tokens, differs = torch.stack([plan.row_offsets[-1], own.sum(), wrong]).tolist()
    if differs:
        raise ValueError(
            f"[{op}] tokens_per_expert must be the column sums of routing_map, {own.tolist()}; "
            f"got {counts.tolist()}"
        )
    return maps.repack(plan, int(rows)), rows != tokens


def _check_chunks(
    op: str, inp: Tensor | Fp8Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> None:
    """ValueError unless the sizes and their order, as far as they lie on the CPU, are of inp."""
    if split_sizes.dim() != 1 or sorted_index.shape != split_sizes.shape:
        raise ValueError(
            f"[{op}] split_sizes and sorted_index must both be [C]; got "
            f"{tuple(split_sizes.shape)} and {tuple(sorted_index.shape)}"
        )
    rows, chunks = inp.shape[0], split_sizes.shape[0]
    if split_sizes.device.type == "cpu":
        sizes = split_sizes.tolist()
        if min(sizes, default=0) < 0 or sum(sizes) != rows:
            raise ValueError(f"[{op}] split_sizes must sum to the {rows} rows of inp; got {sizes}")
    if sorted_index.device.type == "cpu" and sorted(sorted_index.tolist()) != list(range(chunks)):
        raise ValueError(
            f"[{op}] sorted_index must be a permutation of the {chunks} chunks; "
            f"got {sorted_index.tolist()}"
        )


def _chunks(inp: Tensor | Fp8Tensor, split_sizes: Tensor, sorted_index: Tensor) -> RoutingPlan:
    """A chunk's place in the new order is the expert of its rows."""
    device, chunks = inp.device, split_sizes.shape[0]
    ends = now_on(device, split_sizes).cumsum(0)
    chunk = torch.searchsorted(ends, torch.arange(inp.shape[0], device=device), right=True)
    place = torch.full((chunks + 1,), -1, dtype=torch.int32, device=device)
    order = now_on(device, sorted_index).long()
    place[order] = torch.arange(chunks, dtype=torch.int32, device=device)
    return ops.route(chunks, topk_idx=place[chunk].unsqueeze(1))


def _mask(routing_map: Tensor) -> Tensor:
    """A dtype the operators take."""
    known = (torch.bool, torch.uint8, torch.int32, torch.int64)
    return (routing_map if routing_map.dtype in known else routing_map.bool()).contiguous()


def _check_plan(plan: RoutingPlan) -> None:
    """ValueError for assignments without a row; not on CUDA, whose status would have to be waited
    for, nor in a compiled graph."""
    if plan.buffer.device.type == "cpu":
        plan.check()


def _check_given(op: str, **arguments: Tensor | None) -> None:
    for name, given in arguments.items():
        if given is None:
            raise ValueError(f"[{op}] {name} is required; got None")


def _check_tokens(op: str, inp: Tensor | Fp8Tensor, routing_map: Tensor) -> None:
    if routing_map.dim() != 2 or routing_map.shape[0] != inp.shape[0]:
        raise ValueError(
            f"[{op}] routing_map must be [{inp.shape[0]}, ...], a row a token; "
            f"got {tuple(routing_map.shape)}"
        )


def _check_rows(op: str, inp: Tensor | Fp8Tensor, num_out_tokens: int) -> None:
    if num_out_tokens < 0 and inp.shape[0] > 0:
        raise ValueError(f"[{op}] num_out_tokens must be given, 0 or more; got {num_out_tokens}")
