"""Float8BlockwiseQTensor and Fp8Tensor, each as the other; Fp8Padding and Fp8Unpadding.

The class is a stand-in of the same attributes, or TransformerEngine's own on a GPU where it is.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import te_stand_in
from fp8moe_cutlass import Fp8Tensor, ops
from fp8moe_cutlass.integrations.transformer_engine import (
    Fp8Padding,
    Fp8Unpadding,
    as_blockwise_tensor,
    as_fp8_tensor,
)


@pytest.fixture(params=["stand-in", pytest.param("own", marks=pytest.mark.gpu)])
def te(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "stand-in":
        modules = te_stand_in.modules()
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return modules["transformer_engine.pytorch"]
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("TransformerEngine is not installed")
    import transformer_engine.pytorch

    return transformer_engine.pytorch


def device_of(te: ModuleType) -> str:
    return "cpu" if te.Float8BlockwiseQTensor is te_stand_in.Float8BlockwiseQTensor else "cuda"


def same(a: Fp8Tensor, b: Fp8Tensor) -> None:
    assert (a.scale_layout, a.fp8_dtype, a.pow2) == (b.scale_layout, b.fp8_dtype, b.pow2)
    assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    rows = a.shape[0]
    if a.scale_layout == "gemm":  # what pads to a multiple of 4 is anything
        assert torch.equal(a.scale_inv[:, :rows], b.scale_inv[:, :rows])
    else:
        assert torch.equal(a.scale_inv, b.scale_inv)


@pytest.mark.parametrize("fp8_dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("layout", ["row", "gemm"])
@pytest.mark.parametrize("rows", [0, 1, 30, 256])
def test_rows(te: ModuleType, rows: int, layout: Any, scale: Any, fp8_dtype: str) -> None:
    x = torch.randn(rows, 272, device=device_of(te))
    q = ops.quantize(x, fp8_dtype=fp8_dtype, scale=scale, scale_layout=layout)
    held = as_blockwise_tensor(q, dtype=torch.float32)
    assert (tuple(held.shape), held.dtype, held._is_2D_scaled) == (
        (rows, 272),
        torch.float32,
        False,
    )
    assert held._rowwise_data.dtype == torch.uint8
    assert held._rowwise_scale_inv.shape == (3, -(-rows // 4) * 4)
    assert held._quantizer.force_pow_2_scales == (scale == "pow2")
    assert held._rowwise_data.data_ptr() == q.data.data_ptr()
    back = as_fp8_tensor(held)
    assert back.data.data_ptr() == q.data.data_ptr()
    same(back, q.to_layout("gemm"))
    with pytest.raises(ValueError, match=r"with columnwise data .*; got Float8BlockwiseQTensor wi"):
        as_fp8_tensor(held, columnwise=True)


def test_columns(te: ModuleType) -> None:
    """Beside rows: the transposed operand that a weight gradient reads."""
    device = device_of(te)
    q = ops.quantize(torch.randn(256, 128, device=device), scale_layout="gemm")
    plan = ops.plan_from_counts(torch.tensor([256], device=device), capacity=256)
    columns = ops.transpose_fp8(q, plan, columns="column")
    held = as_blockwise_tensor(q, columns)
    same(as_fp8_tensor(held), q)
    same(as_fp8_tensor(held, columnwise=True), columns)


@pytest.mark.parametrize("sizes", [(128, 512), (304, 272)])
def test_weights(te: ModuleType, sizes: tuple[int, int]) -> None:
    """128x128 blocks, whose scales TransformerEngine pads to a multiple of 4 per row."""
    n, k = sizes
    both = ops.quantize_weight(torch.randn(1, n, k, device=device_of(te)))
    q, q_t = (Fp8Tensor(t.data[0], t.scale_inv[0], "block") for t in both)
    held = as_blockwise_tensor(q, q_t)
    assert held._is_2D_scaled
    assert held._rowwise_scale_inv.shape == (-(-n // 128), 4)
    assert held._quantizer.block_scaling_dim == 2
    same(as_fp8_tensor(held), q)
    same(as_fp8_tensor(held, columnwise=True), q_t)


def test_more_dimensions_and_compact_scales() -> None:
    """What TransformerEngine's layers hold: [B, S, K]; and before 2.9 scales of row layout."""
    q = ops.quantize(torch.randn(12, 272))
    parts = {"_rowwise_data": q.data.view(torch.uint8).view(3, 4, 272), "_columnwise_data": None}
    parts |= {"_rowwise_scale_inv": q.scale_inv, "_fp8_dtype": te_stand_in.DType.kFloat8E4M3}
    quantizer = SimpleNamespace(force_pow_2_scales=True)
    compact = SimpleNamespace(name="COMPACT")
    held = SimpleNamespace(**parts, _quantizer=quantizer, _is_2D_scaled=False, _data_format=compact)
    same(as_fp8_tensor(held), q)
    held._columnwise_data = held._columnwise_scale_inv = q.scale_inv
    with pytest.raises(ValueError, match="must not be compact columnwise"):
        as_fp8_tensor(held, columnwise=True)
    with pytest.raises(ValueError, match="got Tensor without"):
        as_fp8_tensor(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"q must be \[M, K\]; got \[1, 128, 128\]"):
        as_blockwise_tensor(ops.quantize_weight(torch.zeros(1, 128, 128)).q)


# ---- padding ------------------------------------------------------------------------------------

DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SPLITS = [[5, 0, 33, 16], [0, 0, 0, 0], [60, 0, 0, 0], [16, 32, 48, 0]]


def padded_by_loop(x: Tensor, splits: list[int], align: int) -> Tensor:
    parts = []
    for part in x.split(splits):
        missing = -len(part) % align
        parts += [part, part.new_zeros(missing, x.shape[1])]
    return torch.cat(parts)


@DEVICE
@pytest.mark.parametrize("width", [48, 1])
@pytest.mark.parametrize("align", [None, 32, 128])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_padding_and_back(splits: list[int], align: int | None, width: int, device: str) -> None:
    x = torch.randn(sum(splits), width, device=device, dtype=torch.bfloat16)
    x[:1] = -0.0
    x.requires_grad_()
    pad, unpad = Fp8Padding(4, align), Fp8Unpadding(4, align)
    want = padded_by_loop(x.detach(), splits, align or 16)
    y, sizes = pad(x, splits)
    assert sizes == [-(-m // (align or 16)) * (align or 16) for m in splits]
    assert torch.equal(y.view(torch.int16), want.view(torch.int16))
    back = unpad(y, splits)
    assert torch.equal(back.view(torch.int16), x.view(torch.int16))
    dout = torch.randn_like(back)
    back.backward(dout)
    assert torch.equal(x.grad, dout)


@DEVICE
@pytest.mark.parametrize("layout", ["row", "gemm"])
def test_padding_of_fp8(layout: Any, device: str) -> None:
    q = ops.quantize(torch.randn(54, 272, device=device), scale_layout=layout)
    padded, sizes = Fp8Padding(4)(q, SPLITS[0])
    assert (padded.scale_layout, sum(sizes)) == (layout, padded.shape[0])
    want = padded_by_loop(q.float(), SPLITS[0], 16)
    assert torch.equal(padded.float(), want)
    same(Fp8Unpadding(4)(padded, SPLITS[0]), q)


def test_padding_refuses() -> None:
    x = torch.zeros(10, 16)
    for message, call in {
        "align_size must be 1, 16, 32 or 128; got 8": lambda: Fp8Padding(2, 8),
        "m_splits must be of 2 GEMMs; got 3": lambda: Fp8Padding(2)(x, [1, 2, 7]),
        "must have the 9 rows of m_splits; got 10": lambda: Fp8Padding(2)(x, [2, 7]),
        "the 32 rows of m_splits and their padding; got 10": lambda: Fp8Unpadding(2)(x, [3, 7]),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert repr(Fp8Padding(2)) == "Fp8Padding(num_gemms=2, align_size=16)"


def test_example() -> None:
    """It trains, and its step is nn.MoEExperts' bit for bit."""
    example = Path(__file__).parents[1] / "examples/te_grouped_linear.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]
    assert re.findall(r"(\w+): 0.0e\+00 from", done.stdout) == ["dx", "fc1", "fc2"]
