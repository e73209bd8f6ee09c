"""Routing masks on CUDA, and transformers models whose experts run by name or swapped."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import MoEExperts, reuse_fp8_weights

E, H, I, T = 16, 256, 128, 300


def run(
    layer: MoEExperts, x: Tensor, ids: Tensor, probs: Tensor, **call: Any
) -> tuple[Tensor, ...]:
    """Output and gradients of x, probs and both weights."""
    leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_(), *layer.parameters()]
    out = layer(leaves[0], ids, leaves[1], **call)
    made = torch.autograd.grad(out, leaves, torch.ones_like(out))
    return out.detach(), *made


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_a_mask_is_the_same_routing_by_ids(recipe: Fp8Recipe | None, device: torch.device) -> None:
    torch.manual_seed(0)
    layer = MoEExperts(E, H, I, recipe=recipe, device=device)
    x = torch.randn(T, H, device=device).bfloat16()
    ids = torch.rand(T, E, device=device).topk(4).indices.sort(dim=1).values
    probs = torch.rand(T, 4, device=device)
    mask = torch.zeros(T, E, dtype=torch.bool, device=device).scatter_(1, ids, True)
    dense = torch.zeros(T, E, device=device).scatter_(1, ids, probs)
    want = run(layer, x, ids, probs)
    got = run(layer, x, mask, dense, max_assignments=4 * T + 50)
    for n in (0, 1, 3, 4):
        assert torch.equal(got[n], want[n])
    assert torch.equal(got[2], torch.zeros_like(dense).scatter_(1, ids, want[2]))


def test_a_mask_over_its_capacity_drops(device: torch.device) -> None:
    """What finds no row adds nothing and has no gradient; all is finite."""
    layer = MoEExperts(E, H, I, device=device)
    mask = torch.ones(T, E, dtype=torch.bool, device=device)
    x = torch.randn(T, H, device=device).bfloat16()
    got = run(layer, x, mask, torch.ones(T, E, device=device), max_assignments=1000)
    assert all(t.isfinite().all() for t in got)
    assert int((got[2] != 0).sum()) <= 1000


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_an_id_that_is_no_expert(recipe: Fp8Recipe | None, device: torch.device) -> None:
    layer = MoEExperts(E, H, I, recipe=recipe, device=device)
    x = torch.randn(T, H, device=device).bfloat16()
    ids = torch.randint(E + 1, (T, 2), device=device)
    probs = torch.rand(T, 2, device=device)
    want = run(layer, x, ids.masked_fill(ids == E, -1), probs)
    for got, its in zip(run(layer, x, ids, probs, no_expert=E), want, strict=True):
        assert torch.equal(got, its)


def test_a_model_by_name_swapped_reused_and_compiled(device: torch.device) -> None:
    pytest.importorskip("transformers")
    from fp8moe_cutlass.integrations import transformers as fp8moe
    from transformers_models import error, exchange_gate_and_up, gradients, model_of

    fp8moe.register()
    model = model_of("Qwen3Moe", torch.bfloat16, num_hidden_layers=1).to(device)
    model.set_experts_implementation("grouped_mm")
    want = gradients(model)
    model.set_experts_implementation("fp8moe")
    got = gradients(model)
    swapped = copy.deepcopy(model)
    fp8moe.swap(swapped)
    with reuse_fp8_weights(swapped):
        same = gradients(swapped)
    model.forward = torch.compile(model.forward, fullgraph=True)
    compiled = gradients(model)
    exchange_gate_and_up(swapped)
    wrong = gradients(swapped)
    for name, its in want.items():
        assert error(got[name], its) < 0.1
        assert torch.equal(same[name], got[name])
        assert error(compiled[name], its) < 0.1
        back = wrong[name].roll(wrong[name].shape[1] // 2, 1) if "gate_up" in name else wrong[name]
        assert error(back, its) > 0.2


def test_a_captured_step_trains_as_an_eager_one(device: torch.device) -> None:
    """The how-to's, by torch's own AdamW: batches in turn, after the two steps that warm up."""
    pytest.importorskip("transformers")
    from fp8moe_cutlass.integrations import transformers as fp8moe
    from transformers_models import model_of, tokens

    fp8moe.register()
    page = (Path(__file__).parents[2] / "docs/how-to/hugging-face.md").read_text()
    [code] = [b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "captured_" in b]
    batches = [tokens(seed=seed).to(device) for seed in range(4)]
    models = [model_of("Qwen3Moe", torch.bfloat16).to(device) for _ in range(2)]
    made: list[Any] = []
    for model in models:
        model.set_experts_implementation("fp8moe")
        made.append({"lr": torch.tensor(3e-3, device=device), "capturable": True})
    eager, captured = models
    optimizer = torch.optim.AdamW(eager.parameters(), **made[0])
    want = []
    for ids in [batches[0], batches[0], *batches]:
        loss = eager(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(float(loss))
    names: dict[str, Any] = {"torch": torch, "model": captured, "adamw": made[1]}
    names["CompiledAdamW"] = torch.optim.AdamW
    exec(code, names)
    ids = batches[0].clone()
    graph, loss = names["captured_step"](ids)
    got = []
    for batch in batches:
        ids.copy_(batch)
        graph.replay()
        got.append(float(loss))
    assert got == pytest.approx(want[2:], abs=0.02)
    assert want[2] < want[0] - 0.1
