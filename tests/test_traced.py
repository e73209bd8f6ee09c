"""Masks and counts out of range, exports, checkpoints, FLOPs and rows of unknown number, traced."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from fp8moe_cutlass.nn import MoEExperts

X = torch.ones(2, 128, dtype=torch.bfloat16)
IDS, PROBS = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def layer(num_experts: int = 2, **options: Any) -> MoEExperts:
    return MoEExperts(num_experts, 128, 128, **options)


compiled = partial(torch.compile, backend="eager", fullgraph=True)


def test_a_compiled_mask_of_more_than_capacity() -> None:
    mask, probs = torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 1)
    experts = layer(1)

    def call() -> torch.Tensor:
        return experts(X, mask, probs, max_assignments=1)

    with pytest.raises(ValueError, match="must hold at most 1; got 2"):
        call()
    with pytest.raises(Exception, match="must hold at most 1"):
        compiled(call)()


def test_compiled_counts_of_more_than_the_rows() -> None:
    experts, counts = layer(), torch.tensor([2, 1])

    def call() -> torch.Tensor:
        return experts.forward_rows(X, counts)

    with pytest.raises(ValueError, match="their sum at most the 2 rows"):
        call()
    with pytest.raises(Exception, match="their sum at most the 2 rows"):
        compiled(call)()


def test_a_function_mode_is_no_trace() -> None:
    """As `with torch.device(...)` is: what a traced forward cannot do still works."""
    experts = layer()
    for w in experts.parameters():
        w.main_grad = torch.zeros(w.shape)
        w.grad_added_to_main_grad = False
    with torch.device("cpu"):
        experts(X, IDS, PROBS).sum().backward()
    assert all(w.grad_added_to_main_grad for w in experts.parameters())
    assert all(w.main_grad.any() for w in experts.parameters())


def one_of_exported(tokens: Any, **how: Any) -> None:
    """A program of any number of tokens makes of one what the layer does."""
    experts, args = (
        layer(8),
        [torch.randn(16, 128).bfloat16(), IDS.repeat(8, 1), PROBS.repeat(8, 1)],
    )
    program = torch.export.export(experts, (*args,), dynamic_shapes=({0: tokens},) * 3, **how)
    one = [t[:1] for t in args]
    assert torch.equal(program.module()(*one), experts(*one))


def test_an_export_from_one_token_on() -> None:
    with torch.no_grad():
        one_of_exported(torch.export.Dim("T", min=1), strict=False)


def test_an_export_of_automatic_sizes_decodes() -> None:
    with torch.no_grad():
        one_of_exported(torch.export.Dim.AUTO, strict=False)


def test_a_strict_export_with_gradients() -> None:
    one_of_exported(torch.export.Dim("T", min=1), strict=True)


def gradients(run: Any, experts: MoEExperts) -> list[Any]:
    out = run(X, IDS, PROBS)
    return [out.detach(), *torch.autograd.grad(out.sum(), list(experts.parameters()))]


def save_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def test_a_selective_checkpoint_that_saves_every_op() -> None:
    contexts = partial(create_selective_checkpoint_contexts, save_all)
    experts = layer(recipe=None)
    run = partial(checkpoint, experts, use_reentrant=False, context_fn=contexts)
    assert all(map(torch.equal, gradients(run, experts), gradients(experts, experts)))


def test_flops_of_recipe_none() -> None:
    with FlopCounterMode(display=False) as counter:
        layer(recipe=None)(X, IDS, PROBS)
    assert counter.get_total_flops() == 3 * 2 * 2 * 128 * 128


def test_saved_tensors_that_may_be_written() -> None:
    experts = layer()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        got = gradients(experts, experts)
    assert all(map(torch.equal, got, gradients(experts, experts)))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled_rows_of_a_data_dependent_number() -> None:
    experts, x, counts = layer(), X.repeat(2, 1), torch.tensor([1, 0])
    keep = torch.tensor([True, False, False, False])

    def call() -> torch.Tensor:
        return experts.forward_rows(x[keep.nonzero().squeeze(1)], counts)

    assert torch.equal(compiled(call)(), call())
