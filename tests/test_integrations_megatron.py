"""integrations.megatron: the call sites of a token dispatcher, against loops and autograd."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import reference_te as ref
from fp8moe_cutlass import ops
from fp8moe_cutlass.integrations import megatron

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
T, E, H = 41, 5, 32

pytestmark = pytest.mark.parametrize("device", DEVICES)


def leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("count_given", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("align", [0, 16])
def test_there_and_back(
    device: str, fused: bool, align: int, count_given: bool, with_probs: bool
) -> None:
    """permute, weight the rows, unpermute, and every gradient; bf16 x, f32 probs."""
    mask = ref.random_mask(T, E)
    counts = mask.sum(0)
    x = leaf(torch.randn(T, H).to(device, torch.bfloat16))
    probs = torch.rand(T, E)
    probs[6] = 0.0
    probs = leaf(probs.to(device))
    padded = fused and align > 0 and with_probs
    rows = ref.rows_of(mask, align if padded else 1)

    result = megatron.permute(
        x,
        mask.to(device),
        probs=probs if with_probs else None,
        num_out_tokens=int(mask.sum()) if count_given else None,
        fused=fused,
        tokens_per_expert=counts,
        align_size=align,
    )
    assert len(result) == 5
    y, row_probs, row_id_map, pad_offsets, after = result
    ref.check_row_id_map(row_id_map, rows)
    keep = rows.gather_probs(probs.cpu()) != 0 if fused and with_probs else rows.valid
    assert torch.equal(y.cpu(), rows.gather(x.detach().cpu()) * keep[:, None])
    assert (row_probs is not None) == with_probs
    assert (pad_offsets is not None) == padded
    assert after is counts if not padded else after.tolist() == rows.target.tolist()

    weighted = y if row_probs is None else y * row_probs[:, None].to(y.dtype)
    out = megatron.unpermute(
        weighted, row_id_map, x.shape, routing_map=mask, fused=fused, pad_offsets=pad_offsets
    )
    dout = torch.randn(T, H).to(out)
    out.backward(dout)
    x64, probs64 = leaf(x.cpu().double()), leaf(probs.cpu().double())
    y64 = rows.gather(x64)
    if with_probs:
        y64 = y64 * rows.gather_probs(probs64)[:, None]
    out64 = rows.sum(y64)
    out64.backward(dout.cpu().double())
    how = {"rtol": 2.0**-6, "atol": 2.0**-5}
    torch.testing.assert_close(out.detach().cpu().double(), out64.detach(), **how)
    torch.testing.assert_close(x.grad.cpu().double(), x64.grad, **how)
    if with_probs:
        kept = torch.ones(T, dtype=torch.bool)
        kept[6] = not fused  # rows zeroed for their prob have no gradient of it
        grad = probs.grad.cpu().double()
        torch.testing.assert_close(grad[kept], probs64.grad[kept], rtol=2.0**-5, atol=0.2)
        assert not grad[~kept].any()


def test_unpermute_with_probs(device: str) -> None:
    """probs at the end, as without fused SwiGLU; a map that lost its plan in a copy."""
    mask = ref.random_mask(T, E)
    rows = ref.rows_of(mask)
    probs = leaf(torch.rand(T, E).to(device))
    y, _, row_id_map, _, _ = megatron.permute(
        torch.randn(T, H, device=device), mask.to(device), num_out_tokens=len(rows.token)
    )
    for a_map in (row_id_map, row_id_map.clone()):
        probs.grad = None
        out = megatron.unpermute(y, a_map, (T, H), probs=probs, routing_map=mask.to(device))
        probs64 = leaf(probs.cpu().double())
        out64 = rows.sum(y.cpu().double(), probs64)
        torch.testing.assert_close(out.detach().cpu().double(), out64.detach())
        out.sum().backward()
        out64.sum().backward()
        torch.testing.assert_close(probs.grad.cpu().double(), probs64.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_drop_and_pad(device: str, fused: bool) -> None:
    """Every expert at its capacity, some of its tokens with probability 0: their rows come along,
    as Megatron gathers them. Reference: the first `capacity` of each expert's tokens."""
    capacity = 6
    mask = torch.zeros(T, E, dtype=torch.bool)
    for e in range(E):
        mask[torch.randperm(T)[:capacity], e] = True
    probs = torch.rand(T, E) * mask
    probs[mask.nonzero()[0, 0]] = 0.0
    token = torch.cat([mask[:, e].nonzero().flatten() for e in range(E)])
    expert = torch.arange(E).repeat_interleave(capacity)
    x = torch.randn(T, H)
    y, row_probs, row_id_map, _, _ = megatron.permute(
        *(x.to(device), mask.to(device), probs.to(device)),
        num_out_tokens=E * capacity,
        fused=fused,
        drop_and_pad=True,
    )
    kept = (probs[token, expert] != 0) if fused else torch.ones(E * capacity, dtype=torch.bool)
    assert torch.equal(y.cpu(), x[token] * kept[:, None])
    assert torch.equal(row_probs.cpu(), probs[token, expert])
    out = megatron.unpermute(
        *(y, row_id_map, (T, H)),
        probs=probs.to(device),
        routing_map=mask.to(device),
        fused=fused,
        drop_and_pad=True,
    )
    want = torch.zeros(T, H, dtype=torch.float64)
    want.index_add_(0, token, x[token].double() * probs[token, expert, None])
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-6, atol=1e-6)


def test_chunks(device: str) -> None:
    x, probs = torch.randn(12, H, device=device), torch.rand(12, device=device)
    sizes, order = torch.tensor([3, 4, 5]), torch.tensor([2, 0, 1])
    want = torch.cat([x.split([3, 4, 5])[i] for i in (2, 0, 1)])
    out, none = megatron.sort_chunks_by_idxs(x, sizes, order, fused=True)
    assert none is None
    assert torch.equal(out, want)
    out, out_probs = megatron.sort_chunks_by_idxs(x, sizes, order, probs)
    assert torch.equal(out, want)
    assert torch.equal(out_probs, torch.cat([probs.split([3, 4, 5])[i] for i in (2, 0, 1)]))
    for given in (None, probs):
        with pytest.raises(ValueError, match="sum to the 12 rows"):
            megatron.sort_chunks_by_idxs(x, sizes - 1, order, given)


def test_fp8(device: str) -> None:
    """A token count that is no multiple of 4, padded, with probs."""
    mask = ref.random_mask(T, E)
    rows = ref.rows_of(mask, 16)
    q = ops.quantize(torch.randn(T, 256, device=device))
    y, row_probs, _, _, _ = megatron.permute(
        q,
        mask.to(device),
        torch.ones(T, E, device=device),
        fused=True,
        tokens_per_expert=mask.sum(0),
        align_size=16,
    )
    assert torch.equal(y.dequantize("float32").cpu(), rows.gather(q.dequantize("float32").cpu()))
    assert torch.equal(row_probs.cpu(), rows.valid.float())


def test_nothing_routed_and_what_is_refused(device: str) -> None:
    x = torch.randn(4, H, device=device)
    mask = torch.zeros(4, 3, dtype=torch.bool, device=device)
    y, _, row_id_map, _, _ = megatron.permute(x, mask)
    assert y.shape == (0, H)
    assert not megatron.unpermute(y, row_id_map, (4, H)).any()
    with pytest.raises(ValueError, match="batch-invariant"):
        megatron.permute(x, mask, return_batch_invariant_inverse_map=True)


def test_without_megatron(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    monkeypatch.delitem(sys.modules, f"{megatron.__name__}.spec", raising=False)
    with pytest.raises(ImportError, match=r"\[megatron\] swap needs megatron-core"):
        _ = megatron.swap
