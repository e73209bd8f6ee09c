"""autograd.experts over rows that came grouped by expert, against the block that groups them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe, ops
from fp8moe_cutlass.autograd import Grouped, Options, bf16, experts, fp8
from host_copies import HostCopies
from moe_problem import Problem, problem, unaligned

OPTIONS: dict[str, Options] = {
    "default": Options(),
    "column": Options(Fp8Recipe(columns="column", grad_dtype="e5m2")),
    "fp32": Options(Fp8Recipe(scale="fp32", columns="column")),
    "recompute": Options(preactivation="recompute"),
    "fp8_z": Options(preactivation="save_fp8"),
    "weighted_output": Options(Fp8Recipe(weighting="output")),
    "transposes": Options(transposed_weights="recompute"),
    "bf16": Options(None),
    "bf16_recompute": Options(None, preactivation="recompute"),
}


def run(p: Problem, x: Tensor, probs: Tensor | None, dout: Tensor, *how: Any) -> list[Any]:
    """out, dx, dprobs and both weight gradients."""
    topk_idx, options, move = how
    leaves = [
        None if t is None else t.clone().requires_grad_() for t in (x, probs, p.gate_up, p.down)
    ]
    out = experts(leaves[0], topk_idx, *leaves[1:], options, move=move)
    out.backward(dout)
    return [out.detach(), *(None if t is None else t.grad for t in leaves)]


def grouped(p: Problem, options: Options) -> tuple[Any, Tensor]:
    """The move of the problem's rows, and the assignment of each row."""
    groups = bf16.make_plan(p.topk_idx, len(p.down))
    rows = int((p.topk_idx >= 0).sum())
    counts = torch.bincount(p.topk_idx[p.topk_idx >= 0], minlength=len(p.down))
    if options.recipe is None:
        return Grouped(counts), groups.order[:rows]
    plan = ops.plan_from_counts(counts.int(), capacity=rows)
    return Grouped(plan), groups.order[:rows]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("routing", ["any", "one expert takes all", "dropped"])
def test_equals_the_block_that_groups_them(name: str, routing: str) -> None:
    """With one slot a token's sums are its row; bit for bit."""
    options = OPTIONS[name]
    p = problem(150, 1, 5, 208, 144)
    if routing == "one expert takes all":
        p.topk_idx.fill_(3)
    if routing == "dropped":
        p.topk_idx[::7] = -1
    move, order = grouped(p, options)
    want = run(p, p.x, p.probs, p.dout, p.topk_idx, options, None)
    got = run(p, p.x[order], p.probs.flatten()[order], p.dout[order], None, options, move)
    for mine, its in zip(got[:2], want[:2], strict=True):
        assert torch.equal(mine, its[order])
    assert torch.equal(got[2], want[2].flatten()[order])
    for mine, its in zip(got[3:], want[3:], strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("name", ["default", "bf16"])
def test_without_probs(name: str) -> None:
    options = OPTIONS[name]
    p = problem(96, 1, 4)
    p.probs.fill_(1.0)
    move, order = grouped(p, options)
    want = run(p, p.x[order], p.probs.flatten()[order], p.dout[order], None, options, move)
    got = run(p, p.x[order], None, p.dout[order], None, options, move)
    assert got[2] is None
    assert all(torch.equal(a, b) for n, (a, b) in enumerate(zip(got, want, strict=True)) if n != 2)


def test_no_rows() -> None:
    p = problem(0, 1, 3)
    move, _ = grouped(p, Options())
    got = run(p, p.x, p.probs.flatten(), p.dout, None, Options(), move)
    assert got[0].shape == p.x.shape
    assert not got[3].any()


# ---- MoEExperts.forward_rows ---------------------------------------------------------------------


def step_of_rows(layer: Any, p: Problem, order: Tensor, counts: Any, extra: int = 0) -> list[Any]:
    """forward_rows over the problem's rows and `extra` rows of NaN behind them."""
    nan = torch.full((extra, p.x.shape[1]), torch.nan, dtype=p.x.dtype)
    rows = torch.cat([p.x[order], nan]).requires_grad_()
    probs = torch.cat([p.probs.flatten()[order], torch.full((extra,), torch.nan)]).requires_grad_()
    out = layer.forward_rows(rows, counts, probs)
    out.backward(torch.cat([p.dout[order], nan]))
    found = [out.detach(), rows.grad, probs.grad]
    return [t[: len(order)] for t in found] + [w.grad for w in layer.parameters()]


@pytest.mark.parametrize("form", ["list", "tensor", "plan"])
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
@pytest.mark.parametrize("extra", [0, 37])
def test_forward_rows_is_the_block(recipe: Any, form: str, extra: int) -> None:
    """Rows past the counts influence nothing."""
    p = problem(150, 1, 5, 208, 144)
    p.topk_idx[::7] = -1
    p.topk_idx[p.topk_idx == 2] = 4  # an empty expert
    _, order = grouped(p, Options(recipe))
    layer = p.experts(recipe=recipe)
    counts: Any = torch.bincount(p.topk_idx[p.topk_idx >= 0], minlength=5)
    if form == "list":
        counts = counts.tolist()
    if form == "plan":
        counts = ops.plan_from_counts(counts, capacity=len(order) + extra)
    want = p.run(p.experts(recipe=recipe))
    got = step_of_rows(layer, p, order, counts, extra)
    for mine, its in zip(got[:2], (want.out, want.dx), strict=True):
        assert torch.equal(mine, its[order])
    assert torch.equal(got[2], want.dprobs.flatten()[order])
    assert torch.equal(got[3], want.dgate_up)
    assert torch.equal(got[4], want.ddown)


@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize(
    "recipe",
    [Fp8Recipe(), Fp8Recipe(weighting="output"), None],
    ids=["fp8", "weighted_output", "bf16"],
)
@pytest.mark.parametrize("fill", [1.0, torch.nan])
def test_padding_between_experts_influences_nothing(
    recipe: Any, preactivation: str, fill: float
) -> None:
    """Rows that begin at multiples of 16, with anything between them, against rows without."""
    p = problem(90, 1, 5)
    p.topk_idx[p.topk_idx == 2] = 4  # an empty expert
    _, order = grouped(p, Options())
    counts = torch.bincount(p.topk_idx.flatten(), minlength=5)
    want = step_of_rows(p.experts(recipe=recipe), p, order, counts)
    plan = ops.plan_from_counts(counts, capacity=90, align=16)
    at = plan.row_of.flatten().long()

    def spread(t: Tensor) -> Tensor:
        wide = torch.full((plan.rows, *t.shape[1:]), fill, dtype=t.dtype)
        return wide.index_copy(0, at, t)

    layer = p.experts(recipe=recipe, preactivation=preactivation)
    rows = spread(p.x[order]).requires_grad_()
    probs = spread(p.probs.flatten()[order]).requires_grad_()
    out = layer.forward_rows(rows, plan, probs)
    out.backward(spread(p.dout[order]))
    for got, its in zip((out, rows.grad, probs.grad), want[:3], strict=True):
        assert torch.equal(got[at], its)
    assert torch.equal(layer.gate_up_proj.grad, want[3])
    assert torch.equal(layer.down_proj.grad, want[4])


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "of one row": lambda t: t[:1].expand_as(t),
    "of one number": lambda t: t[:1, :1].expand_as(t),
    "transposed": lambda t: t.mT.contiguous().mT,
    "every second column": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "unaligned": unaligned,
}


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", VIEWS)
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_gradients_of_any_strides(recipe: Any, form: str, dtype: torch.dtype, device: str) -> None:
    """As a dense copy of them."""
    p = problem(9, 1, 4).to(device)
    dout = VIEWS[form](p.dout.to(dtype))
    layer = p.experts(recipe=recipe)
    wanted = p.x.to(dtype).requires_grad_(), *layer.parameters()
    out = layer.forward_rows(wanted[0], [3, 0, 5, 1])
    got, want = (
        torch.autograd.grad(out, wanted, d, retain_graph=True) for d in (dout, dout.contiguous())
    )
    assert all(map(torch.equal, got, want))


@DEVICES
@pytest.mark.parametrize("form", VIEWS)
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_no_rows_of_any_strides(recipe: Any, form: str, device: str) -> None:
    """Rows and their gradient, which is of a sum in a rank or microbatch without tokens."""
    p = problem(9, 1, 4).to(device)
    layer = p.experts(recipe=recipe)
    x = VIEWS[form](p.x[:0]).requires_grad_()
    out = layer.forward_rows(x, [0] * 4)
    out.backward(VIEWS[form](p.x[:0]))
    assert out.shape == x.grad.shape == (0, p.x.shape[1])
    assert all(not w.grad.any() for w in layer.parameters())


@DEVICES
@pytest.mark.parametrize("form", ["transposed", "every second column"])
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_rows_and_weights_of_any_strides(recipe: Any, form: str, device: str) -> None:
    p = problem(9, 1, 4).to(device)
    move, _ = grouped(p, Options(recipe))
    leaves = [t.requires_grad_() for t in (p.x, p.gate_up, p.down)]

    def step(view: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x, gate_up, down = map(view, leaves)
        out = experts(x, None, None, gate_up, down, Options(recipe), move=move)
        return [out, *torch.autograd.grad(out, leaves, p.dout)]

    assert all(map(torch.equal, step(VIEWS[form]), step(torch.clone)))


def test_forward_rows_compiled_delayed_and_with_weights() -> None:
    p = problem(96, 1, 4)
    _, order = grouped(p, Options())
    counts = torch.bincount(p.topk_idx.flatten(), minlength=4)
    want = step_of_rows(p.experts(), p, order, counts)
    delayed = p.experts(delay_wgrad=True)
    step_of_rows(delayed, p, order, counts)
    assert delayed.down_proj.grad is None
    delayed.backward_dw()
    assert torch.equal(delayed.down_proj.grad, want[4])
    torch._dynamo.reset()
    layer = p.experts()
    layer.forward_rows = torch.compile(layer.forward_rows, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, step_of_rows(layer, p, order, counts), want))
    given = p.experts()
    weights = given.quantize_weights()
    with torch.no_grad():
        given.down_proj.zero_()
        out = given.forward_rows(p.x[order], counts, p.probs.flatten()[order], weights=weights)
    assert torch.equal(out, want[0])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"rows": torch.zeros(2, 3, 256)}, r"rows must be \[R, H\]; got \(2, 3, 256\)"),
    "hidden": ({"rows": torch.zeros(9, 128)}, r"rows must be \[..., 256\]; got \(9, 128\)"),
    "dtype": ({"rows": torch.zeros(9, 256).double()}, r"rows must be bfloat16.*float64"),
    "experts": ({"counts": [1, 2]}, r"counts must be \[4\] int32 or int64; got \(2,\)"),
    "floats": ({"counts": [1.0, 2.0, 3.0, 3.0]}, r"int32 or int64; got \(4,\), torch.float32"),
    "too many": ({"counts": [4, 4, 4, 4]}, r"at most the 9 rows; got \[4, 4, 4, 4\]"),
    "negative": ({"counts": [-1, 4, 4, 0]}, r"at least 0 .* got \[-1, 4, 4, 0\]"),
    "plan": (
        {"counts": ops.plan_from_counts(torch.tensor([1, 2]), capacity=9)},
        "a plan of 4 experts and 9 rows; got 2 and 9",
    ),
    "probs": ({"probs": torch.zeros(9, 1)}, r"probs must be \[9\] floating point; got \(9, 1\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forward_rows_refuses(name: str) -> None:
    given, message = REFUSED[name]
    call = {"rows": torch.zeros(9, 256), "counts": [3, 0, 5, 1], "probs": None} | given
    with pytest.raises(ValueError, match=rf"\[(MoEExperts|experts)\] .*{message}"):
        problem(8).experts().forward_rows(*call.values())


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_an_id_that_is_no_expert(recipe: Any) -> None:
    p = problem(64)
    p.topk_idx[::5, 1] = -1
    layer = p.experts(recipe=recipe)
    want = layer(p.x, p.topk_idx, p.probs)
    ids = p.topk_idx.masked_fill(p.topk_idx == -1, 4)
    assert torch.equal(layer(p.x, ids, p.probs, no_expert=4), want)
    with pytest.raises(ValueError, match=r"topk_idx must lie in \[-1, 4\); got 4"):
        layer(p.x, ids, p.probs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("body", [fp8, bf16], ids=["fp8", "bf16"])
def test_counts_are_read_before_the_call_returns(body: Any, dtype: torch.dtype) -> None:
    """Of host memory, which may be pinned, a copy is sent; the meta device stands for a GPU."""
    counts = torch.tensor([3, 0, 5, 1], dtype=dtype)
    refused = pytest.raises(ValueError, match="meta") if body is fp8 else contextlib.nullcontext()
    with HostCopies() as copies, refused:  # the operator that follows takes no meta tensor
        body.grouped_plan(counts, torch.empty(9, 256, device="meta"))
    assert copies.read
    assert counts.data_ptr() not in copies.read


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_pinned_counts_may_be_overwritten(recipe: Any) -> None:
    p = problem(96, 1, 4)
    _, order = grouped(p, Options())
    layer = p.experts(recipe=recipe).cuda()
    rows = p.x[order].cuda()
    counts = torch.bincount(p.topk_idx.flatten(), minlength=4).int()
    want = layer.forward_rows(rows, counts.cuda())
    pinned = counts.pin_memory()
    torch.cuda._sleep(100_000_000)  # the copy waits for it
    out = layer.forward_rows(rows, pinned)
    pinned.zero_()
    assert torch.equal(out, want)
