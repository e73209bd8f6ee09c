"""A token's output, dx and dprobs do not depend on what else is in the batch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fp8moe_cutlass import Fp8Recipe, nn

T, E, S, H, I = 300, 7, 3, 272, 144


def run(layer: nn.MoEExperts, x, ids, probs, dout) -> list[torch.Tensor]:
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    out = layer(x, ids, probs)
    return [out.detach(), *torch.autograd.grad(out, (x, probs), dout)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("count", [1, 17, 128, 299])
def test_subset_of_a_batch_has_the_same_bits(device: str, columns: str, count: int) -> None:
    torch.manual_seed(count)
    layer = nn.MoEExperts(E, H, I, recipe=Fp8Recipe(columns=columns), device=device)
    x, dout = torch.randn(2, T, H, device=device).bfloat16()
    ids = torch.rand(T, E, device=device).topk(S).indices
    ids[::5, 0] = -1  # dropped
    probs = torch.rand(T, S, device=device)
    whole = run(layer, x, ids, probs, dout)
    some = torch.randperm(T, device=device)[:count].sort().values
    part = run(layer, x[some], ids[some], probs[some], dout[some])
    for name, a, b in zip(("out", "dx", "dprobs"), whole, part, strict=True):
        assert torch.equal(a[some], b), name
