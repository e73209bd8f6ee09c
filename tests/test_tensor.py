"""Fp8Tensor as a torch user meets it: what it refuses, rows, moves, files and its words."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe, Fp8Tensor, autograd, nn, ops

E4M3 = torch.float8_e4m3fn
BYTES = np.zeros((4, 128), np.uint8)


def same(a: Fp8Tensor, b: Fp8Tensor) -> bool:
    kinds = [(t.scale_layout, t.pow2, t.fp8_dtype) for t in (a, b)]
    codes = [t.data.view(torch.uint8) for t in (a, b)]
    return kinds[0] == kinds[1] and torch.equal(*codes) and torch.equal(a.scale_inv, b.scale_inv)


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=E4M3)


@pytest.mark.parametrize(
    ("data", "scales", "how", "message"),
    [
        (codes(4, 128), torch.ones(9, 9), {}, r"scale_inv must be \[4, 1\] in row layout of data"),
        (codes(5, 130), torch.ones(2, 5), {"scale_layout": "gemm"}, r"must be \[2, 8\] in gemm"),
        (codes(3, 128, 130), torch.ones(3, 1, 1), {"scale_layout": "block"}, r"be \[3, 1, 2\]"),
        (codes(4, 128), torch.ones(4, 1).double(), {}, "scale_inv must be float32; got .*float64"),
        (codes(4, 128), torch.ones(4, 1, device="meta"), {}, "on data's device cpu; got meta"),
        (codes(4, 128), None, {}, "scale_inv must be float32; got None"),
        (None, torch.ones(4, 1), {}, "data must be float8_e4m3fn or float8_e5m2, .*; got None"),
        (torch.zeros(4, 128), torch.ones(4, 1), {}, "data must be float8_e4m3fn .*; got float32"),
        (torch.zeros(4, 128), torch.ones(4, 1), {"fp8_dtype": "e4m3"}, "or uint8 .*; got float32"),
        (np.zeros((4, 128)), np.ones((4, 1)), {"fp8_dtype": "e5m2"}, "or uint8 .*; got float64"),
        (None, torch.ones(4, 1), {"fp8_dtype": "e4m3"}, "or uint8 .*; got None"),
        (BYTES, torch.ones(4, 1), {"fp8_dtype": "e4m3"}, "framework, as its ndarray; got Tensor"),
        (codes(2, 4, 128), torch.ones(4, 1), {}, r"data must be \[M, K\] in row layout; got \[2"),
        (codes(128), torch.ones(1), {"scale_layout": "block"}, r"\[M, K\] or \[E, M, K\] in block"),
        (codes(4, 128), torch.ones(4, 1), {"scale_layout": "col"}, "'row', 'gemm' or 'block'; got"),
        (codes(4, 128), torch.ones(4, 1), {"fp8_dtype": "e5m2"}, "that of data, float8_e4m3fn"),
        (BYTES, np.ones((4, 1), np.float32), {}, "with fp8_dtype given"),
    ],
)
def test_what_does_not_fit_is_refused(data: Any, scales: Any, how: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[Fp8Tensor\] .*{message}"):
        Fp8Tensor(data, scales, **how)


def test_values_and_words() -> None:
    x = torch.randn(5, 256)
    q = ops.quantize(x)
    assert torch.equal(q.float(), q.dequantize("float32"))
    assert q.float().dtype == torch.float32
    codes = q.data.view(torch.uint8)
    apart = torch.cat([codes, codes[:, :32]], 1)[:, :256].view(q.data.dtype)  # as unpack's rows
    assert torch.equal(Fp8Tensor(apart, q.scale_inv).float(), q.float())
    assert (q.shape, q.device) == ((5, 256), x.device)
    least, most = q.scale_inv.min().item(), q.scale_inv.max().item()
    assert repr(q) == (
        "Fp8Tensor(shape=(5, 256), e4m3, scale_layout='row', "
        f"pow2 scales from {least:.4g} to {most:.4g}, device=cpu)"
    )
    q = ops.quantize(x, scale="fp32", scale_layout="gemm")  # whose padding is not shown
    q.scale_inv[:, 5:] = 1e9
    assert "e+09" not in repr(q)
    assert "float32 scales from" in repr(q)
    assert "pow2 scales, device=cpu" in repr(ops.quantize(x[:0]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.pow2 = False  # type: ignore[misc]


def test_rows() -> None:
    q = ops.quantize(torch.randn(300, 256))
    for at in (slice(10, 20), slice(None, 3), slice(290, None), slice(5, 5), slice(-7, None)):
        assert torch.equal(q[at].float(), q.float()[at])
        assert q[at].data.data_ptr() == q.data[at].data_ptr()
    block, _ = ops.quantize_weight(torch.randn(3, 304, 256))
    assert torch.equal(block[1].float(), block.float()[1])
    assert torch.equal(block[1:].float(), block.float()[1:])
    assert torch.equal(block[2][128:257].float(), block.float()[2, 128:257])
    for part, message in (
        (lambda: q.to_layout("gemm")[:4], r"row layout: to_layout\('row'\)\[a:b\]; got 'gemm'"),
        (lambda: q[::2], r"taken as \[a:b\]; got slice"),
        (lambda: q[3], r"taken as \[a:b\]; got 3"),
        (lambda: block[0][5:], "begin at a multiple of 128; got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            part()


def test_moves_copies_and_layouts() -> None:
    q = ops.quantize(torch.randn(3, 256))
    assert same(q.cpu(), q)
    assert q.to("meta").device.type == "meta"
    assert "shape=(3, 256)" in repr(q.to("meta"))
    with pytest.raises(ValueError, match="only moves between devices"):
        q.to(torch.float32)
    copy = q.clone()
    q.data.view(torch.uint8).zero_()
    assert copy.data.view(torch.uint8).any()
    gemm = copy.to_layout("gemm")
    assert torch.equal(gemm.scale_inv[:, :3], copy.scale_inv.T)
    assert not gemm.scale_inv[:, 3:].any()
    assert same(gemm.to_layout("row"), copy)


def test_every_value_loads(tmp_path: Path) -> None:
    """All classes of values that a call returns or takes."""
    plan = ops.route(2, topk_idx=torch.tensor([[0, 1]]))
    made = ops.quantize_weight(torch.randn(2, 32, 32))
    weights = autograd.quantize_weights(torch.randn(2, 64, 32), torch.randn(2, 32, 32))
    named = [getattr(ops, name) for name in ops.__all__]
    tuples = [kind for kind in named if isinstance(kind, type)]
    values = [kind(*torch.zeros(len(kind._fields))) for kind in [*tuples, nn.Routing]]
    settings = [Fp8Recipe(), nn.RoutingRule(), nn.LossCoefficients(balancing=0.1)]
    torch.save([plan, made, weights, values, settings], tmp_path / "values.pt")
    _, pair, both, others, its_settings = torch.load(tmp_path / "values.pt")
    assert same(pair.q_t, made.q_t)
    assert same(both.down_t, weights.down_t)
    assert [type(value) for value in others] == [type(value) for value in values]
    assert its_settings == settings


def test_files(tmp_path: Path) -> None:
    """By torch.load's default, which takes no classes that it does not know."""
    q = ops.quantize(torch.randn(5, 256), scale_layout="gemm")
    plan = ops.route(2, topk_idx=torch.tensor([[0, 1], [1, -1]]))
    torch.save({"q": q, "plan": plan}, tmp_path / "q.pt")
    back = torch.load(tmp_path / "q.pt")
    assert same(back["q"], q)
    assert back["plan"].sizes == plan.sizes
    assert torch.equal(back["plan"].buffer, plan.buffer)


def test_a_gemm_of_row_scales_says_what_to_ask_for() -> None:
    plan = ops.plan_from_counts(torch.tensor([4]), capacity=4)
    w, _ = ops.quantize_weight(torch.randn(1, 128, 128))
    with pytest.raises(
        ValueError, match=r'must have scale layout gemm; got row: .*scale_layout="gemm"'
    ):
        ops.grouped_gemm(ops.quantize(torch.randn(4, 128)), w, plan)
