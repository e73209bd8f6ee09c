"""telemetry: counts against a plain recomputation, SNR against float64, and that looking changes
nothing."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8moe_cutlass import Fp8Recipe, Fp8Tensor, ops, telemetry
from fp8moe_cutlass.routing import RoutingPlan
from moe_problem import Problem, assert_same, problem


def uneven(**options: Any) -> Problem:
    """Tokens of very different size, so that values underflow and shifts are large."""
    p = problem(300, 2, 3, 208, 144, **options)
    p.x *= torch.exp2(torch.linspace(-9, 9, 300))[:, None].bfloat16()
    p.x[:, ::5] *= 2.0**-14
    p.x[7] = 0
    p.dout *= torch.exp2(torch.linspace(-12, 12, 300))[:, None].bfloat16()
    p.topk_idx[::11, 0] = -1
    return p


def watched(p: Problem, layer: Any) -> Any:
    with telemetry.watch(layer, every=1) as seen:
        p.run(layer)
    return seen.report()[""]


# ---- plain recomputation ------------------------------------------------------------------------


def share_underflowed(x: Tensor, q: Fp8Tensor) -> float:
    lost = total = 0
    for values, codes in zip(x.tolist(), q.data.float().tolist(), strict=True):
        for value, code in zip(values, codes, strict=True):
            total += value != 0
            lost += value != 0 and code == 0
    return lost / total


def transposed(q: Fp8Tensor, plan: RoutingPlan, columns: Fp8Tensor) -> tuple[float, list[int]]:
    """Share of nonzero codes flushed, and the histogram of shifts, row by row."""
    codes, flushed, total, shifts = q.data.float(), 0, 0, [0] * 17
    new, scale = columns.data.float(), columns.scale_inv
    for e in range(plan.experts):
        row, col = int(plan.row_offsets[e]), int(plan.col_offsets[e])
        for i in range(int(plan.tokens_per_expert[e])):
            token = int(plan.token_of_row[row + i])
            flushed += int(((codes[token] != 0) & (new[:, col + i] == 0)).sum())
            total += int((codes[token] != 0).sum())
            for b in range(q.scale_inv.shape[1]):
                if not codes[token, 128 * b : 128 * b + 128].any():
                    continue
                tile = (col + i) // 128
                if columns.scale_layout == "block":
                    s = float(scale[b, tile])
                else:
                    s = float(scale[tile, 128 * b : min(128 * b + 128, q.shape[1])].max())
                k = round(math.log2(s) - math.log2(float(q.scale_inv[token, b])))
                shifts[min(max(k, 0), 16)] += 1
    return flushed / total, shifts


@pytest.mark.parametrize("columns", ["block", "column"])
@pytest.mark.parametrize("grad_dtype", ["e4m3", "e5m2"])
def test_against_plain_counting(columns: Any, grad_dtype: Any) -> None:
    p = uneven()
    recipe = Fp8Recipe(columns=columns, grad_dtype=grad_dtype)
    report = watched(p, p.experts(recipe=recipe))
    plan = ops.route(3, topk_idx=p.topk_idx)
    for name, t, dtype in (("x", p.x, "e4m3"), ("dout", p.dout, grad_dtype)):
        q = ops.quantize(t, fp8_dtype=dtype)
        assert report["underflowed"][name] == pytest.approx(share_underflowed(t, q))
        turned = ops.permute_transpose_fp8(q, plan, columns=columns)
        flushed, shifts = transposed(q, plan, turned)
        got = report["transposes"][f"{name} columns"]
        assert got["underflowed"] == pytest.approx(flushed)
        assert got["shifts"] == shifts
        assert sum(map(bool, shifts)) > 3
    assert report["underflowed"]["x"] > 0.01
    assert report["transposes"]["x columns"]["underflowed"] > 0 or columns == "column"


@pytest.mark.parametrize(
    "options", [{}, {"preactivation": "save_fp8"}, {"preactivation": "recompute"}]
)
def test_underflow_of_h_and_dz(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes as the layer hands them to the GEMMs, values from the formula in float64."""
    p = uneven()
    p.x /= 64  # no gate so far out that its sigmoid is a float32 subnormal
    layer = p.experts(**options)
    taken: dict[str, Any] = {}

    def taking(name: str, op: Any) -> Any:
        def run(*args: Any, probs: Tensor, **how: Any) -> Any:
            made = op(*args, probs=probs, **how)
            taken[name] = made[0] if isinstance(made, tuple) else made, args, probs
            return made

        return run

    for name, op in (("h", "act_quantize"), ("dz", "act_quantize_backward")):
        monkeypatch.setattr(ops, op, taking(name, getattr(ops, op)))
    report = watched(p, layer)
    for name in ("h", "dz"):
        q, source, probs = taken[name]
        plan = source[-1]
        z = source[0 if name == "h" else 1]
        gate, up = z.double().chunk(2, dim=-1)
        prob = probs.double()[:, None]
        if name == "h":
            values = gate * gate.sigmoid() * up * prob
        else:
            dh, s = source[0].double() * prob, gate.sigmoid()
            values = torch.cat([dh * (s + gate * s * (1 - s)) * up, dh * gate * s], dim=1)
        rows = int(plan.row_offsets[-1])
        want = share_underflowed(values[:rows].bfloat16(), q.to_layout("row")[:rows])
        # A code of 0 made from an FP8 z of 0 counts as underflowed too.
        assert report["underflowed"][name] == pytest.approx(want, rel=0.02)
        assert want > 1e-4


# ---- looking ------------------------------------------------------------------------------------


def test_looking_changes_nothing_and_ends() -> None:
    p = problem(96)
    want = p.run(p.experts())
    layer = p.experts()
    with telemetry.watch(layer) as seen:
        assert_same(p.run(layer), want)
        once = seen.counters[""].counts.clone()
        layer.zero_grad()
        p.run(layer)
        assert torch.equal(seen.counters[""].counts, 2 * once)
        with torch.no_grad():
            layer(p.x, p.topk_idx, p.probs)
        assert torch.equal(seen.counters[""].counts, 2 * once)
    assert layer._counters is None
    p.run(layer)
    assert torch.equal(seen.counters[""].counts, 2 * once)
    seen.reset()
    assert not any(seen.report()[""]["underflowed"].values())


def test_layers_are_named() -> None:
    p = problem(64)
    module = nn.ModuleDict({"a": p.experts(), "b": p.experts(recipe=None), "c": p.experts()})
    with telemetry.watch(module) as seen:
        p.run(module["a"])
    report = seen.report()
    assert set(report) == {"a", "c"}
    # One token in eight: each of its two rows has two tiles.
    assert sum(report["a"]["transposes"]["x columns"]["shifts"]) == 64 // 8 * 2 * 2
    assert sum(report["c"]["transposes"]["x columns"]["shifts"]) == 0


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_assignments(tokens: int) -> None:
    p = problem(tokens, topk_idx=torch.full((tokens, 2), -1))
    report = watched(p, p.experts())
    assert report["underflowed"]["h"] == report["underflowed"]["dz"] == 0
    assert not any(report["transposes"]["x columns"]["shifts"])


def test_float32_scales_have_no_shifts() -> None:
    p = uneven()
    report = watched(p, p.experts(recipe=Fp8Recipe(scale="fp32", columns="column")))
    assert not any(report["transposes"]["x columns"]["shifts"])
    assert report["underflowed"]["x"] > 0.01


def test_refusals() -> None:
    p = problem(64)
    with pytest.raises(ValueError, match="must contain an FP8 MoEExperts; got Linear"):
        telemetry.enable(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="every must be at least 1; got 0"):
        telemetry.enable(p.experts(), every=0)
    with pytest.raises(ValueError, match="recipe"):
        telemetry.snr(p.experts(recipe=None), p.x, p.topk_idx, p.probs, p.dout)
    layer = p.experts()
    layer.add_lora(8, alpha=8)
    with pytest.raises(ValueError, match="weights alone; got a LoRA of 8"):
        telemetry.snr(layer, p.x, p.topk_idx, p.probs, p.dout)
    module = nn.Sequential(p.experts(), p.experts())
    with telemetry.watch(module[1]) as seen:
        with pytest.raises(RuntimeError, match=r"watched once at a time; got one .* already, 1"):
            telemetry.enable(module)
        assert module[0]._counters is None  # nothing of a watch that is refused
        p.run(module[1])
        assert seen.counters[""].counts.any()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"preactivation": "recompute"}], ids=["save", "recompute"])
def test_compiled_steps_count_alike(options: dict[str, Any], backend: str) -> None:
    p = uneven()
    counts = []
    for compiled in (False, True):
        layer = p.experts(**options)
        torch._dynamo.reset()
        run = torch.compile(layer, fullgraph=True, backend=backend) if compiled else layer
        with telemetry.watch(layer, every=1) as seen:
            for _ in range(2):
                run(p.x, p.topk_idx, p.probs).backward(p.dout)
            counts.append(seen.counters[""].counts)
    assert counts[0].any(dim=1).all()
    assert torch.equal(*counts)


# ---- GEMMs against bfloat16 ---------------------------------------------------------------------


def test_snr_of_each_gemm() -> None:
    """Two operands rounded to E4M3 leave about 28.7 dB (a relative error of 3.7%)."""
    p = problem(512, 2, 4, 256, 256)
    p.topk_idx[::9, 1] = -1
    layer = p.experts()
    found = telemetry.snr(layer, p.x, p.topk_idx, p.probs, p.dout)
    assert set(found) == {"fprop-1", "fprop-2", "dgrad-2", "dgrad-1", "wgrad-1", "wgrad-2"}
    assert all(27.5 < decibels < 30.5 for decibels in found.values()), found
    assert layer.gate_up_proj.grad is None
    turned = copy.deepcopy(layer)  # weights [E, in, out], as swap has Llama 4's
    turned._turned = True
    for name in turned.weight_names:
        setattr(turned, name, nn.Parameter(getattr(layer, name).detach().mT.contiguous()))
    assert telemetry.snr(turned, p.x, p.topk_idx, p.probs, p.dout) == found
    coarse = telemetry.snr(
        p.experts(recipe=Fp8Recipe(grad_dtype="e5m2")), p.x, p.topk_idx, p.probs, p.dout
    )
    for name in found:
        assert (coarse[name] < found[name] - 3) == (name not in ("fprop-1", "fprop-2")), coarse


def test_snr_is_by_the_options_of_the_layer() -> None:
    p = problem(512, 2, 4, 256, 256)
    usual = telemetry.snr(p.experts(), p.x, p.topk_idx, p.probs, p.dout)
    backward = {"dgrad-1", "wgrad-1", "wgrad-2"}  # what reads z again
    found = telemetry.snr(p.experts(preactivation="save_fp8"), p.x, p.topk_idx, p.probs, p.dout)
    assert {name for name in usual if found[name] < usual[name] - 1.5} == backward, found
    for more in ({}, {"weighting": "output"}):
        recipe = Fp8Recipe(activation_eps=1e6, **more)  # type: ignore[arg-type]
        found = telemetry.snr(p.experts(recipe=recipe), p.x, p.topk_idx, p.probs, p.dout)
        assert {name for name in usual if found[name] < usual[name] - 1.5} == {"fprop-2"}, found
    found = telemetry.snr(
        p.experts(recipe=Fp8Recipe.rollout("vllm")), p.x, p.topk_idx, p.probs, p.dout
    )
    assert all(27.5 < decibels < 30.5 for decibels in found.values()), found
