"""This library's permutation in an unmodified Megatron."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions import transformer_engine as extension
from megatron.core.transformer.moe import moe_utils as theirs
from megatron.core.transformer.moe import token_dispatcher

from fp8moe_cutlass.integrations import transformer_engine as te
from fp8moe_cutlass.integrations.megatron import moe_utils as ours

_FUSED: dict[str, Any] = {
    "fused_permute": te.moe_permute,
    "fused_permute_with_probs": te.moe_permute_with_probs,
    "fused_permute_and_pad_with_probs": te.moe_permute_and_pad_with_probs,
    "fused_unpermute": te.moe_unpermute,
    "fused_sort_chunks_by_index": te.moe_sort_chunks_by_index,
    "fused_sort_chunks_by_index_with_probs": te.moe_sort_chunks_by_index_with_probs,
}


def replace_permutation() -> None:
    """Has Megatron's dispatchers in this process move tokens by this library's permute, unpermute
    and sort_chunks_by_idxs from now on; moe_permute_fusion needs no TransformerEngine. Its fused_*
    names of the permutation are this library's, too."""
    for module in (theirs, token_dispatcher):
        for name in ("permute", "unpermute", "sort_chunks_by_idxs"):
            setattr(module, name, getattr(ours, name))
    for module in (extension, theirs):
        for name, function in _FUSED.items():
            setattr(module, name, function)
