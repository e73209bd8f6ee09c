"""integrations.transformer_engine: maps read as they are, edges, compiled calls, argument kinds."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference_te as ref
from fp8moe_cutlass import ops
from fp8moe_cutlass.integrations import transformer_engine as te
from test_integrations_te import DEVICES, E, H, T, equal, leaf, problem

pytestmark = pytest.mark.parametrize("device", DEVICES)


def test_nothing_is_remembered_of_a_map(device: str) -> None:
    """Other contents written to a map in any way, other pad_offsets, a copy, a saved map: what is
    read is what the map says."""
    mask, x, probs = problem(device)
    other = mask.flip(0)
    given = [te.moe_permute(x.detach(), m.to(device), int(m.sum())) for m in (mask, other)]
    (y, a_map), (_, other_map) = given
    want = te.moe_unpermute(y, other_map)
    a_map.data.copy_(other_map)
    assert torch.equal(te.moe_unpermute(y, a_map), want)
    buffer = io.BytesIO()
    torch.save(a_map, buffer)
    buffer.seek(0)
    assert torch.equal(te.moe_unpermute(y, torch.load(buffer)), want)
    plan = ops.plan_from_row_id_map(other_map, rows=len(y))
    assert torch.equal(te.moe_unpermute(y, a_map, plan=plan), want)

    counts = mask.sum(0)
    pad = te.moe_permute_and_pad_with_probs
    rows, _, padded_map, offsets, _ = pad(x.detach(), probs, mask.to(device), counts, 16)
    assert offsets is not None
    whole = te.moe_unpermute(rows, padded_map, pad_offsets=offsets)
    moved = torch.cat([rows.new_full((1, H), 7.0), rows])
    assert torch.equal(te.moe_unpermute(moved, padded_map, pad_offsets=offsets + 1), whole)


def test_rows_that_inp_does_not_have(device: str) -> None:
    """Refused on the CPU; left out on CUDA, and counted in a plan of one's own."""
    mask, x, _ = problem(device)
    y, row_id_map = te.moe_permute(x.detach(), mask.to(device), int(mask.sum()))
    if device == "cpu":
        with pytest.raises(ValueError, match=r"must name rows in \[0, \d+\); got"):
            te.moe_unpermute(y[:-1], row_id_map)
        return
    short = te.moe_unpermute(y[:-1], row_id_map)
    zeroed = y.clone()
    zeroed[-1] = 0
    assert torch.equal(short, te.moe_unpermute(zeroed, row_id_map))


def test_no_rows_asked_for(device: str) -> None:
    """num_out_tokens=0 with tokens: an empty result, and zeros back."""
    mask, x, probs = problem(device)
    y, row_id_map = te.moe_permute(x, mask.to(device), 0)
    assert y.shape == (0, H)
    y2, row_probs, _ = te.moe_permute_with_probs(x, probs, mask.to(device), 0)
    assert (y2.shape, row_probs.shape) == ((0, H), (0,))
    out = te.moe_unpermute(y, row_id_map, restore_shape=x.shape)
    assert out.shape == x.shape
    assert not out.any()
    (out.sum() + y2.sum() + row_probs.sum()).backward()
    assert not x.grad.any()
    assert not probs.grad.any()


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_probs_of_no_tokens_have_a_gradient(map_type: str, device: str) -> None:
    slots = E if map_type == "mask" else 2
    width = 2 * E + 1
    shape = (0, width) if map_type == "mask" else (0,)
    row_id_map = torch.zeros(shape, dtype=torch.int32, device=device)
    rows, probs = leaf(torch.randn(0, H).to(device)), leaf(torch.rand(0, slots).to(device))
    te.moe_unpermute(rows, row_id_map, probs, map_type=map_type).sum().backward()
    assert rows.grad.shape == (0, H)
    assert probs.grad.shape == (0, slots)


COMPILED: dict[str, Any] = {
    "mask": lambda x, p, m: te.moe_unpermute(*te.moe_permute(x, m, 60), restore_shape=x.shape),
    "index": lambda x, p, m: te.moe_unpermute(
        *te.moe_permute(x, p.topk(2).indices.int(), 0, map_type="index"),
        p.topk(2).values,
        map_type="index",
    ),
    "probs": lambda x, p, m: te.moe_permute_with_probs(x, p, m, 60)[:2],
    "merged": lambda x, p, m: te.moe_unpermute(*te.moe_permute(x, m, 60), p, x.shape),
    "padded": lambda x, p, m: te.moe_permute_and_pad_with_probs(
        x, p, m, m.sum(0), 16, num_out_tokens=60
    )[:2],
    "chunks": lambda x, p, m: te.moe_sort_chunks_by_index_with_probs(
        x, p[:, 0], torch.tensor([2, len(x) - 2]), torch.tensor([1, 0])
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", COMPILED)
def test_compiled(call: str, device: str) -> None:
    """torch.compile breaks its graph there; results and gradients are an eager call's."""
    mask = ref.random_mask(12, E)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        x, probs = leaf(torch.randn(12, H).to(device)), leaf(torch.rand(12, E).to(device))
        torch._dynamo.reset()
        function = torch.compile(COMPILED[call]) if compiled else COMPILED[call]
        made = function(x, probs, mask.to(device))
        made = made if isinstance(made, tuple) else (made,)
        # Of padded rows those past the last expert's are anything.
        kept = [m[: int(mask.sum())] if call in ("probs", "padded") else m for m in made]
        weighted = [k.float() * torch.arange(k.numel(), device=device).view(k.shape) for k in kept]
        torch.stack([w.sum() for w in weighted]).sum().backward()
        results.append([*(k.detach() for k in kept), x.grad, probs.grad])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_numbers_of_any_kind_and_autocast(device: str) -> None:
    """0-d tensors and NumPy integers for counts, bf16 probs, [R, 1] weights, arguments by name."""
    mask, x, probs = problem(device)
    there, n = mask.to(device), int(mask.sum())
    want = te.moe_permute(x, there, n)
    for number in (torch.tensor(n), np.int64(n), mask.sum()):
        got = te.moe_permute(inp=x, routing_map=there, num_out_tokens=number, max_token_num=-1)
        equal(got[0], want[0])
    counts = mask.sum(0)
    padded = te.moe_permute_and_pad_with_probs(x, probs, there, counts, 16)
    again = te.moe_permute_and_pad_with_probs(
        inp=x, probs=probs, routing_map=there, tokens_per_expert=counts.int().to(device),
        align_size=np.int32(16),
    )  # fmt: skip
    equal(again[0], padded[0])
    with torch.autocast(x.device.type, torch.bfloat16):
        equal(te.moe_permute_with_probs(x, probs, there, n)[0], want[0])
        out = te.moe_unpermute(want[0], want[1], probs.bfloat16())
    assert out.dtype == x.dtype
    torch.testing.assert_close(
        out, te.moe_unpermute(want[0], want[1], probs.bfloat16().float()), rtol=0, atol=0
    )
    idx = torch.arange(T, dtype=torch.int32, device=device)[:, None] % E
    rows, index_map = te.moe_permute(x, idx, map_type="index")
    weights = leaf(torch.rand(T, 1).to(device))
    merged = te.moe_unpermute(rows, index_map, weights, map_type="index")
    torch.testing.assert_close(merged, x * weights.to(x.dtype), rtol=0.02, atol=0.02)
    merged.sum().backward()
    assert weights.grad.shape == (T, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_codes_of_one_scale_per_tensor(dtype: torch.dtype, device: str) -> None:
    """What a Float8Tensor holds: every byte moves as it is, bytes that are NaN in any dtype too."""
    mask = ref.random_mask(T, E)
    there, n = mask.to(device), int(mask.sum())
    given = torch.randint(256, (T, 64), dtype=torch.uint8)
    codes = given.to(device).view(dtype)

    def moved(got: Tensor, want: Tensor) -> None:
        assert got.dtype == dtype
        assert torch.equal(got.cpu().view(torch.uint8), want)

    want = torch.cat([given[mask[:, e]] for e in range(E)])
    moved(te.moe_permute(codes, there, n)[0], want)
    rows, probs, _ = te.moe_permute_with_probs(codes, torch.ones(T, E, device=device), there, n)
    moved(rows, want)
    assert torch.equal(probs.cpu(), torch.ones(n))
    idx = mask.to(torch.int32).argmax(1, keepdim=True).to(device)
    by_index = te.moe_permute(codes, idx, map_type="index")[0]
    moved(by_index, given[idx[:, 0].cpu().argsort(stable=True)])
    split, order = torch.tensor([5, T - 5]), torch.tensor([1, 0])
    moved(te.moe_sort_chunks_by_index(codes, split, order), torch.cat([given[5:], given[:5]]))
    with pytest.raises(ValueError, match="a hidden size that is a multiple of 32; got 16"):
        te.moe_permute(codes[:, :16], there, n)
