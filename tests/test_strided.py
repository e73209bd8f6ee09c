"""Rows that lie apart (a packed buffer): read in place where allowed, refused elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp8moe_cutlass import Fp8Tensor, ops

TOKENS, EXPERTS = 150, 3
IDS = torch.stack([torch.arange(TOKENS) % 2, torch.arange(TOKENS) % 3], dim=1)
PLAN = ops.route(EXPERTS, topk_idx=IDS, align=16)
ONE_TO_ONE = ops.route(1, topk_idx=torch.zeros(TOKENS, 1, dtype=torch.int64))


def both(width: int, fp8: str = "e4m3") -> tuple[Fp8Tensor, Fp8Tensor]:
    """Quantized tokens, dense, and the same as views into rows with 24 bytes behind."""
    x = torch.randn(TOKENS, width) * torch.exp2(torch.randint(-9, 9, (TOKENS, 1)).float())
    q = ops.quantize(x, fp8_dtype=fp8)
    scales = width + q.scale_inv.shape[1] * 4
    rows = torch.full((TOKENS, -(-(scales + 24) // 16) * 16), 0xA5, dtype=torch.uint8)
    rows[:, :width] = q.data.view(torch.uint8)
    rows[:, width:scales] = q.scale_inv.view(torch.uint8)
    data = rows[:, :width].view(q.data.dtype)
    return q, Fp8Tensor(data, rows[:, width:scales].view(torch.float32))


def bits(t: Fp8Tensor) -> list[torch.Tensor]:
    return [t.data.view(torch.uint8), t.scale_inv.view(torch.int32)]


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("width", [16, 128, 144, 272, 1024])
def test_bit_equal_to_contiguous(width: int, fp8: str) -> None:
    q, strided = both(width, fp8)
    assert not strided.data.is_contiguous()
    probs = torch.rand(TOKENS, 2)
    end = int(PLAN.row_offsets[-1])
    for layout in ("gemm", "row"):
        want, _ = ops.permute_pad(q, PLAN, probs, scale_layout=layout)
        got, _ = ops.permute_pad(strided, PLAN, probs, scale_layout=layout)
        assert torch.equal(bits(got)[0][:end], bits(want)[0][:end])
        rows = (lambda s: s[:, :end]) if layout == "gemm" else (lambda s: s[:end])
        assert torch.equal(rows(bits(got)[1]), rows(bits(want)[1]))
    columns = int(PLAN.col_offsets[-1])
    for kind in ("block", "column"):
        want = ops.permute_transpose_fp8(q, PLAN, columns=kind)
        got = ops.permute_transpose_fp8(strided, PLAN, columns=kind)
        assert torch.equal(bits(got)[0][:, :columns], bits(want)[0][:, :columns])
        blocks = columns // 128
        cut = np.s_[:, :blocks] if kind == "block" else np.s_[:blocks, :width]
        assert torch.equal(bits(got)[1][cut], bits(want)[1][cut])


def test_only_data_or_only_scales_strided() -> None:
    q, strided = both(272)
    want = ops.permute_pad(q, PLAN)[0].data.view(torch.uint8)
    gemm = q.to_layout("gemm")
    for data, scale, layout in (
        (strided.data, q.scale_inv, "row"),
        (q.data, strided.scale_inv, "row"),
        (strided.data, gemm.scale_inv, "gemm"),
    ):
        t = Fp8Tensor(data, scale, scale_layout=layout)
        end = int(PLAN.row_offsets[-1])
        assert torch.equal(ops.permute_pad(t, PLAN)[0].data.view(torch.uint8)[:end], want[:end])
    assert torch.equal(strided.to_layout("gemm").scale_inv[:, :TOKENS], gemm.scale_inv[:, :TOKENS])


def test_numpy_codes() -> None:
    q, strided = both(144)
    rows = Fp8Tensor(
        strided.data.view(torch.uint8).numpy(), strided.scale_inv.numpy(), fp8_dtype="e4m3"
    )
    ids = IDS.numpy()
    got, _ = ops.permute_pad(rows, ops.route(EXPERTS, topk_idx=ids, align=16))
    end = int(PLAN.row_offsets[-1])
    want = ops.permute_pad(q, PLAN)[0].data.view(torch.uint8).numpy()
    assert np.array_equal(got.data[:end], want[:end])


def test_refused_where_rows_must_be_dense() -> None:
    q, strided = both(256)
    gemm_scale = torch.zeros(2, 2 * TOKENS)[:, : -(-TOKENS // 4) * 4]
    calls: list[Any] = [
        lambda: ops.dequantize(strided),
        lambda: ops.transpose_fp8(strided, ONE_TO_ONE),
        lambda: ops.quantize(torch.zeros(4, 256)[:, :128]),
        lambda: ops.permute_pad(torch.zeros(TOKENS, 256)[:, :128], PLAN),
        lambda: ops.permute_pad(Fp8Tensor(q.data, gemm_scale, scale_layout="gemm"), PLAN),
        lambda: ops.permute_pad_backward(torch.zeros(PLAN.rows, 256)[:, :128], PLAN),
        lambda: ops.unpermute_unpad(torch.zeros(PLAN.rows, 256)[:, :128], PLAN),
        lambda: ops.permute_pad(
            q,
            PLAN,
            out=(
                Fp8Tensor(
                    torch.zeros(PLAN.rows, 512).to(torch.float8_e4m3fn)[:, :256],
                    torch.zeros(2, PLAN.rows),
                    scale_layout="gemm",
                ),
                None,
            ),
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="must be contiguous; got shape"):
            call()


def test_rows_that_start_between_multiples_of_16_bytes_are_copied() -> None:
    q, _ = both(128)
    wide = torch.zeros(TOKENS, 304, dtype=torch.uint8)
    wide[:, 4:132] = q.data.view(torch.uint8)
    t = Fp8Tensor(wide[:, 4:132].view(torch.float8_e4m3fn), q.scale_inv)
    rows, columns = int(PLAN.row_offsets[-1]), int(PLAN.col_offsets[-1])
    got, want = (ops.permute_pad(x, PLAN)[0].data[:rows] for x in (t, q))
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    got, want = (ops.permute_transpose_fp8(x, PLAN).data[:, :columns] for x in (t, q))
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_refused_strides() -> None:
    q, _ = both(128)
    codes = torch.zeros(TOKENS, 300, dtype=torch.uint8)
    cases = [
        (codes[:, :128], "a multiple of 16; got 300"),
        (codes[:, :256:2], "must be contiguous"),
        (codes[:1, :128].expand(TOKENS, 128), "must be contiguous"),
        (torch.zeros(128, TOKENS, dtype=torch.uint8).T, "must be contiguous"),
    ]
    for data, message in cases:
        t = Fp8Tensor(data.view(torch.float8_e4m3fn), q.scale_inv)
        for op in (ops.permute_pad, ops.permute_transpose_fp8):
            with pytest.raises(ValueError, match=message):
                op(t, PLAN)
    scale = torch.zeros(TOKENS, 4)
    t = Fp8Tensor(torch.zeros(TOKENS, 272).to(torch.float8_e4m3fn), scale[:1, :3].expand(TOKENS, 3))
    with pytest.raises(ValueError, match=r"x.scale_inv must be contiguous"):
        ops.permute_pad(t, PLAN)
