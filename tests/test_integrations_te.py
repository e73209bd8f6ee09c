"""integrations.transformer_engine against loops and autograd in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reference_te as ref
from fp8moe_cutlass import Fp8Tensor, ops
from fp8moe_cutlass.integrations import transformer_engine as te
from fp8moe_cutlass.integrations.transformer_engine.row_id_map import repack
from host_copies import HostCopies

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.bfloat16, torch.float32]
T, E, H = 57, 6, 48
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}

pytestmark = pytest.mark.parametrize("device", DEVICES)


def leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


def close(got: Tensor | None, expected: Tensor, dtype: torch.dtype) -> None:
    """`got` is `expected` (float64) summed in float32 and rounded once to dtype."""
    assert got is not None
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.detach().cpu().double(), expected.detach().double(), rtol=ROUNDING[dtype], atol=1e-6
    )


def equal(got: Tensor | None, expected: Tensor) -> None:
    assert got is not None
    assert torch.equal(got.detach().cpu(), expected.detach().cpu().to(got.dtype))


def problem(device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """mask [T, E] bool on the CPU, x [T, H] and probs [T, E] f32 as leaves on the device."""
    mask = ref.random_mask(T, E)
    probs = torch.rand(T, E)
    return mask, leaf(torch.randn(T, H).to(device, dtype)), leaf(probs.to(device))


def test_example_of_the_row_id_map(device: str) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]], device=device)
    x = torch.randn(5, 16, device=device)
    y, row_id_map = te.moe_permute(x, mask, num_out_tokens=7)
    got = row_id_map.tolist()
    for row, (rows, ids) in zip(
        got, [([3, 0], [1, 0]), ([5, 1], [2, 0]), ([6], [2]), ([4, 2], [1, 0]), ([], [])],
        strict=True,
    ):  # fmt: skip
        n = len(rows)
        assert (row[:n], row[3 : 3 + n], row[6]) == (rows, ids, n)
    assert torch.equal(y, x[[0, 1, 3, 0, 3, 1, 2]])


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int8, torch.int32, torch.int64])
def test_permute_by_a_mask(device: str, mask_dtype: torch.dtype) -> None:
    mask, x, _ = problem(device)
    rows = ref.rows_of(mask)
    y, row_id_map = te.moe_permute(x, mask.to(device, mask_dtype), len(rows.token))
    ref.check_row_id_map(row_id_map, rows)
    equal(y, rows.gather(x.cpu()))
    dy = torch.randn(y.shape).to(y)
    y.backward(dy)
    x64 = leaf(x.cpu().double())
    rows.gather(x64).backward(dy.cpu().double())
    close(x.grad, x64.grad, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16])
def test_probs_and_rows_of_prob_0(
    device: str, dtype: torch.dtype, probs_dtype: torch.dtype
) -> None:
    """Rows of prob 0 are zero, and still take part in the gradient of x, as upstream."""
    mask, x, probs = problem(device, dtype)
    zero = torch.rand(T, E) < 0.3
    probs = leaf(torch.where(zero.to(device), 0.0, probs).to(probs_dtype))
    rows = ref.rows_of(mask)
    y, row_probs, row_id_map = te.moe_permute_with_probs(x, probs, mask.to(device), len(rows.token))
    ref.check_row_id_map(row_id_map, rows)
    expected = rows.gather_probs(probs.cpu())
    assert row_probs.dtype == probs_dtype
    equal(row_probs, expected)
    assert 0 < int((expected == 0).sum()) < len(rows.token)
    equal(y, rows.gather(x.cpu()) * (expected != 0)[:, None])

    dy, dp = torch.randn(y.shape).to(y), torch.randn(row_probs.shape).to(row_probs)
    torch.autograd.backward((y, row_probs), (dy, dp))
    x64, probs64 = leaf(x.cpu().double()), leaf(probs.cpu().double())
    torch.autograd.backward(
        (rows.gather(x64), rows.gather_probs(probs64)), (dy.cpu().double(), dp.cpu().double())
    )
    close(x.grad, x64.grad, dtype)
    assert probs.grad is not None
    assert probs.grad.dtype == probs_dtype
    equal(probs.grad, probs64.grad)


def test_gradients_of_one_output_alone(device: str) -> None:
    mask, x, probs = problem(device)
    rows = ref.rows_of(mask)
    for which, none, some in ((0, probs, x), (1, x, probs)):
        x.grad = probs.grad = None
        out = te.moe_permute_with_probs(x, probs, mask.to(device), len(rows.token))
        out[which].float().sum().backward()
        assert none.grad is None or not none.grad.any()
        count = mask.sum(1, keepdim=True).expand(T, H) if which == 0 else mask
        equal(some.grad, count.float())


def test_gradients_from_the_middle_of_a_buffer(device: str) -> None:
    """As autograd cuts them out of the gradient of a cat: nobody chose where they start."""
    mask, x, probs = problem(device)
    y, row_id_map = te.moe_permute(x, mask.to(device), int(mask.sum()))
    out = te.moe_unpermute(y, row_id_map, probs)
    for flat in (y.flatten(), out.flatten()):
        grads = []
        for before in (0, 1):
            x.grad = None
            weights = torch.linspace(-1, 1, flat.numel(), device=device).to(flat)
            joined = torch.cat([flat.new_zeros(before), flat])
            joined.backward(torch.cat([flat.new_ones(before), weights]), retain_graph=True)
            grads.append(x.grad)
        equal(grads[1], grads[0].cpu())


@pytest.mark.parametrize("align", [1, 16, 32, 128])
def test_permute_and_pad(device: str, align: int) -> None:
    """Rows, padding, bookkeeping; the way back with its gradient, with the map's plan or not."""
    mask, x, probs = problem(device)
    rows = ref.rows_of(mask, align)
    counts = mask.sum(0)
    y, row_probs, row_id_map, pad_offsets, target = te.moe_permute_and_pad_with_probs(
        x, probs, mask.to(device), counts, align
    )
    ref.check_row_id_map(row_id_map, rows)
    equal(target, rows.target)
    assert target.dtype == torch.int64
    equal(y, rows.gather(x.cpu()))
    equal(row_probs, rows.gather_probs(probs.cpu()))
    if align == 1:
        assert pad_offsets is None
    else:
        assert pad_offsets is not None
        assert (pad_offsets.dtype, pad_offsets.device) == (torch.int64, y.device)
        equal(pad_offsets, rows.pad_offsets)

    dy, dp = torch.randn(y.shape).to(y), torch.randn(row_probs.shape).to(row_probs)
    torch.autograd.backward((y, row_probs), (dy, dp))
    x64, probs64 = leaf(x.cpu().double()), leaf(probs.cpu().double())
    torch.autograd.backward(
        (rows.gather(x64), rows.gather_probs(probs64)), (dy.cpu().double(), dp.cpu().double())
    )
    close(x.grad, x64.grad, x.dtype)
    equal(probs.grad, probs64.grad)

    for a_map in (row_id_map, row_id_map.clone()):
        for weights in (None, probs.detach()):
            rows_in, w = leaf(dy), None if weights is None else leaf(weights)
            check_unpermute(rows, rows_in, w, a_map, pad_offsets=pad_offsets)


def check_unpermute(rows: ref.Rows, y: Tensor, w: Tensor | None, a_map: Tensor, **how: Any) -> None:
    """moe_unpermute and its gradients against float64; padding rows get a zero gradient."""
    shape = (rows.row_of.shape[0], y.shape[1])
    out = te.moe_unpermute(y, a_map, w, restore_shape=torch.Size(shape), **how)
    y64, w64 = leaf(y.cpu().double()), None if w is None else leaf(w.cpu().double())
    out64 = rows.sum(y64, w64)
    close(out, out64, y.dtype)
    dout = torch.randn(out.shape).to(out)
    out.backward(dout)
    out64.backward(dout.cpu().double())
    close(y.grad, y64.grad, y.dtype)
    assert not y.grad[~rows.valid.to(y.device)].any()
    if w is not None and w64 is not None:
        torch.testing.assert_close(w.grad.cpu().double(), w64.grad, rtol=1e-5, atol=1e-4)
        assert not w.grad.cpu()[rows.row_of < 0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpermute(device: str, dtype: torch.dtype) -> None:
    mask, x, probs = problem(device, dtype)
    rows = ref.rows_of(mask)
    y, row_id_map = te.moe_permute(x.detach(), mask.to(device), len(rows.token))
    foreign = row_id_map.detach().clone()
    unused = torch.arange(E) >= foreign[:, -1:].cpu()  # undefined upstream: anything
    foreign[:, :E][unused] = 12345
    foreign[:, E:-1][unused] = -7
    for a_map in (row_id_map, foreign):
        check_unpermute(rows, leaf(y), None, a_map)
        check_unpermute(rows, leaf(torch.randn(y.shape).to(y)), leaf(probs), a_map)
    with pytest.warns(UserWarning, match="deprecated"):
        old = te.moe_unpermute(y, row_id_map, probs=probs.detach())
    assert torch.equal(old, te.moe_unpermute(y, row_id_map, probs.detach()))


def test_a_map_that_was_written_to_is_read_again(device: str) -> None:
    mask, x, _ = problem(device)
    y, row_id_map = te.moe_permute(x.detach(), mask.to(device), int(mask.sum()))
    row_id_map[:, -1] = 0
    assert not te.moe_unpermute(y, row_id_map).any()


@pytest.mark.parametrize("align", [16, 128])
def test_no_padding_is_none(device: str, align: int) -> None:
    """Counts that are multiples of align already, one expert empty."""
    mask = torch.zeros(128, 3, dtype=torch.bool)
    mask[:, 0] = mask[:align, 2] = True
    x = leaf(torch.randn(128, 32).to(device))
    probs = torch.rand(128, 3, device=device)
    y, _, row_id_map, pad_offsets, target = te.moe_permute_and_pad_with_probs(
        x, probs, mask.to(device), mask.sum(0).to(device), align
    )
    assert pad_offsets is None
    assert target.tolist() == [128, 0, align]
    equal(y, torch.cat([x.cpu(), x.cpu()[:align]]))
    check_unpermute(ref.rows_of(mask, align), leaf(y), leaf(probs), row_id_map)


def test_a_bound_avoids_the_host_read(device: str) -> None:
    """num_out_tokens: the same rows, pad_offsets always there, the most rows that can be needed."""
    mask, x, probs = problem(device)
    rows = ref.rows_of(mask, 16)
    counts, bound = mask.sum(0), T * E
    y, row_probs, row_id_map, pad_offsets, target = te.moe_permute_and_pad_with_probs(
        x, probs, mask.to(device), counts, 16, num_out_tokens=bound
    )
    n = len(rows.token)
    assert y.shape[0] == row_probs.shape[0] == 16 * ((bound + E * 15) // 16) >= n
    ref.check_row_id_map(row_id_map, rows)
    equal(pad_offsets, rows.pad_offsets)
    equal(target, rows.target)
    equal(y[:n], rows.gather(x.cpu()))
    equal(row_probs[:n], rows.gather_probs(probs.cpu()))
    for a_map in (row_id_map, row_id_map.clone()):
        out = te.moe_unpermute(y.detach(), a_map, pad_offsets=pad_offsets)
        close(out, rows.sum(rows.gather(x.cpu().double())), x.dtype)


# ---- FP8 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [57, 58, 59])
@pytest.mark.parametrize("layout", ["row", "gemm"])
def test_fp8_of_any_number_of_tokens(device: str, layout: str, tokens: int) -> None:
    """Codes and scales move; both are zero on padding and for prob 0; probs have a gradient."""
    mask = ref.random_mask(tokens, E)
    rows = ref.rows_of(mask, 16)
    q = ops.quantize(torch.randn(tokens, 336, device=device), scale_layout=layout)
    probs = torch.rand(tokens, E, device=device)
    probs[5] = 0.0
    probs.requires_grad_()
    y, row_probs, row_id_map, _, _ = te.moe_permute_and_pad_with_probs(
        q, probs, mask.to(device), mask.sum(0), 16
    )
    weighted = (rows.gather_probs(probs.cpu()) != 0)[:, None]
    assert y.scale_layout == layout
    check_fp8(y, q, rows, weighted)
    ref.check_row_id_map(row_id_map, rows)
    assert not y.data.requires_grad
    dp = torch.randn_like(row_probs)
    row_probs.backward(dp)
    probs64 = leaf(probs.cpu().double())
    rows.gather_probs(probs64).backward(dp.cpu().double())
    equal(probs.grad, probs64.grad)

    rows = ref.rows_of(mask)
    plain, _ = te.moe_permute(q, mask.to(device), len(rows.token))
    assert plain.scale_layout == layout
    check_fp8(plain, q, rows, rows.valid[:, None])


def check_fp8(y: Fp8Tensor, q: Fp8Tensor, rows: ref.Rows, keep: Tensor) -> None:
    scale = q.to_layout("row").scale_inv.cpu()
    assert torch.equal(y.to_layout("row").scale_inv.cpu(), rows.gather(scale) * keep)
    codes = q.data.view(torch.uint8).cpu()
    assert torch.equal(y.data.view(torch.uint8).cpu(), rows.gather(codes) * keep)


def test_fp8_is_no_edge_and_no_sum(device: str) -> None:
    q = ops.quantize(torch.randn(8, 128, device=device))
    mask = torch.ones(8, 2, dtype=torch.bool, device=device)
    y, row_id_map = te.moe_permute(q, mask, 16)
    with pytest.raises(ValueError, match="dequantize"):
        te.moe_unpermute(y, row_id_map)  # type: ignore[arg-type]
    wrong = Fp8Tensor(q.data, q.scale_inv.requires_grad_())
    with pytest.raises(ValueError, match="no gradient"):
        te.moe_permute(wrong, mask, 16)


# ---- index maps ---------------------------------------------------------------------------------


def index_rows(idx: Tensor, limit: int) -> Tensor:
    """[T, K] row of each assignment, -1 from `limit` on: by expert, then token, then slot."""
    order = sorted((e, i) for i, e in enumerate(idx.flatten().tolist()) if e >= 0)
    row_of = torch.full((idx.numel(),), -1)
    for row, (_, i) in enumerate(order[:limit]):
        row_of[i] = row
    return row_of.view(idx.shape)


@pytest.mark.parametrize("limit", [0, 90])
@pytest.mark.parametrize("slots", [1, 3])
def test_index_map(device: str, slots: int, limit: int) -> None:
    """The map's content, dropping past num_out_tokens, merging with probs and every gradient."""
    _, x, _ = problem(device)
    idx = torch.rand(T, E).topk(slots).indices
    idx[2, 0] = -1
    limit = min(limit, idx.numel() // 2 + 10)
    row_of = index_rows(idx, limit or idx.numel())
    y, row_id_map = te.moe_permute(x, idx.int().to(device), limit, map_type="index")
    assert y.shape[0] == (limit or idx.numel())
    assert row_id_map.dtype == torch.int32
    equal(row_id_map, row_of.t().flatten())
    kept = row_of >= 0
    expected = torch.zeros(int(kept.sum()), H)
    expected[row_of[kept]] = x.detach().cpu().float()[kept.nonzero()[:, 0]]
    equal(y[: len(expected)], expected)

    dy = torch.randn(y.shape).to(y)
    y.backward(dy)
    weights = torch.zeros(T, slots, len(y), dtype=torch.float64)
    weights[kept] = torch.eye(len(y), dtype=torch.float64)[row_of[kept]]
    close(x.grad, weights.sum(1) @ dy.cpu().double(), x.dtype)

    for a_map in (row_id_map, row_id_map.clone()):
        rows_in, w = leaf(dy), leaf(torch.rand(T, slots).to(device))
        out = te.moe_unpermute(rows_in, a_map, w, map_type="index")
        y64, w64 = leaf(dy.cpu().double()), leaf(w.cpu().double())
        out64 = torch.einsum("tkr,tk,rh->th", weights, w64, y64)
        close(out, out64, x.dtype)
        dout = torch.randn(out.shape).to(out)
        out.backward(dout)
        out64.backward(dout.cpu().double())
        n = len(expected)
        close(rows_in.grad[:n], y64.grad[:n], x.dtype)
        torch.testing.assert_close(w.grad.cpu().double(), w64.grad, rtol=1e-5, atol=1e-4)
        # Without probs nothing is merged: K*T tokens of one row each.
        split = te.moe_unpermute(dy, a_map, map_type="index")
        want = torch.cat([dy.cpu(), torch.zeros(1, H, dtype=dy.dtype)])[row_of.t().flatten()]
        equal(split, want)


# ---- chunks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_cpu", [False, True])
def test_sort_chunks(device: str, on_cpu: bool) -> None:
    """Chunks of sizes 0, 1 and more; the gradient puts them back."""
    sizes, order = torch.tensor([5, 0, 17, 1, 9]), torch.tensor([3, 2, 0, 4, 1])
    where = "cpu" if on_cpu else device
    x, probs = leaf(torch.randn(32, H).to(device)), leaf(torch.rand(32).to(device))
    out, out_probs = te.moe_sort_chunks_by_index_with_probs(
        x, probs, sizes.to(where), order.to(where)
    )
    index = torch.cat([torch.arange(32).split(sizes.tolist())[i] for i in order.tolist()])
    equal(out, x.cpu()[index])
    equal(out_probs, probs.cpu()[index])
    assert torch.equal(te.moe_sort_chunks_by_index(x, sizes.to(where), order.to(where)), out)
    dy, dp = torch.randn(32, H).to(device), torch.randn(32).to(device)
    torch.autograd.backward((out, out_probs), (dy, dp))
    equal(x.grad[index], dy.cpu())
    equal(probs.grad[index], dp.cpu())
    q = ops.quantize(x.detach())
    moved = te.moe_sort_chunks_by_index(q, sizes.to(where), order.to(where))
    equal(moved.scale_inv, q.scale_inv.cpu()[index])
    equal(moved.dequantize("float32"), q.dequantize("float32").cpu()[index])


def test_sizes_of_chunks_are_read_before_the_call_returns(device: str) -> None:
    """Pinned memory may be overwritten: of host memory a copy is sent."""
    sizes, order = torch.tensor([5, 0, 27]), torch.tensor([2, 0, 1])
    if device == "cpu":  # what a GPU would read, by the meta device
        with HostCopies() as copies, pytest.raises(ValueError, match="meta"):
            te.moe_sort_chunks_by_index(torch.empty(32, H, device="meta"), sizes, order)
        assert len(copies.read) == 2
        assert not {sizes.data_ptr(), order.data_ptr()} & {*copies.read}
        return
    x = torch.randn(32, H, device=device)
    want = te.moe_sort_chunks_by_index(x, sizes.to(device), order.to(device))
    pinned = sizes.pin_memory(), order.pin_memory()
    torch.cuda._sleep(100_000_000)  # the copies wait for it
    out = te.moe_sort_chunks_by_index(x, *pinned)
    for t in pinned:
        t.zero_()
    assert torch.equal(out, want)


# ---- edges --------------------------------------------------------------------------------------


def test_no_tokens(device: str) -> None:
    x, probs = leaf(torch.randn(0, H).to(device)), leaf(torch.rand(0, E).to(device))
    mask = torch.zeros(0, E, dtype=torch.bool, device=device)
    y, row_id_map = te.moe_permute(x, mask, 4)
    y2, row_probs, map2 = te.moe_permute_with_probs(x, probs, mask, 4)
    counts = torch.zeros(E, dtype=torch.int64)
    y3, probs3, map3, pads, target = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16)
    assert y.shape == y2.shape == y3.shape == (0, H)
    assert row_probs.shape == probs3.shape == (0,)
    assert pads is None
    assert not target.any()
    for a_map in (row_id_map, map2, map3):
        assert te.moe_unpermute(y, a_map, restore_shape=(0, H)).shape == (0, H)
    te.moe_unpermute(y3, map3, probs).sum().backward()
    assert x.grad is not None
    idx = torch.zeros(0, 2, dtype=torch.int32, device=device)
    y4, map4 = te.moe_permute(x, idx, 0, map_type="index")
    assert te.moe_unpermute(y4, map4, map_type="index").shape == (0, H)
    one = torch.tensor([0])
    assert te.moe_sort_chunks_by_index(x, one, one).shape == (0, H)
    for layout in ("row", "gemm"):
        q = ops.quantize(x.detach(), scale_layout=layout)
        for moved in (
            te.moe_permute(q, mask, 4)[0],
            te.moe_permute(q, idx, map_type="index")[0],
            te.moe_sort_chunks_by_index(q, one, one),
        ):
            assert moved.scale_layout == layout
            assert moved.scale_inv.shape == ((0, 1) if layout == "row" else (1, 0))


def test_every_token_dropped(device: str) -> None:
    x, probs = leaf(torch.randn(9, H).to(device)), leaf(torch.rand(9, E).to(device))
    mask = torch.zeros(9, E, dtype=torch.bool, device=device)
    y, row_probs, row_id_map, pads, _ = te.moe_permute_and_pad_with_probs(
        x, probs, mask, mask.sum(0), 16
    )
    assert y.shape == (0, H)
    assert pads is None
    out = te.moe_unpermute(y, row_id_map, restore_shape=(9, H))
    equal(out, torch.zeros(9, H))
    torch.autograd.backward((out, row_probs), (torch.ones_like(out), row_probs.detach()))
    equal(x.grad, torch.zeros(9, H))


def test_refusals(device: str) -> None:
    mask, x, probs = problem(device)
    gpu_mask, n = mask.to(device), int(mask.sum())
    counts = mask.sum(0)

    def refused(match: str, call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=match):
            call(*args, **kwargs)

    pad = te.moe_permute_and_pad_with_probs
    refused("num_out_tokens must be given", te.moe_permute, x, gpu_mask)
    refused("map_type must be", te.moe_permute, x, gpu_mask, n, map_type="rows")
    refused("a row a token", te.moe_permute, x[:5], gpu_mask, n)
    refused("tokens_per_expert is required", pad, x, probs, gpu_mask, None, 16)
    refused("probs is required", pad, x, None, gpu_mask, counts, 16)
    refused("probs is required", te.moe_permute_with_probs, x, None, gpu_mask, n)
    refused("align_size must be 1, 16, 32 or 128; got 0", pad, x, probs, gpu_mask, counts, 0)
    refused("column sums", pad, x, probs, gpu_mask, counts + 1, 16)
    with_probs, wide = te.moe_permute_with_probs, probs.double()
    refused(r"\[moe_permute_with_probs\] probs must be float32", with_probs, x, wide, gpu_mask, n)
    refused(r"multiple of 16; got 40", te.moe_permute, x[:, :40], gpu_mask, n)
    y, row_id_map = te.moe_permute(x, gpu_mask, n)
    refused("restore_shape must be", te.moe_unpermute, y, row_id_map, restore_shape=(T + 1, H))
    refused(r"pad_offsets must be \[6\]", te.moe_unpermute, y, row_id_map, pad_offsets=counts[:3])
    refused("map_type 'index'", te.moe_unpermute, y, row_id_map, map_type="index")
    refused("old name", te.moe_unpermute, y, row_id_map, probs, probs=probs)
    idx = torch.zeros(T, 1, dtype=torch.int32, device=device)
    y, row_id_map = te.moe_permute(x, idx, map_type="index")
    offsets = torch.zeros(E, dtype=torch.int64, device=device)
    refused("map_type 'mask'", te.moe_unpermute, y, row_id_map)
    for wrong in (probs[:, 0], probs[:, :2], probs[1:, :1]):
        refused(r"must be \[T, K\]", te.moe_unpermute, y, row_id_map, wrong, map_type="index")
    sizes = torch.tensor([T, 0, 0])
    refused(r"must both be \[C\]", te.moe_sort_chunks_by_index, x, sizes, sizes[:2])
    sort = te.moe_sort_chunks_by_index_with_probs
    refused(r"index_with_probs\] split_sizes and", sort, x, probs[:, 0], sizes, sizes[:2])
    refused("probs is required", sort, x, None, sizes, sizes)
    refused("never padded", te.moe_unpermute, y, row_id_map, map_type="index", pad_offsets=offsets)
    order = torch.arange(3)
    for wrong in (torch.tensor([T, 1, 0]), torch.tensor([-1, T, 1]), torch.tensor([T - 1, 0, 0])):
        refused(f"sum to the {T} rows", te.moe_sort_chunks_by_index, x, wrong, order)
        refused(f"sum to the {T} rows", sort, x, probs[:, 0], wrong, order)
    refused("sum to the 0 rows", te.moe_sort_chunks_by_index, x[:0], sizes, order)
    refused("sum to the 0 rows", sort, x[:0], probs[:0, 0], sizes, order)
    for wrong in (order - 1, order + 1, order // 2):
        refused("must be a permutation", te.moe_sort_chunks_by_index, x, sizes, wrong)
    if device == "cpu":
        refused("dropped because the capacity", te.moe_permute, x, gpu_mask, n - 1)


def test_gradient_of_the_probs_alone_under_another_default_dtype(device: str) -> None:
    mask, x, probs = problem(device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        n = int(mask.sum())
        te.moe_permute_with_probs(x, probs, mask.to(device), n)[1].sum().backward()
    finally:
        torch.set_default_dtype(before)
    equal(probs.grad, mask.float())


@pytest.mark.parametrize("align", [1, 16, 128])
def test_a_repacked_plan_keeps_what_is_used(align: int, device: str) -> None:
    """Every section of the plan for exactly the rows in use: what is left out is past them."""
    for tokens, experts, slots in ((0, 3, 2), (57, 5, 2), (300, 9, 3)):
        ids = torch.rand(tokens, experts).topk(slots, dim=-1).indices
        ids[torch.rand(ids.shape) < 0.2] = -1
        plan = ops.route(experts, topk_idx=ids.to(device), align=align)
        rows = int(plan.row_offsets[-1])
        packed = repack(plan, rows)
        assert packed.rows == rows
        for name in ("status", "tokens_per_expert", "row_offsets", "col_offsets", "row_of"):
            assert torch.equal(getattr(packed, name), getattr(plan, name)), name
        for name in ("token_of_row", "slot_of_row"):
            assert torch.equal(getattr(packed, name), getattr(plan, name)[:rows]), name
        used = int(plan.col_offsets[-1]) // 128
        assert torch.equal(packed.col_blocks[:used], plan.col_blocks[:used])
        assert packed.col_blocks[used:].tolist() == [[0, 0, 0, -1]] * (packed.columns // 128 - used)
