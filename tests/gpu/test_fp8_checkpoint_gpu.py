"""Frozen FP8 experts on a GPU: the bits of the layer that quantizes, streams and graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass.nn import MoEExperts, reuse_fp8_weights
from on_device import capture

E, H, I, T, S = 8, 512, 384, 300, 3


def inputs() -> tuple[Tensor, ...]:
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(T, H, generator=g, device="cuda").bfloat16().requires_grad_()
    ids = torch.rand(T, E, generator=g, device="cuda").topk(S).indices
    probs = torch.rand(T, S, generator=g, device="cuda").requires_grad_()
    return x, ids, probs, torch.randn(T, H, generator=g, device="cuda").bfloat16()


def step(layer: Any, batch: tuple[Tensor, ...], **how: Any) -> list[Tensor]:
    x, ids, probs, dout = batch
    out = layer(x, ids, probs, **how)
    return [out.detach(), *torch.autograd.grad(out, [x, probs], dout)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("fused", [False, True])
def test_equals_the_layer_that_quantizes(fused: bool, dtype: torch.dtype) -> None:
    layer, batch = MoEExperts(E, H, I, device="cuda"), inputs()
    tensors = {
        name: t.to(dtype) if "scale_inv" in name else t
        for name, t in layer.fp8_tensors(fused=fused)
    }
    frozen = MoEExperts.from_fp8(tensors, num_experts=E, device="cuda")
    want = step(layer, batch)
    assert same(step(frozen, batch), want)
    with reuse_fp8_weights(frozen):
        assert same(step(frozen, batch), want)
    kept = frozen.quantize_weights()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        found = step(frozen, batch, weights=kept)
    torch.cuda.synchronize()
    assert same(found, want)
    for name, t in frozen.fp8_tensors(fused=fused):
        assert torch.equal(t.view(torch.uint8), tensors[name].view(torch.uint8))
    on_cpu = MoEExperts.from_fp8(tensors, num_experts=E).gate_up_proj
    assert torch.equal(on_cpu.view(torch.uint8), frozen.cpu().gate_up_proj.view(torch.uint8))


@pytest.mark.parametrize("kept", [False, True])
def test_in_a_graph(kept: bool) -> None:
    tensors = dict(MoEExperts(E, H, I, device="cuda").fp8_tensors(fused=True))
    frozen, batch = MoEExperts.from_fp8(tensors, num_experts=E, device="cuda"), inputs()
    how = {"weights": frozen.quantize_weights()} if kept else {}
    want = step(frozen, batch)
    graph, found = capture(lambda: step(frozen, batch, **how))
    for _ in range(2):
        graph.replay()
        assert same(found, want)


def test_one_byte_per_parameter_between_steps() -> None:
    tensors = {name: t.cpu() for name, t in MoEExperts(E, H, I).fp8_tensors(fused=True)}
    batch = inputs()
    before = torch.cuda.memory_allocated()
    frozen = MoEExperts.from_fp8(tensors, num_experts=E, device="cuda")
    step(frozen, batch)
    held = torch.cuda.memory_allocated() - before
    assert held < 1.01 * 3 * E * H * I + 4096
