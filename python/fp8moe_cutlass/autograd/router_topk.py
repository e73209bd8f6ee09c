"""ops.router_topk with gradients of its weights and scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd.arguments import check_tensor
from fp8moe_cutlass.autograd.no_double_backward import once_differentiable
from fp8moe_cutlass.ops._torch import refuse_transforms, watched

_OF_WEIGHTS = ("score", "softmax_after_topk", "normalize", "epsilon", "routed_scaling_factor")


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
    check_tensor("router_topk", "logits", logits, distributed=True)
    arrays = (logits, selection_bias, padding, given_idx)
    for name, t in zip(("selection_bias", "padding", "given_idx"), arrays[1:], strict=True):
        if t is not None:
            check_tensor("router_topk", name, t, distributed=True)
    if hasattr(logits, "full_tensor"):
        return _of_dtensors(arrays, top_k, sequences, options)
    given = (*arrays, top_k, sequences)
    if watched():
        found = torch.ops.fp8moe.router_topk(*given, **options)
    else:
        found = _RouterTopk.apply(*given, options)  # type: ignore[no-untyped-call]
    scores, chosen, weights, counts = found
    return ops.RouterTopk(scores, chosen if given_idx is None else given_idx, weights, counts)


class _RouterTopk(torch.autograd.Function):
    @staticmethod
    def forward(
        logits: Tensor,
        selection_bias: Tensor | None,
        padding: Tensor | None,
        given_idx: Tensor | None,
        top_k: int,
        sequences: int,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        scores, chosen, weights, counts = ops.router_topk(
            logits.contiguous(),
            top_k,
            selection_bias=None if selection_bias is None else selection_bias.contiguous(),
            padding=None if padding is None else padding.contiguous(),
            given_idx=None if given_idx is None else given_idx.contiguous(),
            sequences=sequences,
            **options,
        )
        return scores, chosen if given_idx is None else None, weights, counts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        scores, chosen, weights, counts = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*([counts] if chosen is None else [chosen, counts]))
        ctx.save_for_backward(scores, inputs[3] if chosen is None else chosen, weights)
        ctx.options = {name: inputs[6][name] for name in _OF_WEIGHTS if name in inputs[6]}

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dscores: Tensor | None, _idx: None, dweights: Tensor | None, _counts: None
    ) -> tuple[Any, ...]:
        dlogits = None
        if dscores is not None or dweights is not None:
            dlogits = _run_backward(dweights, dscores, *ctx.saved_tensors, **ctx.options)
        return dlogits, None, None, None, None, None, None


# ---- as an operator of torch's -------------------------------------------------------------------

_OPTIONS = (
    "str score='softmax', bool softmax_after_topk=False, bool normalize=True, float epsilon=1e-20, "
    "float routed_scaling_factor=1.0"
)
_FORWARD = (
    "(Tensor logits, Tensor? selection_bias, Tensor? padding, Tensor? given_idx, SymInt top_k, "
    f"SymInt sequences, *, {_OPTIONS}, str select_by='scores', int num_groups=1, "
    "int topk_groups=1, int best_per_group=1, float? closed_value=None) "
    "-> (Tensor scores, Tensor topk_idx, Tensor topk_weights, Tensor tokens_per_expert)"
)
_BACKWARD = (
    "(Tensor? dweights, Tensor? dscores, Tensor scores, Tensor topk_idx, Tensor topk_weights, "
    f"*, {_OPTIONS}) -> Tensor"
)


def _run(
    logits: Tensor,
    selection_bias: Tensor | None,
    padding: Tensor | None,
    given_idx: Tensor | None,
    top_k: int,
    sequences: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    given = (selection_bias, padding, given_idx, top_k, sequences)
    if options.get("closed_value") is None:  # a schema cannot say -inf
        options.pop("closed_value", None)
    scores, chosen, weights, counts = _RouterTopk.forward(logits, *given, options)
    if chosen is None:  # an operator's outputs are tensors of their own
        chosen = logits.new_empty(0, dtype=torch.int64)
    return scores, chosen, weights, counts


def _fake(
    logits: Tensor,
    selection_bias: Tensor | None,
    padding: Tensor | None,
    given_idx: Tensor | None,
    top_k: int,
    sequences: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    tokens, experts = logits.shape
    chosen = (0,) if given_idx is not None else (tokens, top_k)
    return (
        logits.new_empty(tokens, experts),
        logits.new_empty(chosen, dtype=torch.int64),
        logits.new_empty(tokens, top_k),
        logits.new_empty(sequences * experts, dtype=torch.int64),
    )


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    scores, chosen, weights, counts = output
    given_idx = inputs[3]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(chosen, counts)
    ctx.save_for_backward(scores, chosen if given_idx is None else given_idx, weights)
    ctx.options = {name: keyword_only_inputs[name] for name in _OF_WEIGHTS}


def _through_torch(ctx: Any, dscores: Any, _idx: Any, dweights: Any, _counts: Any) -> Any:
    dlogits = None
    if dscores is not None or dweights is not None:
        op = torch.ops.fp8moe.router_topk_backward
        dlogits = op(dweights, dscores, *ctx.saved_tensors, **ctx.options)
    return dlogits, None, None, None, None, None


def _run_backward(
    dweights: Tensor | None,
    dscores: Tensor | None,
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    **options: Any,
) -> Tensor:
    made: Tensor = ops.router_topk_backward(
        None if dweights is None else dweights.contiguous(),
        None if dscores is None else dscores.contiguous(),
        scores,
        topk_idx.contiguous(),
        topk_weights,
        **options,
    )
    return made


def _fake_backward(
    dweights: Any, dscores: Any, scores: Tensor, topk_idx: Any, topk_weights: Any, **options: Any
) -> Tensor:
    return torch.empty_like(scores)


_backward_op = torch.library.custom_op(
    "fp8moe::router_topk_backward", _run_backward, mutates_args=(), schema=_BACKWARD
)
_backward_op.register_fake(_fake_backward)
_op = torch.library.custom_op("fp8moe::router_topk", _run, mutates_args=(), schema=_FORWARD)
_op.register_fake(_fake)
_op.register_autograd(_through_torch, setup_context=_setup)


def _of_dtensors(
    arrays: tuple[Any, ...], top_k: int, sequences: int, options: dict[str, Any]
) -> ops.RouterTopk:
    """Each rank's tokens by themselves; of tokens that are split the counts are partial sums."""
    from torch.distributed.tensor import DTensor, Partial

    mesh, placements = arrays[0].device_mesh, arrays[0].placements
    if any(not (p.is_replicate() or p.is_shard(0)) for p in placements):
        raise ValueError(f"[router_topk] logits must be split over tokens; got {placements}")
    logits, bias, padding, idx = (t.to_local() if hasattr(t, "to_local") else t for t in arrays)
    given = {"selection_bias": bias, "padding": padding, "given_idx": idx, "sequences": sequences}
    results = router_topk(logits, top_k, **given, **options)
    sums = [Partial() if p.is_shard() else p for p in placements]
    split = (placements, placements, placements, sums)
    return ops.RouterTopk._make(
        DTensor.from_local(t, mesh, how, run_check=False)
        for t, how in zip(results, split, strict=True)
    )
