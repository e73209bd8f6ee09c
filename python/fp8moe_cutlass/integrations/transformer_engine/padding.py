"""Fp8Padding and Fp8Unpadding: the rows of each GEMM padded to a multiple, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from fp8moe_cutlass import autograd, ops
from fp8moe_cutlass.integrations.transformer_engine.row_id_map import repack
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import ScaleLayout

T = TypeVar("T", Tensor, Fp8Tensor)


class _Rows(nn.Module):
    """align_size: 1, 16, 32 or 128; None: 16, TransformerEngine's of all FP8 recipes but MXFP8."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = 16 if align_size is None else align_size
        if self.align_size not in (1, 16, 32, 128):
            raise ValueError(
                f"[{type(self).__name__}] align_size must be 1, 16, 32 or 128; got {align_size}"
            )

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"

    def _padded(self, inp: Tensor | Fp8Tensor, m_splits: Sequence[int], padded: bool) -> list[int]:
        """The rows of each GEMM with padding; ValueError unless inp has those given, or these."""
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"[{type(self).__name__}] m_splits must be of {self.num_gemms} GEMMs; "
                f"got {len(m_splits)}"
            )
        align = self.align_size
        sizes = [-(-m // align) * align for m in m_splits]
        rows = sum(sizes if padded else m_splits)
        if inp.shape[0] != rows:
            raise ValueError(
                f"[{type(self).__name__}] inp must have the {rows} rows of m_splits"
                f"{' and their padding' if padded else ''}; got {inp.shape[0]}"
            )
        return sizes

    def _plan(self, inp: Tensor | Fp8Tensor, m_splits: Sequence[int], rows: int) -> RoutingPlan:
        counts = torch.tensor(m_splits, dtype=torch.int64).to(inp.device, non_blocking=True)
        plan = ops.plan_from_counts(counts, capacity=sum(m_splits), align=self.align_size)
        return repack(plan, rows)


class Fp8Padding(_Rows):
    """Rows [M, H] of num_gemms GEMMs, m_splits rows each, to rows padded with zeros. Any H; those
    that are multiples of 16 are moved by permute_pad.

    inp is float32, float16, bfloat16 (differentiable) or an Fp8Tensor, whose padding has scale 0.
    Returns (padded [R, H], the padded sizes).
    """

    def forward(self, inp: T, m_splits: Sequence[int]) -> tuple[T, list[int]]:
        sizes = self._padded(inp, m_splits, padded=False)
        if sizes == list(m_splits):
            return inp, sizes
        layout: ScaleLayout = "gemm"
        if isinstance(inp, Fp8Tensor):
            layout = cast(ScaleLayout, inp.scale_layout)
        plan = self._plan(inp, m_splits, sum(sizes))
        if isinstance(inp, Tensor) and inp.shape[1] % 16:  # as probs [M, 1]
            zeros = inp.new_zeros(sum(sizes), inp.shape[1])
            return zeros.index_copy(0, plan.row_of.flatten().long(), inp), sizes
        x = inp if isinstance(inp, Fp8Tensor) else inp.contiguous()
        return autograd.permute_pad(x, plan, scale_layout=layout)[0], sizes


class Fp8Unpadding(_Rows):
    """The rows that Fp8Padding was given, [M, H], of its result [R, H]."""

    def forward(self, inp: T, m_splits: Sequence[int]) -> T:
        sizes = self._padded(inp, m_splits, padded=True)
        if sizes == list(m_splits):
            return inp
        rows = self._plan(inp, m_splits, sum(sizes)).row_of.flatten()
        if not isinstance(inp, Fp8Tensor):
            return inp.index_select(0, rows)
        data = inp.data.view(torch.uint8).index_select(0, rows).view(inp.data.dtype)
        scale_inv = inp.to_layout("row").scale_inv.index_select(0, rows)
        unpadded = Fp8Tensor(data, scale_inv, "row", inp.pow2, inp.fp8_dtype)
        return unpadded.to_layout(inp.scale_layout)
