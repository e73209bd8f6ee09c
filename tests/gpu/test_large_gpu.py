"""64-bit offsets: operators past 2^31 elements do as they do on few."""

from __future__ import annotations

import pytest
import torch

from fp8moe_cutlass import Fp8Tensor, ops

pytestmark = pytest.mark.slow


def test_permute() -> None:
    """64-bit offsets: x, and the rows of y, past 2^31 elements move as the first ones do."""
    width, tokens = 8192, 262_400
    idx = torch.zeros(tokens, 1, dtype=torch.int32, device="cuda")
    plan = ops.route(1, topk_idx=idx)
    x = torch.zeros(tokens, width, dtype=torch.float8_e4m3fn, device="cuda")
    x[-300:] = torch.randn(300, width, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(tokens, width // 128, device="cuda")
    y, _ = ops.permute_pad(Fp8Tensor(x, scale), plan)
    assert torch.equal(y.data.view(torch.int64), x.view(torch.int64))
    assert torch.equal(y.scale_inv[:, :tokens].T, scale)
    del x, y

    wide = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    wide[-300:] = torch.randn(300, width, device="cuda").bfloat16()
    probs = torch.full((tokens, 1), 2.0, device="cuda")
    out = ops.unpermute_unpad(wide, plan, probs)
    assert torch.equal(out[-300:], wide[-300:] * 2)
    del out
    dy, dprobs = ops.unpermute_unpad_backward(wide, plan, wide, probs)
    assert torch.equal(dy[-300:], wide[-300:] * 2)
    norm = wide[-300:].double().square().sum(1)
    torch.testing.assert_close(dprobs[-300:, 0].double(), norm, rtol=1e-5, atol=0)


def test_act_quantize(device):
    """64-bit offsets: the last rows of z [R, 2I] with R 2I > 2^31 equal a small call's."""
    rows, intermediate = 262_400, 4096
    z = torch.zeros(rows, 2 * intermediate, dtype=torch.bfloat16, device=device)
    dh = torch.zeros(rows, intermediate, dtype=torch.bfloat16, device=device)
    z[-256:] = torch.randn(256, 2 * intermediate, device=device)
    dh[-256:] = torch.randn(256, intermediate, device=device)
    h = ops.act_quantize(z, scale_layout="row")
    small = ops.act_quantize(z[-256:].clone(), scale_layout="row")
    assert torch.equal(h.data[-256:].view(torch.uint8), small.data.view(torch.uint8))
    assert torch.equal(h.scale_inv[-256:], small.scale_inv)
    dz, *_ = ops.act_quantize_backward(dh, z)
    small, *_ = ops.act_quantize_backward(dh[-256:].clone(), z[-256:].clone())
    assert torch.equal(dz.data[-256:].view(torch.uint8), small.data.view(torch.uint8))


def test_quantize(device):
    """The last rows of a huge tensor are quantized as they are alone."""
    m, k = 300_032, 7168
    x = torch.randn(1024, k, device=device, dtype=torch.bfloat16).repeat(m // 1024, 1)
    assert x.numel() > 2**31
    for layout in ("row", "gemm"):
        q, part = (ops.quantize(t, scale_layout=layout) for t in (x, x[-1024:]))
        assert torch.equal(q.data[-1024:].view(torch.uint8), part.data.view(torch.uint8))
        rows = {"row": q.scale_inv[-1024:], "gemm": q.scale_inv[:, -1024:]}
        assert torch.equal(rows[layout], part.scale_inv)
        values = ops.dequantize(q)
        assert torch.equal(values[-1024:], ops.dequantize(part))
        del q, values
    w = x.view(-1, 1024, k)
    (q, q_t), (part, part_t) = ops.quantize_weight(w), ops.quantize_weight(w[-1:])
    assert torch.equal(q.data[-1:].view(torch.uint8), part.data.view(torch.uint8))
    assert torch.equal(q_t.data[-1:].view(torch.uint8), part_t.data.view(torch.uint8))


def test_transpose(device):
    """Equal experts of a huge tensor are transposed alike; the gathered form gives the same."""
    experts, each, c = 293, 1024, 7168
    codes = torch.randint(0, 120, (each, c), dtype=torch.uint8, device=device)
    scale_inv = torch.exp2(torch.randint(-3, 3, (each, 56), device=device).float())
    rows = Fp8Tensor(
        codes.repeat(experts, 1).view(torch.float8_e4m3fn), scale_inv.repeat(experts, 1)
    )
    assert rows.data.numel() > 2**31
    counts = torch.full((experts,), each, device=device)
    plan = ops.plan_from_counts(counts, capacity=experts * each)
    one = ops.plan_from_counts(counts[:1], capacity=each)
    small = ops.transpose_fp8(Fp8Tensor(codes.view(torch.float8_e4m3fn), scale_inv), one)
    for op in (ops.transpose_fp8, ops.permute_transpose_fp8):
        big = op(rows, plan)
        for e in (0, experts // 2, experts - 1):
            part = big.data[:, e * each : (e + 1) * each].view(torch.uint8)
            assert torch.equal(part, small.data[:, :each].view(torch.uint8))
            assert torch.equal(big.scale_inv[:, 8 * e : 8 * e + 8], small.scale_inv[:, :8])
        del big
