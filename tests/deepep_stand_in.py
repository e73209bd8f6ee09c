"""A stand-in for DeepEP's buffers, by its public documentation: W ranks are threads of one process.

Nothing of DeepEP is in it. What it keeps of the contract: shapes, dtypes, strides and order of what
dispatch returns, local expert ids with -1 elsewhere, combine's sum without weights, the handle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass import ops


@dataclass
class World:
    """W ranks that meet: `gather` gives every rank what all of them brought."""

    size: int
    brought: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)

    def gather(self, rank: int, thing: Any) -> list[Any]:
        self.brought[rank] = thing
        self.barrier.wait()
        everything = [self.brought[r] for r in range(self.size)]
        self.barrier.wait()
        return everything

    def run(self, job: Callable[[int], Any]) -> list[Any]:
        """job(rank) on a thread each; a rank that fails frees the others and is raised."""

        def guarded(rank: int) -> Any:
            try:
                return job(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            jobs = [pool.submit(guarded, rank) for rank in range(self.size)]
            errors = [e for j in jobs if (e := j.exception())]
            for error in errors:
                if not isinstance(error, threading.BrokenBarrierError):
                    raise error
            return [j.result() for j in jobs]


def local_ids(topk_idx: Tensor, rank: int, per_rank: int) -> Tensor:
    """Ids counted from the rank's first expert, -1 for those elsewhere."""
    here = (topk_idx >= rank * per_rank) & (topk_idx < (rank + 1) * per_rank)
    return torch.where(here, topk_idx - rank * per_rank, -1)


@dataclass
class Handle:
    """What a dispatch leaves for combine; the fields ElasticBuffer documents have its names."""

    tokens: int  # this rank sent from
    sources: list[Tensor]  # of each source rank, its tokens that came here
    worst: int  # rows of the buffer, if fixed
    num_recv_tokens_per_expert_list: list[int]
    num_unaligned_recv_tokens_per_expert: Tensor
    slots: list[Tensor] | None = None  # do_expand: of each source's tokens, their rows, -1 for none

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        return torch.tensor([len(t) for t in self.sources], dtype=torch.int32).cumsum(0)


class Buffer:
    """deep_ep.Buffer: the normal kernels and the low-latency ones."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        per_rank = num_experts // self.world.size
        in_rank = torch.stack(
            [(local_ids(topk_idx, r, per_rank) >= 0).any(1) for r in range(self.world.size)], 1
        )
        per_expert = torch.stack([(topk_idx == e).sum() for e in range(num_experts)])
        return in_rank.sum(0).int(), None, per_expert.int(), in_rank, None

    def dispatch(
        self,
        x: tuple[Tensor, Tensor],
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
    ) -> tuple[Any, ...]:
        if handle is not None:
            assert topk_idx is None
            return self._rows(x, handle), None, None, [], handle, None
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        per_rank = len(num_tokens_per_expert) // self.world.size
        idx, weights, handle = self._route(topk_idx, topk_weights, per_rank, num_worst_tokens)
        counts = handle.num_recv_tokens_per_expert_list
        counts = [-(-c // expert_alignment) * expert_alignment for c in counts]
        rows = self._rows(x, handle)
        more = num_worst_tokens - len(idx)
        if num_worst_tokens:
            counts = []
            idx = torch.cat([idx, idx.new_full((more, idx.shape[1]), -1)])
            weights = torch.cat([weights, weights.new_full((more, weights.shape[1]), torch.nan)])
        return rows, idx, weights, counts, handle, None

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None]:
        assert x.dtype == torch.bfloat16
        everyone = self.world.gather(self.rank, (x, topk_weights, handle))
        out = torch.zeros(handle.tokens, x.shape[1])
        sums = torch.zeros(handle.tokens, 0 if topk_weights is None else topk_weights.shape[1])
        for rows, weights, theirs in everyone:
            first = sum(len(t) for t in theirs.sources[: self.rank])
            mine = theirs.sources[self.rank]
            out[mine] += rows[first : first + len(mine)].float()
            if weights is not None:
                sums[mine] += weights[first : first + len(mine)]
        return out.bfloat16(), None if topk_weights is None else sums, None

    # ---- low latency ----------------------------------------------------------------------------

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        round_scale: bool = False,
    ) -> tuple[Any, ...]:
        """Casts itself; rows past an expert's count hold NaN here, anything there."""
        assert x.dtype == torch.bfloat16
        q = ops.quantize(x, scale="pow2" if round_scale else "fp32")
        everyone = self.world.gather(self.rank, (q, topk_idx))
        per_rank = num_experts // self.world.size
        slots = num_max_dispatch_tokens_per_rank * self.world.size
        hidden, blocks = q.shape[1], q.scale_inv.shape[1]
        data = torch.full((per_rank, slots, hidden), 0x7F, dtype=torch.uint8)
        scales = torch.full((per_rank, blocks, slots), torch.nan).transpose(1, 2)
        counts = torch.zeros(per_rank, dtype=torch.int32)
        came: list[list[tuple[int, int, int]]] = []  # of each expert: source, token, slot
        for e in range(per_rank):
            expert = self.rank * per_rank + e
            came.append([])
            for source, (theirs, idx) in enumerate(everyone):
                for token, slot in (idx == expert).nonzero().tolist():
                    at = len(came[e])
                    data[e, at] = theirs.data[token].view(torch.uint8)
                    scales[e, at] = theirs.scale_inv[token]
                    came[e].append((source, token, slot))
            counts[e] = len(came[e])
        return (data.view(torch.float8_e4m3fn), scales), counts, came, None, None

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any
    ) -> tuple[Tensor, None, None]:
        assert x.dtype == torch.bfloat16
        assert x.ndim == 3
        out = torch.zeros(len(topk_idx), x.shape[2])
        for rows, came in self.world.gather(self.rank, (x, handle)):
            for e, arrivals in enumerate(came):
                for at, (source, token, slot) in enumerate(arrivals):
                    if source == self.rank:
                        out[token] += topk_weights[token, slot] * rows[e, at].float()
        return out.bfloat16(), None, None

    # ---- both -----------------------------------------------------------------------------------

    def _route(
        self, topk_idx: Tensor | None, weights: Tensor | None, per_rank: int, worst: int
    ) -> tuple[Tensor, Tensor, Handle]:
        """Local ids and weights of the rows that come here, and the handle."""
        assert topk_idx is not None
        assert weights is not None
        assert topk_idx.dtype == torch.int64
        assert weights.dtype == torch.float32
        everyone = self.world.gather(self.rank, (topk_idx, weights))
        ids = [local_ids(theirs, self.rank, per_rank) for theirs, _ in everyone]
        sources = [(i >= 0).any(1).nonzero().flatten() for i in ids]
        idx = torch.cat([i[t] for i, t in zip(ids, sources, strict=True)])
        probs = torch.cat([w[t] for (_, w), t in zip(everyone, sources, strict=True)])
        counts = torch.stack([(idx == e).sum() for e in range(per_rank)]).int()
        return idx, probs, Handle(len(topk_idx), sources, worst, counts.tolist(), counts)

    def _rows(self, x: tuple[Tensor, Tensor], handle: Handle) -> tuple[Tensor, Tensor]:
        """The handle's rows of what everyone sends; rows past them hold NaN."""
        data, scales = x
        assert data.dtype == torch.float8_e4m3fn
        assert scales.dtype == torch.float32
        assert scales.shape == (data.shape[0], data.shape[1] // 128)
        pairs = zip(self.world.gather(self.rank, (data, scales)), handle.sources, strict=True)
        chosen = [(d.view(torch.uint8)[t], s[t]) for (d, s), t in pairs]
        codes, scale = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        more = max(handle.worst - len(codes), 0)
        codes = torch.cat([codes, codes.new_full((more, codes.shape[1]), 0x7F)])
        scale = torch.cat([scale, scale.new_full((more, scale.shape[1]), torch.nan)])
        return codes.view(torch.float8_e4m3fn), scale


class ElasticBuffer(Buffer):
    """deep_ep.ElasticBuffer: five results, sizes in the handle, an expanding layout."""

    get_dispatch_layout = None  # type: ignore[assignment]

    def __init__(self, world: World, rank: int, num_max_tokens_per_rank: int) -> None:
        super().__init__(world, rank)
        self.worst = num_max_tokens_per_rank * world.size

    def dispatch(  # type: ignore[override]
        self,
        x: tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        expert_alignment: int = 1,
        handle: Handle | None = None,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
    ) -> tuple[Any, ...]:
        idx = weights = None
        if handle is None:
            assert num_experts is not None
            worst = self.worst if do_cpu_sync is False else 0
            per_rank = num_experts // self.world.size
            idx, weights, handle = self._route(topk_idx, topk_weights, per_rank, worst)
            if worst:
                # Past the received rows nothing is written; here, ids that would do harm.
                more = worst - len(idx)
                idx = torch.cat([idx, idx.new_zeros(more, idx.shape[1])])
                weights = torch.cat([weights, weights.new_ones(more, weights.shape[1])])
                handle.num_recv_tokens_per_expert_list = []
            if do_expand:
                handle.slots = expand(idx, per_rank, expert_alignment)
        rows = self._rows(x, handle)
        if handle.slots is not None:
            token, slot = handle.slots
            held = token >= 0
            codes = torch.where(held[:, None], rows[0].view(torch.uint8)[token], 0x7F)
            # TMA-aligned: the scales of a block of columns lie together.
            scale = torch.full((rows[1].shape[1], -(-len(token) // 4) * 4), torch.nan).t()
            scale = scale[: len(token)]
            scale[held] = rows[1][token[held]]
            rows = codes.view(torch.float8_e4m3fn), scale
            if weights is not None:
                weights = torch.where(held, weights[token, slot], torch.nan)
        return rows, idx, weights, handle, None


def expand(idx: Tensor, experts: int, align: int) -> list[Tensor]:
    """Of each expanded row, its received row and slot; -1 on padding."""
    token, slot = [], []
    for e in range(experts):
        at = (idx == e).nonzero()
        pad = at.new_full((-len(at) % align,), -1)
        token.append(torch.cat([at[:, 0], pad]))
        slot.append(torch.cat([at[:, 1], pad]))
    return [torch.cat(token), torch.cat(slot)]
