"""ops.router_topk with gradients of its weights and scores."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd.arguments import check_tensor
from fp8moe_cutlass.autograd.no_double_backward import once_differentiable
from fp8moe_cutlass.ops._torch import refuse_transforms, watched

_OPTIONS: dict[str, Any] = {  # in the order of the operator's schema; backward takes the first five
    "score": "softmax",
    "softmax_after_topk": False,
    "normalize": True,
    "epsilon": 1e-20,
    "routed_scaling_factor": 1.0,
    "select_by": "scores",
    "num_groups": 1,
    "topk_groups": 1,
    "best_per_group": 1,
    "closed_value": -math.inf,
}
_OF_WEIGHTS = tuple(_OPTIONS)[:5]


def router_topk(
    logits: Tensor,
    top_k: int,
    *,
    selection_bias: Tensor | None = None,
    padding: Tensor | None = None,
    given_idx: Tensor | None = None,
    sequences: int = 1,
    **options: Any,
) -> ops.RouterTopk:
    """ops.router_topk, its scores and weights differentiable in logits [T, E] float32.

    Of a DTensor of logits, split over tokens or not at all, the results are DTensors.
    """
    refuse_transforms("router_topk", logits)
    arrays = (logits, selection_bias, padding, given_idx)
    for name, t in zip(("logits", "selection_bias", "padding", "given_idx"), arrays, strict=True):
        if t is not None or name == "logits":
            check_tensor("router_topk", name, t, distributed=True)
    unknown = options.keys() - _OPTIONS.keys()
    if unknown:
        raise TypeError(f"router_topk() got an unexpected keyword argument {min(unknown)!r}")
    return run(arrays, top_k, sequences, options)


def run(
    arrays: tuple[Tensor | None, ...], top_k: int, sequences: int, options: dict[str, Any]
) -> ops.RouterTopk:
    """`router_topk`, for a caller that has checked its arguments. arrays: logits, selection_bias,
    padding and given_idx."""
    if hasattr(arrays[0], "full_tensor"):
        return _of_dtensors(arrays, top_k, sequences, options)
    given = (*arrays, top_k, sequences, *(_OPTIONS | options).values())
    op: Any = torch.ops.fp8moe.router_topk if watched() else _RouterTopk.apply
    scores, chosen, weights, counts = op(*given)
    given_idx: Any = arrays[3]
    return ops.RouterTopk(scores, chosen if given_idx is None else given_idx, weights, counts)


class _RouterTopk(torch.autograd.Function):
    """The four results. topk_idx is empty where it is given: an output is a tensor of its own."""

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        logits, bias, padding, given_idx, top_k, sequences, *options = given
        scores, chosen, weights, counts = ops.router_topk(
            logits.contiguous(),
            top_k,
            selection_bias=None if bias is None else bias.contiguous(),
            padding=None if padding is None else padding.contiguous(),
            given_idx=None if given_idx is None else given_idx.contiguous(),
            sequences=sequences,
            **dict(zip(_OPTIONS, options, strict=True)),
        )
        if given_idx is not None:
            chosen = logits.new_empty(0, dtype=torch.int64)
        return scores, chosen, weights, counts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        scores, chosen, weights, counts = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(chosen, counts)
        ctx.save_for_backward(scores, chosen if inputs[3] is None else inputs[3], weights)
        ctx.options = inputs[6 : 6 + len(_OF_WEIGHTS)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(_dlogits, ctx, *grads)


def _backward(dlogits_of: Callable[..., Tensor], ctx: Any, *grads: Any) -> tuple[Any, ...]:
    dscores, _, dweights, _ = grads
    dlogits = None
    if dscores is not None or dweights is not None:
        dlogits = dlogits_of(dweights, dscores, *ctx.saved_tensors, *ctx.options)
    return dlogits, *[None] * (5 + len(_OPTIONS))


def _dlogits(
    dweights: Tensor | None,
    dscores: Tensor | None,
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    *options: Any,
) -> Tensor:
    made: Tensor = ops.router_topk_backward(
        None if dweights is None else dweights.contiguous(),
        None if dscores is None else dscores.contiguous(),
        scores,
        topk_idx.contiguous(),
        topk_weights,
        **dict(zip(_OF_WEIGHTS, options, strict=True)),
    )
    return made


# ---- as an operator of torch's -------------------------------------------------------------------

_SCHEMA = (
    "str score, bool softmax_after_topk, bool normalize, float epsilon, float routed_scaling_factor"
)


def _fake(*given: Any) -> tuple[Tensor, ...]:
    logits, _, _, given_idx, top_k, sequences, *_ = given
    tokens, experts = logits.shape
    chosen = (0,) if given_idx is not None else (tokens, top_k)
    return (
        logits.new_empty(tokens, experts),
        logits.new_empty(chosen, dtype=torch.int64),
        logits.new_empty(tokens, top_k),
        logits.new_empty(sequences * experts, dtype=torch.int64),
    )


torch.library.custom_op(
    "fp8moe::router_topk_backward",
    _dlogits,
    mutates_args=(),
    schema="(Tensor? dweights, Tensor? dscores, Tensor scores, Tensor topk_idx, "
    f"Tensor topk_weights, {_SCHEMA}) -> Tensor",
).register_fake(lambda dweights, dscores, scores, *_: torch.empty_like(scores))
_op = torch.library.custom_op(
    "fp8moe::router_topk",
    _RouterTopk.forward,
    mutates_args=(),
    schema="(Tensor logits, Tensor? selection_bias, Tensor? padding, Tensor? given_idx, "
    f"SymInt top_k, SymInt sequences, {_SCHEMA}, str select_by, int num_groups, int topk_groups, "
    "int best_per_group, float closed_value) "
    "-> (Tensor scores, Tensor topk_idx, Tensor topk_weights, Tensor tokens_per_expert)",
)
_op.register_fake(_fake)
_op.register_autograd(
    functools.partial(_backward, torch.ops.fp8moe.router_topk_backward),
    setup_context=_RouterTopk.setup_context,
)


def _of_dtensors(
    arrays: tuple[Any, ...], top_k: int, sequences: int, options: dict[str, Any]
) -> ops.RouterTopk:
    """Each rank's tokens by themselves; of tokens that are split the counts are partial sums."""
    from torch.distributed.tensor import DTensor, Partial

    mesh, placements = arrays[0].device_mesh, arrays[0].placements
    if any(not (p.is_replicate() or p.is_shard(0)) for p in placements):
        raise ValueError(f"[router_topk] logits must be split over tokens; got {placements}")
    logits, bias, padding, idx = (t.to_local() if hasattr(t, "to_local") else t for t in arrays)
    results = run((logits, bias, padding, idx), top_k, sequences, options)
    sums = [Partial() if p.is_shard() else p for p in placements]
    split = (placements, placements, placements, sums)
    return ops.RouterTopk._make(
        DTensor.from_local(t, mesh, how, run_check=False)
        for t, how in zip(results, split, strict=True)
    )
