"""Functions of transformer_engine.pytorch over this library's operators, under their own names.

Arguments, results and gradients are TransformerEngine's; docs/how-to/from-transformer-engine.md has
a table of what differs. TransformerEngine itself is needed for as_blockwise_tensor alone.
"""

from fp8moe_cutlass.integrations.transformer_engine.padding import Fp8Padding, Fp8Unpadding
from fp8moe_cutlass.integrations.transformer_engine.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from fp8moe_cutlass.integrations.transformer_engine.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from fp8moe_cutlass.integrations.transformer_engine.tensor import as_blockwise_tensor, as_fp8_tensor

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "as_blockwise_tensor",
    "as_fp8_tensor",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]
