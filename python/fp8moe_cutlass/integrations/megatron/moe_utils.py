"""permute, unpermute, sort_chunks_by_idxs and topk_routing_with_score_function of
megatron.core.transformer.moe.moe_utils.

Both fused=True and fused=False run this library's operators; `fused` only decides, as there,
whether rows are padded and rows of prob 0 are zeroed. What permute returns as sorted indices is
TransformerEngine's row_id_map in either case: it is for unpermute.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from fp8moe_cutlass.integrations import transformer_engine as te
from fp8moe_cutlass.integrations.transformer_engine.permutation import permute_by_mask
from fp8moe_cutlass.integrations.transformer_engine.router import dense, topk_of
from fp8moe_cutlass.tensor import Fp8Tensor

__all__ = ["permute", "sort_chunks_by_idxs", "topk_routing_with_score_function", "unpermute"]

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
    drop_and_pad changes nothing: the map then has num_out_tokens / E tokens of each expert, as
    Megatron's router makes it.
    Returns (permuted, permuted_probs | None, row_id_map, pad_offsets | None, tokens_per_expert, the
    padded ones where rows are padded).
    """
    _refuse_inverse_map("permute", return_batch_invariant_inverse_map)
    if fused and probs is not None and tokens_per_expert is not None and align_size > 0:
        return te.moe_permute_and_pad_with_probs(
            tokens, probs, routing_map, tokens_per_expert, align_size
        )
    if num_out_tokens is None:
        num_out_tokens = int((routing_map != 0).sum())
    out, permuted_probs, row_id_map = permute_by_mask(
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

    sorted_indices and pad_offsets: what permute returned. routing_map is not needed, and
    drop_and_pad changes nothing.
    """
    _refuse_inverse_map("unpermute", batch_invariant_inverse_map is not None)
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


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: Any = None,
    dense_output: bool = False,
    precomputed_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Probabilities and routing map (bool), both [T, E], of logits [T, E]; with dense_output the
    probabilities and experts of each token's topk, both [T, topk]. In float32; probabilities in
    logits' dtype. nn.RoutingRule's rule: of equal scores the lower expert wins.

    fused changes nothing. expert_bias [E] takes score_function "sigmoid" or "sqrtsoftplus".
    precomputed_indices [T, topk], or what router_replay gives, take the place of the top k.
    """
    if logits.ndim != 2:
        raise ValueError(
            f"[topk_routing_with_score_function] logits must be [T, E]; got {tuple(logits.shape)}"
        )
    how: dict[str, Any] = {
        "use_pre_softmax": use_pre_softmax,
        "num_groups": num_groups,
        "group_topk": group_topk,
        "scaling_factor": scaling_factor,
        "score_function": score_function,
        "expert_bias": expert_bias,
    }
    idx = precomputed_indices
    if idx is None and router_replay is not None:
        by_logits = score_function == "softmax" and not use_pre_softmax
        compared = logits.detach().float()
        if not by_logits:
            compared = topk_of(compared, topk, **how).scores
        if expert_bias is not None:
            compared = compared + expert_bias.detach().float()

        def choose(values: Tensor, k: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            # The softmax of the chosen compares values as they are.
            chosen = topk_of(values, k, num_groups=num_groups, group_topk=group_topk).topk_idx
            return values.gather(1, chosen), chosen

        _, idx = router_replay.get_replay_topk(compared, topk, num_groups, group_topk, choose)
    routed = topk_of(logits, topk, **how, given_idx=idx)
    if dense_output:
        return routed.topk_weights.to(logits.dtype), routed.topk_idx
    return dense(logits, routed)


def _refuse_inverse_map(op: str, batch_invariant: bool) -> None:
    if batch_invariant:
        raise ValueError(f"[{op}] a batch-invariant inverse map is not supported")
