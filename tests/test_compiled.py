"""autograd.compiled: what the bf16 path has torch.compile fuse on a GPU, here with a backend that
counts and runs the graph as it is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fp8moe_cutlass.autograd import bf16
from fp8moe_cutlass.autograd import compiled as module
from moe_problem import assert_same, problem


class Graphs:
    """A backend of torch.compile."""

    def __init__(self) -> None:
        self.count = 0
        self.error: Exception | None = None

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        if self.error is not None:
            raise self.error
        return graph.forward


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Tensors with elements pass for a GPU's, and nothing has been compiled yet."""
    made = Graphs()
    real = torch.compile

    def compile(function: Any, options: Any = None, **given: Any) -> Any:
        return real(function, backend=made, **given)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(module, "_on_gpu", lambda tensors: all(t.numel() for t in tensors))
    monkeypatch.setattr(module, "_refused", [])
    module._compile.cache_clear()
    torch._dynamo.reset()
    return made


def _arguments(tokens: int, slots: int, width: int) -> dict[Any, tuple[torch.Tensor, ...]]:
    rows = tokens * slots
    dh, z = torch.randn(rows, width).bfloat16(), torch.randn(rows, 2 * width).bfloat16()
    row_of = torch.randint(-1, rows, (tokens, slots))
    return {
        bf16.sum_slots: (dh, row_of),
        bf16.swiglu: (z, torch.rand(rows)),
        bf16.swiglu_backward: (dh, z, torch.rand(rows)),
    }


@pytest.mark.parametrize("name", ["sum_slots", "swiglu", "swiglu_backward"])
def test_one_graph_per_width_for_any_number_of_rows(name: str, graphs: Graphs) -> None:
    function = getattr(bf16, name)
    for tokens in (5, 300, 0):
        for width in (8, 24):
            given = _arguments(tokens, 2, width)[function]
            got, want = function(*given), function.__wrapped__(*given)
            assert all(map(torch.equal, got, want))
    assert graphs.count == 2


def test_any_number_of_widths(graphs: Graphs) -> None:
    """torch gives up after compiling one code object eight times, and runs it eagerly unawares."""

    @module.compiled
    def traced(x: torch.Tensor) -> torch.Tensor:
        return x + int(torch.compiler.is_compiling())

    for width in range(8, 20):
        for rows in (3, 7):
            assert traced(torch.zeros(rows, width)).all()


def test_nothing_is_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compile", None)
    p = problem(32)
    p.run(p.experts(recipe=None))


def test_the_layer_at_two_token_counts(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for tokens in (48, 96):
        p = problem(tokens)
        results.append((p, p.run(p.experts(recipe=None))))
        with torch.no_grad():
            p.experts(recipe=None)(p.x, p.topk_idx, p.probs)
    assert graphs.count == 3
    monkeypatch.undo()
    for p, got in results:
        assert_same(got, p.run(p.experts(recipe=None)))


def test_no_compile_within_a_compile(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compile", None)
    p = problem(48)
    layer = p.experts(recipe=None)
    with torch.no_grad():
        got = torch.compile(layer, fullgraph=True)(p.x, p.topk_idx, p.probs)
        monkeypatch.undo()
        assert torch.equal(got, layer(p.x, p.topk_idx, p.probs))


def test_where_torch_cannot_compile_one_warning_says_so(graphs: Graphs) -> None:
    graphs.error = RuntimeError("no C compiler")
    p = problem(32)
    with pytest.warns(UserWarning, match=r"(?s)recipe=None runs eagerly.*no C compiler") as told:
        got = p.run(p.experts(recipe=None))
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(p.run(p.experts(recipe=None)), got)
    assert graphs.count == 1
