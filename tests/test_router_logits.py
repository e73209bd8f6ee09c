"""router_logits: its parts bit by bit, and CUDA's path on the CPU, given an mm with out_dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
from fp8moe_cutlass.nn import Router
from gate_problem import IN_FLOAT32, gradients, operands
from reference import relative_error


def split_logits(x: Tensor, weight: Tensor) -> Tensor:
    """What router_logits calls on CUDA."""
    return _RouterLogits.apply(x, weight)


@pytest.fixture
def wide_mm() -> Iterator[None]:
    """aten::mm.dtype, which the CPU does not have: exact products, float64 sums, rounded once."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", lambda a, b, out: (a.double() @ b.double()).to(out), "CPU")
        yield


with_mm = pytest.mark.usefixtures("wide_mm")


def bits(words: Tensor) -> Tensor:
    return words.to(torch.int32).view(torch.float32)


# ---- the parts ----------------------------------------------------------------------------------


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


def test_bfloat16_is_its_own_part() -> None:
    t = torch.randn(3, 5).bfloat16()
    (part,) = _split(t, 3)
    assert part is t


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


# ---- logits and gradients -----------------------------------------------------------------------


@with_mm
@pytest.mark.parametrize(("tokens", "hidden", "experts"), [(64, 96, 12), (33, 7, 2), (1, 1, 60)])
def test_against_float64(tokens: int, hidden: int, experts: int) -> None:
    x, weight, dlogits = operands(tokens, hidden, experts)
    logits, dx, dweight = gradients(split_logits, x, weight, dlogits)
    x64, w64, d64 = x.detach().double(), weight.detach().double(), dlogits.double()
    assert (logits.dtype, dx.dtype, dweight.dtype) == (torch.float32, x.dtype, torch.float32)
    assert relative_error(logits, x64 @ w64.t()) < 1e-7
    assert relative_error(dweight, d64.t() @ x64) < 1e-7
    exact = d64 @ w64
    error = (dx.double() - exact).abs()
    assert (error <= 2.0**-8 * exact.abs() + 2.0**-13 * (d64.abs() @ w64.abs())).all()


@with_mm
@pytest.mark.parametrize("common", [0, 1, 10])
def test_dx_of_products_that_cancel(common: float) -> None:
    """Softmax's dlogits sum to 0, and the rows of weight share a part: dx is what is left."""
    x, weight, dlogits = operands(256, 512, 256)
    p = torch.randn_like(dlogits).softmax(dim=1)
    dlogits = p * (dlogits - (p * dlogits).sum(dim=1, keepdim=True))
    with torch.no_grad():
        weight += common * torch.randn(512) / math.sqrt(3 * 512)
    _, dx, _ = gradients(split_logits, x, weight, dlogits)
    exact = dlogits.double() @ weight.detach().double()
    rounded = relative_error(exact.bfloat16(), exact)
    assert relative_error(dx, exact) < 1.01 * rounded


@with_mm
def test_every_bit_of_weight_and_dlogits_counts() -> None:
    """With one-hot tokens logits and dweight are copies."""
    x = torch.eye(32).bfloat16().requires_grad_()
    weight, dlogits = (
        torch.randn(s) * torch.exp2(torch.randint(-90, 90, s)) for s in [(5, 32), (32, 5)]
    )
    logits, _, dweight = gradients(split_logits, x, weight.requires_grad_(), dlogits)
    assert torch.equal(logits, weight.t())
    assert torch.equal(dweight, dlogits.t())


@with_mm
def test_bfloat16_weight() -> None:
    x, weight, dlogits = operands()
    weight = weight.detach().bfloat16().requires_grad_()
    got = gradients(split_logits, x, weight, dlogits)
    want = gradients(router_logits, x, weight, dlogits)  # the CPU's: in float32
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for name, a, b in zip(("logits", "dx", "dweight"), got, want, strict=True):
        assert relative_error(a, b) < (1e-6 if name == "logits" else 1e-3), name


@with_mm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_may_be_written_in_place(dtype: torch.dtype) -> None:
    x, weight, dlogits = operands()
    weight = weight.detach().to(dtype).requires_grad_()

    def masked(x: Tensor, weight: Tensor) -> Tensor:
        logits = split_logits(x, weight)
        return logits.masked_fill_(dlogits > 0, 0.0)

    _, *want = gradients(split_logits, x, weight, dlogits.clamp(max=0))
    _, *got = gradients(masked, x, weight, dlogits)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@with_mm
def test_no_tokens() -> None:
    x, weight, dlogits = operands(t=0)
    logits, dx, dweight = gradients(split_logits, x, weight, dlogits)
    assert logits.shape == (0, 12)
    assert dx.shape == (0, 96)
    assert dweight.shape == (12, 96)
    assert not dweight.any()


@with_mm
@pytest.mark.parametrize("needed", ["x", "weight"])
def test_one_gradient_alone(needed: str) -> None:
    x, weight, dlogits = operands()
    _, dx, dweight = gradients(split_logits, x, weight, dlogits)
    leaf, other, want = (x, weight, dx) if needed == "x" else (weight, x, dweight)
    other.requires_grad_(False)
    (got,) = torch.autograd.grad(split_logits(x, weight), leaf, dlogits)
    assert torch.equal(got, want)


@with_mm
def test_only_x_and_weight_are_saved() -> None:
    x, weight, _ = operands()
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.data_ptr()) or t, lambda t: t
    ):
        split_logits(x, weight)
    assert saved == [x.data_ptr(), weight.data_ptr()]


@with_mm
def test_a_second_derivative_raises() -> None:
    """Also by x and weight alone, where dlogits is a constant, and under torch.func."""
    x, weight, dlogits = operands()
    for leaf, other in ((x, weight), (weight, x)):
        (grad,) = torch.autograd.grad(split_logits(x, weight), leaf, dlogits, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), other)

    def of_x(w: Tensor) -> Tensor:
        return torch.func.grad(lambda v: split_logits(v, w).sum())(x.detach()).sum()

    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(of_x)(weight.detach())


# ---- what it is called in -----------------------------------------------------------------------


@with_mm
def test_compiles_to_the_same_bits() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(split_logits, fullgraph=True, backend="aot_eager")
    for tokens in (64, 40):
        given = operands(tokens)
        for a, b in zip(gradients(compiled, *given), gradients(split_logits, *given), strict=True):
            assert torch.equal(a, b)


@with_mm
def test_checkpoint_backward_under_autocast_and_vjp() -> None:
    given = x, weight, dlogits = operands()
    _, *want = gradients(split_logits, *given)
    _, *again = gradients(lambda *a: checkpoint(split_logits, *a, use_reentrant=False), *given)
    logits = split_logits(x, weight)
    with torch.autocast("cpu", torch.float16):
        inside = torch.autograd.grad(logits, (x, weight), dlogits)
    _, vjp = torch.func.vjp(split_logits, x.detach(), weight.detach())
    for got in (again, inside, vjp(dlogits)):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_elsewhere_torch_multiplies_in_float32(dtype: torch.dtype) -> None:
    x, weight, dlogits = operands()
    x = x.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logits = router_logits(x, weight)
    got = [logits.detach(), *torch.autograd.grad(logits, (x, weight), dlogits)]
    want = gradients(lambda x, w: F.linear(x.float(), w.float()), x, weight, dlogits)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# ---- which of the two ---------------------------------------------------------------------------


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@with_mm
@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_bfloat16_tokens_meet_parts_of_any_weight(dtype: torch.dtype) -> None:
    x, weight, dlogits = operands()
    weight = weight.detach().to(dtype).requires_grad_()
    logits, dx, dweight = gradients(router_logits, x, weight, dlogits)
    want = gradients(split_logits, x, weight.detach().float().requires_grad_(), dlogits)
    for a, b in zip((logits, dx, dweight), want, strict=True):
        assert torch.equal(a, b.to(a.dtype))
    assert dweight.dtype == dtype


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(("dtype", "tokens", "experts"), IN_FLOAT32)
def test_other_tokens_one_token_and_one_expert_do_not(
    dtype: torch.dtype, tokens: int, experts: int
) -> None:
    x, weight, _ = operands(tokens, e=experts)
    x = x.to(dtype)
    assert torch.equal(router_logits(x, weight), F.linear(x.float(), weight))


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
