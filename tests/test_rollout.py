"""The forward of inference engines: weights at the output, by rules written anew in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe, ops
from moe_problem import problem


def weighted_sum(y: Tensor, probs: Tensor) -> Tensor:
    """y [T, S, H] bf16, probs [T, S] f32 -> [T, H] bf16: float32 fma by ascending slots, rounded
    once. float64 holds the products exactly."""
    total = torch.zeros_like(y[:, 0], dtype=torch.float64)
    for s in range(y.shape[1]):
        total = (total + y[:, s].double() * probs[:, s, None].double()).float().double()
    return total.bfloat16()


def test_output_weights_multiply_the_rows_of_the_down_projection(device: torch.device) -> None:
    """Bit for bit: each slot's row by itself comes from a forward with weights of 1."""
    p = problem(300, 3, 5, 208, 144).to(device)
    layer = p.experts(recipe=Fp8Recipe(weighting="output"))
    with torch.no_grad():
        one = torch.ones_like(p.probs[:, :1])
        rows = [layer(p.x, p.topk_idx[:, s : s + 1], one) for s in range(3)]
        out = layer(p.x, p.topk_idx, p.probs)
    assert torch.equal(out, weighted_sum(torch.stack(rows, dim=1), p.probs))
    unweighted = p.experts()
    with torch.no_grad():
        assert torch.equal(rows[0], unweighted(p.x, p.topk_idx[:, :1], one))
        assert not torch.equal(out, unweighted(p.x, p.topk_idx, p.probs))


def test_activation_eps_is_the_floor_of_h_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both forwards' h, with LoRA's recomputed one; x, gradients and weights keep eps."""
    seen: dict[str, set[float]] = {}
    for name in ("quantize", "act_quantize", "act_quantize_backward", "quantize_weight"):
        op = getattr(ops, name)

        def spied(*args: Any, _op: Any = op, _name: str = name, **kwargs: Any) -> Any:
            seen.setdefault(_name, set()).add(kwargs["eps"])
            return _op(*args, **kwargs)

        monkeypatch.setattr(ops, name, spied)
    p = problem(40)
    layer = p.experts(recipe=Fp8Recipe(eps=1e-3, activation_eps=0.25), preactivation="recompute")
    p.run(layer)
    layer.add_lora(8, alpha=16)
    p.run(layer)
    assert seen.pop("act_quantize") == {0.25}
    assert set.union(*seen.values()) == {1e-3}
