"""FP8 rows and the plan of this rank's experts, from DeepEP's three forms of dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import TILE, Fp8Tensor

Pair = tuple[Tensor, Tensor]  # codes [R, H] float8_e4m3fn, scales [R, H / 128] float32


@dataclass(frozen=True)
class Received:
    """Rows as a dispatch left them, and the local experts each of them goes to."""

    x: Fp8Tensor  # [R, H], row layout
    plan: RoutingPlan  # of R tokens
    probs: Tensor  # [R, S] f32


def received(
    recv_x: Pair,
    recv_topk_idx: Tensor,
    recv_topk_weights: Tensor,
    num_local_experts: int,
    *,
    counts: Sequence[int] = (),
    rows: Tensor | None = None,
    pow2: bool = True,
) -> Received:
    """Reads the rows of the normal kernels: one for each token that has an expert here.

    recv_topk_idx [R, S] int32 or int64, local ids, -1 for experts elsewhere; recv_topk_weights
    [R, S] f32. counts: num_recv_tokens_per_expert_list, whose sum bounds the assignments; without
    it (num_worst_tokens, do_cpu_sync=False) the bound is R min(S, num_local_experts). rows: one int
    on the device, how many of the R rows hold something, where the buffer may be larger and ids
    past them are not -1: handle.psum_num_recv_tokens_per_scaleup_rank[-1] without do_cpu_sync.
    pow2: whether the sender's scales are powers of two, as ops.quantize makes them by default.
    """
    x = fp8_rows("received", recv_x, pow2)
    ids = recv_topk_idx
    if rows is not None:
        beyond = torch.arange(len(ids), device=ids.device) >= rows
        ids = ids.masked_fill(beyond[:, None], -1)
    bound = len(ids) * min(ids.shape[1], num_local_experts)
    plan = ops.route(
        num_local_experts, topk_idx=ids.contiguous(), capacity=sum(counts) if counts else bound
    )
    return Received(x, plan, recv_topk_weights.float().contiguous())


def received_expanded(
    recv_x: Pair, recv_topk_weights: Tensor, counts: Tensor, *, align: int = 1, pow2: bool = True
) -> Received:
    """Reads the rows of ElasticBuffer with do_expand=True: one for each (token, expert), by expert.

    counts [E] int: handle.num_unaligned_recv_tokens_per_expert; each expert's rows start at a
    multiple of `align`, the expert_alignment. recv_topk_weights [R] f32.
    """
    x = fp8_rows("received_expanded", recv_x, pow2)
    ends = torch.cumsum((counts.long() + align - 1) // align * align, 0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    probs = recv_topk_weights.float().reshape(-1, 1)
    return Received(x, _grouped(starts, counts, x.shape[0]), probs.contiguous())


def received_low_latency(recv_x: Pair, recv_count: Tensor, *, pow2: bool = False) -> Received:
    """Reads the rows [E, N, H] of low_latency_dispatch with use_fp8, of which recv_count [E] int
    hold something, scales [E, N, H / 128] float32, stored with N contiguous. pow2: round_scale.

    Probs are ones: low_latency_combine weights. Data is read in place; the scales, 4 bytes in 132,
    are written once more, by row. `forward` gives rows [E N, H]: view them as [E, N, H].
    """
    data, scale_inv = recv_x
    if scale_inv.dtype != torch.float32:
        raise ValueError(
            "[received_low_latency] scales must be float32 (use_ue8m0=False); "
            f"got {scale_inv.dtype}"
        )
    experts, slots, hidden = data.shape
    pair = (data.reshape(-1, hidden), scale_inv.reshape(experts * slots, -1))
    x = fp8_rows("received_low_latency", pair, pow2)
    starts = torch.arange(experts, device=data.device) * slots
    probs = torch.ones(len(pair[0]), 1, dtype=torch.float32, device=data.device)
    return Received(x, _grouped(starts, recv_count, len(pair[0])), probs)


def fp8_rows(op: str, pair: Pair, pow2: bool) -> Fp8Tensor:
    """The pair as it is, scales in row order."""
    if not isinstance(pair, tuple):
        raise ValueError(f"[{op}] recv_x must be FP8 data and scales; got {type(pair).__name__}")
    data, scale_inv = pair
    if data.dtype != torch.float8_e4m3fn or data.ndim != 2 or data.shape[1] % TILE:
        raise ValueError(
            f"[{op}] data must be float8_e4m3fn [R, H], H a multiple of {TILE}; "
            f"got {data.dtype} {tuple(data.shape)}"
        )
    want = (data.shape[0], data.shape[1] // TILE)
    if scale_inv.dtype != torch.float32 or tuple(scale_inv.shape) != want:
        raise ValueError(
            f"[{op}] scales must be float32 {want}; got {scale_inv.dtype} {tuple(scale_inv.shape)}"
        )
    return Fp8Tensor(data.contiguous(), scale_inv.contiguous(), pow2=pow2)


def _grouped(starts: Tensor, counts: Tensor, rows: int) -> RoutingPlan:
    """The plan of `rows` rows of which counts[e] from starts[e] on are expert e's."""
    row = torch.arange(rows, device=counts.device)
    expert = (torch.searchsorted(starts, row, right=True) - 1).clamp(min=0)
    held = row - starts[expert] < counts[expert]
    ids = torch.where(held, expert, -1)
    plan: RoutingPlan = ops.route(len(counts), topk_idx=ids[:, None].contiguous(), capacity=rows)
    return plan
