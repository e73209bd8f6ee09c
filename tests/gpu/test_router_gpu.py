"""The router's gate on the tensor core: against float64, what it saves, and where it may run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8moe_cutlass.autograd import router_logits
from fp8moe_cutlass.nn import Router, Routing, RoutingRule
from gate_problem import IN_FLOAT32, gradients, operands
from reference import relative_error

# A tensor core may cut its float32 sum off after every 16 products; 7168 are 448 of these.
SUMS = 448 * 2.0**-23

V3 = RoutingRule(
    score="sigmoid",
    selection_bias=True,
    num_groups=8,
    topk_groups=4,
    best_per_group=2,
    routed_scaling_factor=2.5,
)
RULES = pytest.mark.parametrize("rule", [RoutingRule(), V3], ids=["softmax", "v3"])


@pytest.fixture
def whole_sums() -> Iterator[None]:
    """cuBLAS splits no sum into bfloat16 ones."""
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


def in_float32(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight.float())


def run(x: Tensor, weight: Tensor, dlogits: Tensor, f: Any = router_logits) -> list[Tensor]:
    """logits, dx, dweight."""
    return gradients(f, x, weight, dlogits)


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for name, a, b in zip(("logits", "dx", "dweight"), got, want, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts"),
    [(4096, 7168, 256), (4096, 2048, 128), (1000, 2048, 60), (333, 1023, 7), (5, 64, 2), (2, 7, 3)],
)
def test_against_float64(
    tokens: int,
    hidden: int,
    experts: int,
    device: torch.device,
    record_property: Callable[[str, object], None],
) -> None:
    x, weight, dlogits = operands(tokens, hidden, experts, device)
    got = run(x, weight, dlogits)
    plain = run(x, weight, dlogits, in_float32)
    x64, w64, d64 = x.detach().double(), weight.detach().double(), dlogits.double()
    exact = [x64 @ w64.t(), d64 @ w64, d64.t() @ x64]
    for name, a, b, want in zip(("logits", "dx", "dweight"), got, plain, exact, strict=True):
        record_property(f"{name} {tokens} {hidden} {experts}", relative_error(a, want))
        record_property(f"{name} in float32", relative_error(b, want))
    assert [t.dtype for t in got] == [torch.float32, torch.bfloat16, torch.float32]
    assert relative_error(got[0], exact[0]) < SUMS
    assert relative_error(got[2], exact[2]) < SUMS
    error = (got[1].double() - exact[1]).abs()
    assert (error <= 2.0**-8 * exact[1].abs() + 2.0**-12.9 * (d64.abs() @ w64.abs())).all()
    if tokens >= 1000:
        assert relative_error(got[1], exact[1]) < 1.02 * relative_error(plain[1], exact[1])


@pytest.mark.parametrize("tokens", [8, 64, 512])
def test_few_tokens_under_torchs_default_flags(tokens: int, device: torch.device) -> None:
    """Where cuBLAS splits K: float32 results do not care, bfloat16 ones may be rounded by parts."""
    x, weight, dlogits = operands(tokens, 7168, 256, device)
    logits, dx, dweight = run(x, weight, dlogits)
    x64, w64, d64 = x.detach().double(), weight.detach().double(), dlogits.double()
    assert relative_error(logits, x64 @ w64.t()) < SUMS
    assert relative_error(dweight, d64.t() @ x64) < SUMS
    assert relative_error(dx, d64 @ w64) < 2.0**-7


def test_every_bit_of_weight_and_dlogits_counts(device: torch.device) -> None:
    """With one-hot tokens logits and dweight are copies."""
    h, e = 512, 24
    x = torch.eye(h, device=device).bfloat16().requires_grad_()
    weight, dlogits = (
        (torch.randn(s) * torch.exp2(torch.randint(-60, 60, s))).to(device)
        for s in ((e, h), (h, e))
    )
    logits, _, dweight = run(x, weight.requires_grad_(), dlogits)
    assert torch.equal(logits, weight.detach().t())
    assert torch.equal(dweight, dlogits.t())


def test_an_infinite_weight_is_nan_in_its_expert_alone(device: torch.device) -> None:
    x, weight, dlogits = operands(64, 256, 16, device)
    with torch.no_grad():
        weight[3, 5] = float("inf")
    logits, dx, dweight = run(x, weight, dlogits)
    bad = torch.arange(16, device=device) == 3
    assert torch.equal(logits.isnan(), bad.expand(64, -1))
    assert torch.equal(dx.isnan(), (torch.arange(256, device=device) == 5).expand(64, -1))
    assert dweight.isfinite().all()


def test_two_runs_are_bit_equal(device: torch.device) -> None:
    given = operands(4096, 7168, 256, device)
    assert_equal(run(*given), run(*given))


@pytest.mark.parametrize("experts", [1, 60, 256])
def test_no_tokens(experts: int, device: torch.device) -> None:
    logits, dx, dweight = run(*operands(0, 256, experts, device))
    assert logits.shape == (0, experts)
    assert dx.shape == (0, 256)
    assert dweight.shape == (experts, 256)
    assert not dweight.any()


@pytest.mark.parametrize(("dtype", "tokens", "experts"), IN_FLOAT32)
def test_other_tokens_one_token_and_one_expert_are_multiplied_in_float32(
    dtype: torch.dtype, tokens: int, experts: int, device: torch.device
) -> None:
    x, weight, dlogits = operands(tokens, 256, experts, device)
    x = x.detach().to(dtype).requires_grad_()
    assert_equal(run(x, weight, dlogits), run(x, weight, dlogits, in_float32))


def test_bfloat16_weight(device: torch.device) -> None:
    """As fully_shard's mixed precision hands it."""
    x, weight, dlogits = operands(1000, 512, 60, device)
    weight = weight.detach().bfloat16().requires_grad_()
    got, want = run(x, weight, dlogits), run(x, weight, dlogits, in_float32)
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for a, b, limit in zip(got, want, (SUMS, 2.0**-9, 2.0**-9), strict=True):
        assert relative_error(a, b) < limit


def test_strided_tokens_and_gradients(device: torch.device) -> None:
    x, weight, dlogits = operands(300, 256, 24, device)
    wide = torch.randn(300, 512, device=device).bfloat16()
    for view in (wide[:, ::2], wide[:, 100:356], wide.t()[:300, :256]):
        strided = view.detach().requires_grad_()
        dense = view.contiguous().requires_grad_()
        for got, want in zip(
            run(strided, weight, dlogits), run(dense, weight, dlogits), strict=True
        ):
            assert relative_error(got, want) < 2.0**-8
    for d in (dlogits.t().contiguous().t(), torch.ones((), device=device).expand(300, 24)):
        assert_equal(run(x, weight, d), run(x, weight, d.contiguous()))


# ---- what it saves ------------------------------------------------------------------------------


@RULES
def test_no_copy_of_x_is_saved(rule: RoutingRule, device: torch.device) -> None:
    router = Router(1024, 64, 8, rule, device=device)
    x = torch.randn(512, 1024, device=device).bfloat16().requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        routing = router(x)
        loss = routing.topk_weights.sum() + router.balancing_loss(routing)
    large = [t for t in saved if t.numel() >= x.numel()]
    assert {t.data_ptr() for t in large} == {x.data_ptr()}
    loss.backward()
    assert x.grad is not None
    assert router.weight.grad is not None
    assert router.weight.grad.dtype == torch.float32


# ---- where it runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [60, 256])
def test_compiled(experts: int, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(router_logits, fullgraph=True)
    for tokens in (512, 300):
        given = operands(tokens, 1024, experts, device)
        for got, want in zip(run(*given, compiled), run(*given), strict=True):
            assert relative_error(got, want) < (2.0**-9 if got.dtype == torch.bfloat16 else SUMS)


@RULES
def test_compiled_router(rule: RoutingRule, device: torch.device) -> None:
    torch._dynamo.reset()
    router = Router(1024, 256, 8, rule, device=device)
    x = torch.randn(512, 1024, device=device).bfloat16().requires_grad_()

    def step(x: Tensor) -> tuple[Routing, Tensor]:
        routing = router(x)
        return routing, router.balancing_loss(routing)

    (got, got_loss), (want, want_loss) = torch.compile(step, fullgraph=True)(x), step(x)
    same = (got.topk_idx == want.topk_idx).all(dim=1)
    assert same.float().mean() > 0.99  # all but near ties
    torch.testing.assert_close(got.topk_weights[same], want.topk_weights[same])
    torch.testing.assert_close(got_loss, want_loss, rtol=1e-3, atol=0)
    (got.topk_weights.square().sum() + got_loss).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_router_chooses_what_the_cpu_does(device: torch.device) -> None:
    router = Router(1024, 256, 8, V3)
    assert router.selection_bias is not None
    router.selection_bias.normal_(std=0.01)
    x = torch.randn(2000, 1024).bfloat16()
    want, got = router(x), router.to(device)(x.to(device))
    same = (got.topk_idx.cpu() == want.topk_idx).all(dim=1)
    assert same.float().mean() > 0.99
    torch.testing.assert_close(
        got.topk_weights.cpu()[same], want.topk_weights[same], rtol=1e-4, atol=0
    )
    assert int(got.tokens_per_expert.sum()) == 16_000


@RULES
def test_of_equals_the_lower_expert_wins(rule: RoutingRule, device: torch.device) -> None:
    for experts, top_k in ((64, 8), (256, 8), (1024, 32)):
        router = Router(64, experts, top_k, rule, device=device)
        with torch.no_grad():
            router.weight.zero_()
        x = torch.randn(300, 64, device=device).bfloat16()
        assert (router(x).topk_idx == torch.arange(top_k, device=device)).all()


def test_in_a_graph(device: torch.device) -> None:
    x, weight, dlogits = given = operands(512, 1024, 60, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*given)
    for _ in range(2):
        with torch.no_grad():
            for t in given:
                t.normal_()
        graph.replay()
        assert_equal(captured, run(x, weight, dlogits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype, device: torch.device) -> None:
    given = operands(300, 256, 24, device)
    want = run(*given)
    with torch.autocast("cuda", dtype):
        got = run(*given)  # its backward too
    assert_equal(got, want)


def test_checkpoint_and_vjp(device: torch.device) -> None:
    x, weight, dlogits = given = operands(300, 256, 24, device)
    want = run(*given)
    assert_equal(run(*given, lambda *a: checkpoint(router_logits, *a, use_reentrant=False)), want)
    logits, vjp = torch.func.vjp(router_logits, x.detach(), weight.detach())
    assert_equal([logits, *vjp(dlogits)], want)


@pytest.mark.parametrize("needed", ["x", "weight"])
def test_one_gradient_alone(needed: str, device: torch.device) -> None:
    x, weight, dlogits = operands(300, 256, 24, device)
    _, dx, dweight = run(x, weight, dlogits)
    leaf, other, want = (x, weight, dx) if needed == "x" else (weight, x, dweight)
    other.requires_grad_(False)
    (got,) = torch.autograd.grad(router_logits(x, weight), leaf, dlogits)
    assert torch.equal(got, want)
