"""torch.compile(fullgraph=True) of the layer, forward and backward, equals eager bit for bit."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8moe_cutlass.nn import LossCoefficients, MoE, MoEExperts, Router, RoutingRule, SharedExpert


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(module: Any) -> Any:
    # aot_eager traces forward and backward as inductor does and leaves out its code generation.
    return torch.compile(module, fullgraph=True, backend="aot_eager")


def moe_of(score: str = "softmax", shared: SharedExpert | None = None, **options: Any) -> MoE:
    coefficients = LossCoefficients(balancing=0.5, balancing_per_sequence=0.25, z=0.1)
    router = Router(128, 4, 2, RoutingRule(score=score), coefficients=coefficients)
    return MoE(router, MoEExperts(4, 128, 128, **options), shared)


def assert_step_is_that_of(moe: MoE, run: Callable[..., Any] = lambda f, x: f(x)) -> None:
    """Compiled, run(moe, x) has the bits of an eager step, its losses by coefficients included."""
    x = torch.randn(2, 32, 128).bfloat16()
    results = []

    def forward(x: torch.Tensor) -> Any:
        return run(functools.partial(moe, return_routing=True), x)

    for f in (forward, compiled(forward)):
        moe.zero_grad()
        out, routing = f(x)
        loss = moe.router.balancing_loss(routing)
        (out.float().square().mean() + loss).backward()
        results.append([out, loss, *(w.grad for w in moe.parameters())])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


def test_moe() -> None:
    torch.manual_seed(0)
    moe = moe_of("sigmoid", SharedExpert(128, 128))
    assert_step_is_that_of(moe)


def test_checkpointed_moe() -> None:
    torch.manual_seed(0)
    assert_step_is_that_of(moe_of(), functools.partial(checkpoint, use_reentrant=False))


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_copies_of_a_compiled_layer_compute_with_their_own_weights(copied: Any) -> None:
    """A copy is not compiled, as of any module of torch's."""
    layer = MoEExperts(4, 128, 128)
    layer.compile(fullgraph=True, backend="aot_eager")
    given = torch.randn(8, 128).bfloat16(), torch.zeros(8, 1).long(), torch.ones(8, 1)
    want = layer(*given)
    copies = copied(layer)
    assert torch.equal(copies(*given), want)
    copies.down_proj = torch.nn.Parameter(2 * layer.down_proj.detach())
    assert torch.equal(copies(*given), 2 * want)


def test_export_of_any_token_count() -> None:
    moe = moe_of(recipe=None)
    x = torch.randn(64, 128).bfloat16()
    tokens = {0: torch.export.Dim("tokens", min=2, max=1024)}
    with torch.no_grad():
        exported = torch.export.export(moe, (x,), dynamic_shapes={"x": tokens}, strict=False)
        run = exported.module()
        for some in (x, x[:24]):
            assert torch.equal(run(some), moe(some))
