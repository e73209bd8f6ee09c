"""telemetry on CUDA: the CPU's counts, under graph replay as well, without a host sync."""

from __future__ import annotations

import pytest
import torch
from test_layer_gpu import Captured, no_sync, other_inputs, routing_kinds, step

from fp8moe_cutlass import Fp8Recipe, telemetry
from moe_problem import moved, problem

COLUMNS = pytest.mark.parametrize("columns", ["block", "column"])


@COLUMNS
def test_counts_what_the_cpu_counts(columns: str, device: torch.device) -> None:
    """x and dout bit for bit; h and dz come after a GEMM, whose sums may differ in the last bit."""
    p = problem(300, 2, 3, 208, 144)
    p.x *= torch.exp2(torch.linspace(-9, 3, 300))[:, None].bfloat16()
    reports = []
    for q in (p, moved(p, device)):
        layer = q.experts(recipe=Fp8Recipe(columns=columns))
        with telemetry.watch(layer) as seen:
            q.run(layer)
        reports.append(seen.report()[""])
    cpu, cuda = reports
    assert cuda["transposes"] == cpu["transposes"]
    for name in ("x", "dout"):
        assert cuda["underflowed"][name] == cpu["underflowed"][name]
    for name in ("h", "dz"):
        assert cuda["underflowed"][name] == pytest.approx(cpu["underflowed"][name], abs=1e-3)


@COLUMNS
def test_replays_count(columns: str, device: torch.device) -> None:
    p = moved(problem(384, 3, 8, 256, 128), device)
    layer = p.experts(recipe=Fp8Recipe(columns=columns))
    params = tuple(layer.parameters())
    kinds = routing_kinds(384, 3, 8)
    inputs = [other_inputs(p, next(kinds), seed) for seed in range(6)]
    with telemetry.watch(layer) as seen:
        captured = Captured(layer, p)
        seen.reset()
        for q in inputs:
            captured(q)
        replayed = seen.report()
        seen.reset()
        for q in inputs:
            step(layer, q, params)
        assert seen.report() == replayed
    assert sum(replayed[""]["transposes"]["x columns"]["shifts"]) > 0


def test_no_host_sync(device: torch.device) -> None:
    p = moved(problem(384, 2, 4), device)
    layer = p.experts()
    with telemetry.watch(layer):
        p.run(layer)
        with no_sync():
            p.run(layer)


def test_snr(device: torch.device) -> None:
    p = problem(512, 2, 4, 256, 256)
    found = []
    for q in (p, moved(p, device)):
        layer = q.experts()
        found.append(telemetry.snr(layer, q.x, q.topk_idx, q.probs, q.dout))
    for name, decibels in found[0].items():
        assert found[1][name] == pytest.approx(decibels, abs=0.2), name
