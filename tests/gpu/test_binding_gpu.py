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
    q = ops.quantize(x.pin_memory())
    assert not q.data.is_pinned()
    assert torch.equal(q.dequantize(), ops.quantize(x).dequantize())


@pytest.mark.parametrize("shape", [(3, 128), (3, 0), (0, 128)])
def test_outputs_are_what_torch_allocates(device: torch.device, shape: tuple[int, ...]) -> None:
    q = ops.quantize(torch.zeros(shape, device=device))
    before = torch.cuda.memory_allocated()
    want = torch.empty(shape, dtype=torch.float32, device=device)
    bytes = torch.cuda.memory_allocated() - before
    got = ops.dequantize(q, dtype="float32")
    assert torch.cuda.memory_allocated() - before == 2 * bytes
    assert (got.dtype, got.device, got.stride()) == (want.dtype, want.device, want.stride())


def test_outputs_stay_for_a_stream_that_reads_them(device: torch.device) -> None:
    """Memory of torch's allocator, on the current stream: record_stream keeps it."""
    q, side = ops.quantize(torch.zeros(1024, 1024, device=device)), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        ops.dequantize(q)  # the memory is there: getting some waits for kernels
    torch.cuda._sleep(200_000_000)
    with torch.cuda.stream(side):
        out = ops.dequantize(q)
        address = out.data_ptr()
        out.record_stream(torch.cuda.default_stream())
        del out
        assert ops.dequantize(q).data_ptr() != address
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
def test_outputs_are_on_the_device_of_the_arguments(current: int) -> None:
    """Whichever device is current; it stays current."""
    x = torch.randn(16, 256)
    with torch.cuda.device(current):
        for device in ("cuda:0", "cuda:1"):
            q = ops.quantize(x.to(device))
            assert str(q.data.device) == str(q.scale_inv.device) == device
            assert torch.equal(q.dequantize().cpu(), ops.quantize(x).dequantize())
            assert torch.cuda.current_device() == current


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
