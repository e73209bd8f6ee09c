"""SlowPathWarning: said once per cause, and only where the caller can change something."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8moe_cutlass import Fp8Recipe, SlowPathWarning, build_info, nn
from fp8moe_cutlass.nn import experts as module
from moe_problem import Problem, problem


def float32_scales(p: Problem) -> None:
    p.experts(recipe=Fp8Recipe(scale="fp32", columns="column"))


def amax_scales(p: Problem) -> None:
    p.experts(recipe=Fp8Recipe(scale="amax", columns="column"))


def misaligned_main_grad(p: Problem) -> None:
    layer = p.experts()
    for w in layer.parameters():
        w.main_grad = torch.zeros(w.numel() + 1)[1:].view(w.shape)
    p.run(layer)


def quantized_again(p: Problem) -> None:
    layer = p.experts()
    p.run(layer)
    p.run(layer)


CAUSES: dict[str, tuple[Callable[[Problem], None], str]] = {
    "float32 scales": (float32_scales, "float32 scales cannot be shifted"),
    "amax scales": (amax_scales, "float32 scales cannot be shifted"),
    "main_grad": (misaligned_main_grad, "begins at no multiple of 16 bytes"),
    "quantized again": (quantized_again, "several forwards before .*reuse_fp8_weights"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_said_once(name: str) -> None:
    run, message = CAUSES[name]
    with pytest.warns(SlowPathWarning, match=message) as told:
        run(problem(32))
    assert len(told) == 1
    assert Path(told[0].filename).parent == Path(__file__).parent  # the line that led to it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(problem(32))


def test_a_build_for_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for cuda in (False, True):
        monkeypatch.setattr(module, "build_info", lambda cuda=cuda: {**build_info(), "cuda": cuda})
        if cuda:
            nn.MoEExperts(2, 128, 128)
            continue
        with pytest.warns(SlowPathWarning, match="no CUDA backend, and torch sees a GPU"):
            nn.MoEExperts(2, 128, 128)


def step(p: Problem, layer: Any, **call: Any) -> None:
    p.run(layer, **call)
    with torch.no_grad():
        for w in layer.parameters():
            w -= 0.1 * w.grad
            w.grad = None


def test_fast_paths_say_nothing() -> None:
    """Training step by step, accumulation with reuse or weights=, evaluation, checkpointing."""
    p = problem(32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = p.experts()
        for _ in range(3):
            step(p, layer)
        with nn.reuse_fp8_weights(layer):
            p.run(layer)
            p.run(layer)
        layer.zero_grad()
        weights = layer.quantize_weights()
        p.run(layer, weights=weights)
        p.run(layer, weights=weights)
        layer.zero_grad()
        with torch.no_grad():
            layer(p.x, p.topk_idx, p.probs)
            layer(p.x, p.topk_idx, p.probs)
        x = p.x.clone().requires_grad_()
        for reentrant in (True, False):
            out = torch.utils.checkpoint.checkpoint(
                layer, x, p.topk_idx, p.probs, use_reentrant=reentrant
            )
            out.backward(p.dout)
            layer.zero_grad()
