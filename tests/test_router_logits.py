"""router_logits by bfloat16 products: parts bit by bit, numbers, what it saves, where it runs.

What CUDA runs is tried on the CPU, too, given an mm with out_dtype, which the CPU does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_module, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fp8moe_cutlass.autograd import router_logits
from fp8moe_cutlass.autograd.router_logits import _RouterLogits, _split
from fp8moe_cutlass.nn import Router, Routing, RoutingRule
from on_device import capture
from reference import relative_error

Product = Callable[[Tensor, Tensor], Tensor]

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


def operands(
    t: int = 64, h: int = 96, e: int = 12, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H] bf16 and weight [E, H] f32, both with gradients; dlogits [T, E] f32."""
    x = torch.randn(t, h, device=device).bfloat16().requires_grad_()
    weight = ((torch.rand(e, h, device=device) * 2 - 1) / math.sqrt(h)).requires_grad_()
    return x, weight, torch.randn(t, e, device=device)


def gradients(f: Product, x: Tensor, weight: Tensor, dlogits: Tensor) -> list[Tensor]:
    """logits of f(x, weight), dx, dweight."""
    logits = f(x, weight)
    return [logits.detach(), *torch.autograd.grad(logits, (x, weight), dlogits)]


def in_float32(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight.float())


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for name, a, b in zip(("logits", "dx", "dweight"), got, want, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def split_logits(x: Tensor, weight: Tensor) -> Tensor:
    """What router_logits calls on CUDA."""
    return _RouterLogits.apply(x, weight)


@pytest.fixture
def product(device: torch.device) -> Iterator[Product]:
    """router_logits on CUDA; on the CPU split_logits over exact products, summed in float64."""
    if device.type == "cuda":
        yield router_logits
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", lambda a, b, out: (a.double() @ b.double()).to(out), "CPU")
        yield split_logits


@pytest.fixture
def whole_sums() -> Iterator[None]:
    """cuBLAS splits no sum into bfloat16 ones."""
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


# ---- the parts ----------------------------------------------------------------------------------


def bits(words: Tensor) -> Tensor:
    return words.to(torch.int32).view(torch.float32)


def test_three_parts_are_the_value() -> None:
    """Every exponent and sign; of the mantissas those next to each cut, and random ones."""
    edges = torch.tensor([0, 1, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x7FFF00])
    mantissas = torch.cat([edges, torch.randint(1 << 23, (2000,))])
    high = torch.cat([torch.arange(255), torch.arange(255) - 256]) << 23  # finite
    values = bits((high[:, None] + mantissas).flatten())
    parts = _split(values, 3)
    assert {p.dtype for p in parts} == {torch.bfloat16}
    lost = (values.double() - sum(p.double() for p in parts)).abs()
    assert not lost[values.abs() >= 2.0**-110].any()
    assert lost.max() < 2.0**-133
    hi, mid, lo = (p.float().abs() for p in parts)
    assert hi.isfinite().all()
    assert (mid <= hi * 2.0**-7).all()
    assert (lo <= mid * 2.0**-7).all()


def test_what_is_not_finite_is_nan() -> None:
    values = bits(torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1]))
    assert not values.isfinite().any()
    hi, mid, lo = _split(values, 3)
    assert (hi.float() + mid.float() + lo.float()).isnan().all()


@pytest.mark.parametrize(
    "t",
    [
        torch.randn(1, 5).t(),
        torch.randn(5, 8)[1:, ::3],
        torch.randn(()).expand(4, 3),
        torch.randn(()).expand(0, 3),
    ],
    ids=["column", "strided", "expanded", "none"],
)
def test_parts_of_any_strides(t: Tensor) -> None:
    hi, mid, lo = _split(t, 3)
    assert torch.equal(lo.float() + mid.float() + hi.float(), t)
    (part,) = _split(t.bfloat16(), 3)  # bfloat16 is its own part
    assert torch.equal(part, t.bfloat16())


# ---- logits and gradients -----------------------------------------------------------------------


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts"),
    [
        *((4096, 7168, 256), (4096, 2048, 128), (1000, 2048, 60), (333, 1023, 7), (5, 64, 2)),
        *((2, 7, 3), (64, 96, 12), (1, 1, 60)),
    ],
)
def test_against_float64(
    product: Product, tokens: int, hidden: int, experts: int, device: torch.device
) -> None:
    if device.type == "cpu" and tokens >= 1000:
        pytest.skip("sizes for a tensor core")
    x, weight, dlogits = operands(tokens, hidden, experts, device)
    logits, dx, dweight = gradients(product, x, weight, dlogits)
    x64, w64, d64 = x.detach().double(), weight.detach().double(), dlogits.double()
    assert (logits.dtype, dx.dtype, dweight.dtype) == (torch.float32, x.dtype, torch.float32)
    limit = SUMS if device.type == "cuda" else 1e-7
    assert relative_error(logits, x64 @ w64.t()) < limit
    assert relative_error(dweight, d64.t() @ x64) < limit
    exact = d64 @ w64
    small = 2.0**-12.9 if device.type == "cuda" else 2.0**-13
    error = (dx.double() - exact).abs()
    assert (error <= 2.0**-8 * exact.abs() + small * (d64.abs() @ w64.abs())).all()
    if tokens >= 1000:
        _, plain, _ = gradients(in_float32, x, weight, dlogits)
        assert relative_error(dx, exact) < 1.02 * relative_error(plain, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 64, 512])
def test_few_tokens_under_torchs_default_flags(tokens: int) -> None:
    """Where cuBLAS splits K: float32 results do not care, bfloat16 ones may be rounded by parts."""
    x, weight, dlogits = operands(tokens, 7168, 256, "cuda")
    logits, dx, dweight = gradients(router_logits, x, weight, dlogits)
    x64, w64, d64 = x.detach().double(), weight.detach().double(), dlogits.double()
    assert relative_error(logits, x64 @ w64.t()) < SUMS
    assert relative_error(dweight, d64.t() @ x64) < SUMS
    assert relative_error(dx, d64 @ w64) < 2.0**-7


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("common", [0, 1, 10])
def test_dx_of_products_that_cancel(product: Product, common: float) -> None:
    """Softmax's dlogits sum to 0, and the rows of weight share a part: dx is what is left."""
    x, weight, dlogits = operands(256, 512, 256)
    p = torch.randn_like(dlogits).softmax(dim=1)
    dlogits = p * (dlogits - (p * dlogits).sum(dim=1, keepdim=True))
    with torch.no_grad():
        weight += common * torch.randn(512) / math.sqrt(3 * 512)
    _, dx, _ = gradients(product, x, weight, dlogits)
    exact = dlogits.double() @ weight.detach().double()
    rounded = relative_error(exact.bfloat16(), exact)
    assert relative_error(dx, exact) < 1.01 * rounded


def test_every_bit_of_weight_and_dlogits_counts(product: Product, device: torch.device) -> None:
    """With one-hot tokens logits and dweight are copies."""
    h, e, octaves = (512, 24, 60) if device.type == "cuda" else (32, 5, 90)
    x = torch.eye(h, device=device).bfloat16().requires_grad_()
    weight, dlogits = (
        (torch.randn(s) * torch.exp2(torch.randint(-octaves, octaves, s))).to(device)
        for s in ((e, h), (h, e))
    )
    logits, _, dweight = gradients(product, x, weight.requires_grad_(), dlogits)
    assert torch.equal(logits, weight.detach().t())
    assert torch.equal(dweight, dlogits.t())


def test_an_infinite_weight_is_nan_in_its_expert_alone(
    product: Product, device: torch.device
) -> None:
    x, weight, dlogits = operands(64, 256, 16, device)
    with torch.no_grad():
        weight[3, 5] = float("inf")
    logits, dx, dweight = gradients(product, x, weight, dlogits)
    bad = torch.arange(16, device=device) == 3
    assert torch.equal(logits.isnan(), bad.expand(64, -1))
    assert torch.equal(dx.isnan(), (torch.arange(256, device=device) == 5).expand(64, -1))
    assert dweight.isfinite().all()


@pytest.mark.gpu
def test_two_runs_are_bit_equal() -> None:
    given = operands(4096, 7168, 256, "cuda")
    assert_equal(gradients(router_logits, *given), gradients(router_logits, *given))


@pytest.mark.parametrize("experts", [1, 60, 256])
def test_no_tokens(product: Product, experts: int, device: torch.device) -> None:
    logits, dx, dweight = gradients(product, *operands(0, 256, experts, device))
    assert logits.shape == (0, experts)
    assert dx.shape == (0, 256)
    assert dweight.shape == (experts, 256)
    assert not dweight.any()


def test_bfloat16_weight(product: Product, device: torch.device) -> None:
    """As fully_shard's mixed precision hands it."""
    x, weight, dlogits = operands(1000, 512, 60, device)
    weight = weight.detach().bfloat16().requires_grad_()
    got, want = (gradients(f, x, weight, dlogits) for f in (product, in_float32))
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for a, b, limit in zip(got, want, (SUMS, 2.0**-9, 2.0**-9), strict=True):
        assert relative_error(a, b) < limit


def test_strided_tokens_and_gradients(product: Product, device: torch.device) -> None:
    x, weight, dlogits = operands(300, 256, 24, device)
    wide = torch.randn(300, 512, device=device).bfloat16()
    for view in (wide[:, ::2], wide[:, 100:356], wide.t()[:300, :256]):
        strided = view.detach().requires_grad_()
        dense = view.contiguous().requires_grad_()
        for got, want in zip(
            *(gradients(product, t, weight, dlogits) for t in (strided, dense)), strict=True
        ):
            assert relative_error(got, want) < 2.0**-8
    for d in (dlogits.t().contiguous().t(), torch.ones((), device=device).expand(300, 24)):
        assert_equal(*(gradients(product, x, weight, t) for t in (d, d.contiguous())))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_may_be_written_in_place(product: Product, dtype: torch.dtype) -> None:
    x, weight, dlogits = operands()
    weight = weight.detach().to(dtype).requires_grad_()

    def masked(x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight).masked_fill_(dlogits > 0, 0.0)

    _, *want = gradients(product, x, weight, dlogits.clamp(max=0))
    _, *got = gradients(masked, x, weight, dlogits)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("needed", ["x", "weight"])
def test_one_gradient_alone(product: Product, needed: str, device: torch.device) -> None:
    x, weight, dlogits = operands(300, 256, 24, device)
    _, dx, dweight = gradients(product, x, weight, dlogits)
    leaf, other, want = (x, weight, dx) if needed == "x" else (weight, x, dweight)
    other.requires_grad_(False)
    (got,) = torch.autograd.grad(product(x, weight), leaf, dlogits)
    assert torch.equal(got, want)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_second_derivative_raises(product: Product) -> None:
    """Also by x and weight alone, where dlogits is a constant, and under torch.func."""
    x, weight, dlogits = operands()
    for leaf, other in ((x, weight), (weight, x)):
        (grad,) = torch.autograd.grad(product(x, weight), leaf, dlogits, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), other)

    def of_x(w: Tensor) -> Tensor:
        return torch.func.grad(lambda v: product(v, w).sum())(x.detach()).sum()

    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(of_x)(weight.detach())


# ---- what it saves ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_only_x_and_weight_are_saved(product: Product) -> None:
    x, weight, _ = operands()
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.data_ptr()) or t, lambda t: t
    ):
        product(x, weight)
    assert saved == [x.data_ptr(), weight.data_ptr()]


@pytest.mark.gpu
@RULES
def test_a_router_saves_no_copy_of_x(rule: RoutingRule) -> None:
    router = Router(1024, 64, 8, rule, device="cuda")
    x = torch.randn(512, 1024, device="cuda").bfloat16().requires_grad_()
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


# ---- what it is called in -----------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_compiles_to_the_same_bits(product: Product) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    for tokens in (64, 40):
        given = operands(tokens)
        assert_equal(gradients(compiled, *given), gradients(product, *given))


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [60, 256])
def test_inductor(experts: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(router_logits, fullgraph=True)
    for tokens in (512, 300):
        given = operands(tokens, 1024, experts, "cuda")
        both = (gradients(f, *given) for f in (compiled, router_logits))
        for got, want in zip(*both, strict=True):
            assert relative_error(got, want) < (2.0**-9 if got.dtype == torch.bfloat16 else SUMS)


@pytest.mark.gpu
@RULES
def test_a_router_by_inductor(rule: RoutingRule) -> None:
    torch._dynamo.reset()
    router = Router(1024, 256, 8, rule, device="cuda")
    x = torch.randn(512, 1024, device="cuda").bfloat16().requires_grad_()

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


def test_checkpoint_vjp_and_autocast(product: Product, device: torch.device) -> None:
    x, weight, dlogits = given = operands(300, 256, 24, device)
    want = gradients(product, *given)
    again = gradients(lambda *a: checkpoint(product, *a, use_reentrant=False), *given)
    assert_equal(again, want)
    logits, vjp = torch.func.vjp(product, x.detach(), weight.detach())
    assert_equal([logits, *vjp(dlogits)], want)
    logits = product(x, weight)
    with torch.autocast(device.type, torch.float16):
        assert_equal([logits, *torch.autograd.grad(logits, (x, weight), dlogits)], want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    given = operands(300, 256, 24, "cuda")
    want = gradients(router_logits, *given)
    with torch.autocast("cuda", dtype):
        got = gradients(router_logits, *given)  # its backward too
    assert_equal(got, want)


@pytest.mark.gpu
def test_in_a_graph() -> None:
    x, weight, dlogits = given = operands(512, 1024, 60, "cuda")
    graph, captured = capture(lambda: gradients(router_logits, *given))
    for _ in range(2):
        with torch.no_grad():
            for t in given:
                t.normal_()
        graph.replay()
        assert_equal(captured, gradients(router_logits, x, weight, dlogits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_on_a_cpu_torch_multiplies_in_float32(dtype: torch.dtype) -> None:
    x, weight, dlogits = operands()
    x = x.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logits = router_logits(x, weight)
    got = [logits.detach(), *torch.autograd.grad(logits, (x, weight), dlogits)]
    assert_equal(got, gradients(in_float32, x, weight, dlogits))


# ---- which of the two ---------------------------------------------------------------------------


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_bfloat16_tokens_meet_parts_of_any_weight(product: Product, dtype: torch.dtype) -> None:
    x, weight, dlogits = operands()
    weight = weight.detach().to(dtype).requires_grad_()
    logits, dx, dweight = gradients(router_logits, x, weight, dlogits)
    want = gradients(product, x, weight.detach().float().requires_grad_(), dlogits)
    for a, b in zip((logits, dx, dweight), want, strict=True):
        assert torch.equal(a, b.to(a.dtype))
    assert dweight.dtype == dtype


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    ("dtype", "tokens", "experts"),
    [
        (torch.float16, 300, 24),
        (torch.float32, 300, 24),
        (torch.bfloat16, 1, 24),
        (torch.bfloat16, 300, 1),
    ],
)
def test_other_tokens_one_token_and_one_expert_are_multiplied_in_float32(
    dtype: torch.dtype, tokens: int, experts: int, device: torch.device
) -> None:
    x, weight, dlogits = operands(tokens, 256, experts, device)
    x = x.detach().to(dtype).requires_grad_()
    got, want = (gradients(f, x, weight, dlogits) for f in (router_logits, in_float32))
    assert_equal(got, want)


def test_a_router_of_dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which have no mm with out_dtype."""
    router = Router(96, 12, 2)
    x, _, _ = operands()
    want = router(x)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        distribute_module(router, mesh)
        tokens = DTensor.from_local(x, mesh, [Replicate()])
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        got = router(tokens)
        assert torch.equal(got.topk_weights.to_local(), want.topk_weights)
    finally:
        dist.destroy_process_group()


# ---- the router over it -------------------------------------------------------------------------


@pytest.mark.gpu
def test_router_chooses_what_the_cpu_does() -> None:
    router = Router(1024, 256, 8, V3)
    assert router.selection_bias is not None
    router.selection_bias.normal_(std=0.01)
    x = torch.randn(2000, 1024).bfloat16()
    want, got = router(x), router.to("cuda")(x.to("cuda"))
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
