"""permute, unpermute and sort_chunks_by_idxs of megatron.core.transformer.moe.moe_utils.

Both fused=True and fused=False run this library's operators; `fused` only decides, as there,
whether rows are padded and rows of prob 0 are zeroed. What permute returns as sorted indices is
TransformerEngine's row_id_map in either case: it is for unpermute.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from fp8moe_cutlass.integrations import transformer_engine as te
from fp8moe_cutlass.tensor import Fp8Tensor

__all__ = ["permute", "sort_chunks_by_idxs", "unpermute"]

T = TypeVar("T", Tensor, Fp8Tensor)


def permute(
    tokens: T,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    tokens_per_expert: Tensor | None = None,
    align_size: int = 0,
    return_batch_invariant_inverse_map: bool = False,
) -> tuple[T, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Tokens [T, H] to rows grouped by expert, by the mask routing_map [T, E].

    num_out_tokens: the number of assignments; None: counted, which costs a host read.
    With fused, probs [T, E], tokens_per_expert [E] and align_size > 0 each expert's rows are padded
    to a multiple of align_size (1, 16, 32 or 128).
    Returns (permuted, permuted_probs | None, row_id_map, pad_offsets | None, tokens_per_expert, the
    padded ones where rows are padded).
    """
    _refuse("permute", drop_and_pad, return_batch_invariant_inverse_map)
    if fused and probs is not None and tokens_per_expert is not None and align_size > 0:
        return te.moe_permute_and_pad_with_probs(
            tokens, probs, routing_map, tokens_per_expert, align_size
        )
    if num_out_tokens is None:
        num_out_tokens = int((routing_map != 0).sum())
    out, permuted_probs, row_id_map = te.permute_by_mask(
        "permute", tokens, probs, routing_map, num_out_tokens, zero_unweighted=fused
    )
    return out, permuted_probs, row_id_map, None, tokens_per_expert


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size | tuple[int, int],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: Tensor | None = None,
    batch_invariant_inverse_map: Tensor | None = None,
) -> Tensor:
    """Sums the rows of each token, weighted by probs [T, E] if given; restore_shape is (T, H).

    sorted_indices and pad_offsets: what permute returned. routing_map is not needed.
    """
    _refuse("unpermute", drop_and_pad, batch_invariant_inverse_map is not None)
    return te.moe_unpermute(
        permuted_tokens,
        sorted_indices,
        merging_probs=probs,
        restore_shape=restore_shape,
        pad_offsets=pad_offsets,
    )


def sort_chunks_by_idxs(
    input: T,
    split_sizes: Tensor,
    sorted_idxs: Tensor,
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[T, Tensor | None]:
    """The chunks of input [N, H], split_sizes [C] rows each, in the order sorted_idxs [C]."""
    if probs is None:
        return te.moe_sort_chunks_by_index(input, split_sizes, sorted_idxs), None
    return te.moe_sort_chunks_by_index_with_probs(input, probs, split_sizes, sorted_idxs)


def _refuse(op: str, drop_and_pad: bool, batch_invariant: bool) -> None:
    if drop_and_pad:
        raise ValueError(f"[{op}] drop_and_pad is not supported; drop in routing_map instead")
    if batch_invariant:
        raise ValueError(f"[{op}] a batch-invariant inverse map is not supported")
