"""Gate and up as two tensors on CUDA, as integrations.torchtitan gives them: the bits of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.autograd import Local, torch_op
from moe_problem import problem
from on_device import capture


@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
@pytest.mark.parametrize(
    "options", [{}, {"preactivation": "recompute"}, {"recipe": Fp8Recipe(columns="column")}]
)
def test_bits_of_one_tensor(how: str, options: dict[str, Any], device: torch.device) -> None:
    p = problem(384, 3, 8, 256, 128).to(device)
    of = p.experts(**options)._options
    draw = torch.Generator(device).manual_seed(1)
    sizes = ((8, 128, 256), (8, 128, 256), (8, 256, 128))
    weights = [torch.randn(s, generator=draw, device=device).bfloat16() / 16 for s in sizes]

    def one(x: Tensor, probs: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        both = torch.cat([gate, up], dim=1)
        return torch_op.run(x, p.topk_idx, probs, both, down, of, Local(8))

    def two(x: Tensor, probs: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return torch_op.run(x, p.topk_idx, probs, gate, down, of, Local(8), up=up)

    def step(run: Any) -> tuple[Tensor, ...]:
        given = [t.detach().requires_grad_() for t in (p.x, p.probs, *weights)]
        out = run(*given)
        return (out.detach(), *torch.autograd.grad(out, given, p.dout))

    want = step(one)
    if how == "compiled":
        got = step(torch.compile(two, fullgraph=True, backend="aot_eager"))
    elif how == "captured":
        graph, got = capture(lambda: step(two), 2)
        graph.replay()
    else:
        got = step(two)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
        assert a.is_contiguous()
