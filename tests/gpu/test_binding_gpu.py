"""The boundary on a GPU: devices that do not match, pinned memory, whose stream a call runs on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8moe_cutlass import ops, use_stream
from lender import Lender


def test_devices_must_match(device: torch.device) -> None:
    x = torch.randn(16, 256)
    q, on_gpu = ops.quantize(x), ops.quantize(x.to(device))
    with pytest.raises(ValueError, match=r"\[quantize\] q must be on cpu; got cuda:0"):
        ops.quantize(x, out=on_gpu)
    with pytest.raises(ValueError, match=r"\[quantize\] q must be on cuda:0; got cpu"):
        ops.quantize(x.to(device), out=q)


def test_pinned_memory_is_cpu_memory() -> None:
    x = torch.randn(16, 256)
    assert torch.equal(ops.quantize(x.pin_memory()).dequantize(), ops.quantize(x).dequantize())


@pytest.mark.parametrize("lend", [lambda t: t, Lender], ids=["torch", "lender"])
def test_a_call_runs_on_the_current_stream(device: torch.device, lend: Any) -> None:
    """Behind a slow copy on a side stream: another stream would read what was there before."""
    want = ops.quantize(torch.randn(64, 256, device=device))
    new = want.dequantize("float32")
    x = torch.zeros_like(new)
    out = ops.quantize(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), use_stream(side.cuda_stream):
        torch.cuda._sleep(200_000_000)
        x.copy_(new)
        ops.quantize(lend(x), out=out)
    assert not side.query(), "the call waited for the device"
    side.synchronize()
    assert torch.equal(out.dequantize("float32"), new)
