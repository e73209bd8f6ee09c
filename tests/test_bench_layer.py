"""benchmarks/layer.py: the arithmetic of its rows; all of it at tiny sizes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layer
import layer_memory as memory
from contender import Contender, Inputs, block, routing
from fp8moe_cutlass import ops
from fp8moe_cutlass.nn import MoEExperts
from kernel_trace import Kernel, kernels_of, profile, roles
from layer import OURS, QUANTIZING, REUSING, SHAPES, limit
from layer_baselines import TORCH, IndexingTorchExperts, peers
from moe_problem import problem
from reference import relative_error
from torch_experts import TorchExperts

CPU = torch.device("cpu")
V3 = SHAPES["cuda"]["DeepSeek-V3, 32 experts"]


# ---- arithmetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "kib"), [("bf16", 72), ("fp8", 41), ("none", 7.5)])
def test_saved_per_token_at_v3(keep: str, kib: float) -> None:
    t, e, s, h, i = V3.values()
    saved = memory.saved_bytes(t, s, e, h, i, keep=keep)
    # Codes and scales of x, probs, the plan's three indices an assignment, its offsets and blocks.
    expected = t * (h + 4 * h // 128) + 4 * t * s + 4 * (3 * t * s + 3 * e + 2 + 8)
    expected += 16 * ((t * s + 127 * e) // 128)
    expected += {"bf16": t * s * 4 * i, "fp8": t * s * (2 * i + 4 * 2 * i // 128), "none": 0}[keep]
    assert expected <= saved <= expected + 64  # sections of the plan start at multiples of 16 bytes
    assert saved / t < kib * 1024
    assert memory.bf16_saved_bytes(t, s, h, i) / t == 208 * 1024


def test_limit_is_arithmetic_for_many_tokens_and_bytes_for_few() -> None:
    limits: Any = SimpleNamespace(tensor_tflops=1200.0, copy_tb_s=4.0)  # of an H200, about
    many = limit(V3, limits, parts=3, experts_used=32)
    assert many["flops"] == 3 * 2 * 32768 * (4096 * 7168 + 7168 * 2048)
    assert many["limit_ms"] == pytest.approx(many["flops"] / 1200e9)
    few = limit({**V3, "T": 1}, limits, parts=1, experts_used=8)
    assert few["bytes"] == 8 * 3 * 7168 * 2048 + 2 * 2 * 7168
    assert few["limit_ms"] == pytest.approx(few["bytes"] / 4e9)


def test_routings() -> None:
    for kind in ("random", "zipf"):
        idx = routing(kind, 500, 16, 4, CPU)
        assert idx.shape == (500, 4)
        assert all(len(set(row)) == 4 for row in idx.tolist())
        counts = torch.bincount(idx.flatten(), minlength=16)
        assert (counts[0] > 3 * counts[12:].float().mean()) == (kind == "zipf")
    assert not routing("one-hot", 5, 16, 4, CPU).any()


# ---- contenders and kernels ---------------------------------------------------------------------


@pytest.mark.parametrize("peer", [TorchExperts, IndexingTorchExperts])
def test_the_torch_peers_compute_the_block(peer: type[TorchExperts]) -> None:
    p = problem(200, 3, 5)
    layer = p.experts()
    got, want = p.run(peer(layer, 3)), p.truth()
    for name in vars(want):
        assert relative_error(getattr(got, name), getattr(want, name)) < 0.006, name


def test_kernels_belong_to_the_operator_that_launched_them() -> None:
    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, link: int = 0) -> Any:
        args = {"correlation": link}
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events = [
        event("cpu_op", "fp8moe::quantize", 0, 10),
        event("cuda_runtime", "cudaLaunchKernelExC", 5, 1, link=1),
        event("cpu_op", "aten::add", 11, 10),
        event("cuda_runtime", "cudaLaunchKernel", 12, 1, link=2),
        event("kernel", "rows", 20, 7, tid=99, link=1),
        event("cpu_op", "fp8moe::quantize", 30, 10, tid=2),
        event("cuda_runtime", "cudaLaunchKernel", 31, 1, tid=1, link=3),  # of another thread
        event("cuda_driver", "cuLaunchKernelEx", 32, 1, tid=2, link=4),
        event("kernel", "add", 40, 3, tid=99, link=2),
        event("kernel", "other", 50, 2, tid=99, link=3),
        event("kernel", "rows", 60, 5, tid=99, link=4),
    ]
    assert kernels_of(events, cuda=True) == [
        Kernel("quantize", 0, "rows", 7),
        Kernel("torch", 0, "add", 3),
        Kernel("torch", 0, "other", 2),
        Kernel("quantize", 1, "rows", 5),
    ]


def test_roles_of_a_step() -> None:
    p = problem(64)
    layer = p.experts()
    p.run(layer)
    found = roles(profile(lambda: p.run(layer), CPU))
    assert list(found) == [
        *("route", "quantize x", "quantize gate_up", "quantize down"),
        *("permute x", "fprop-1", "swiglu", "fprop-2", "unpermute"),
        *("quantize dout", "permute dout", "dgrad-2", "swiglu backward", "dgrad-1"),
        *("permute backward", "transpose x", "wgrad-1", "transpose dout", "wgrad-2"),
    ]
    assert min(found.values()) > 0


@pytest.mark.parametrize("reuse", [False, True])
def test_a_step_quantizes_its_weights_or_reuses_them(
    monkeypatch: pytest.MonkeyPatch, reuse: bool
) -> None:
    calls = []
    honest = ops.quantize_weight

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return honest(*args, **kwargs)

    monkeypatch.setattr(ops, "quantize_weight", counting)
    shape = block(16, 2, 2, 128, 128)
    module = MoEExperts(2, 128, 128)
    contender = Contender(module, Inputs.random(shape, CPU), reuse)
    contender.step()
    calls.clear()
    contender.step()
    contender.step()
    assert len(calls) == (0 if reuse else 4)  # both weights, in both steps
    assert module.down_proj.grad is not None


# ---- the whole ----------------------------------------------------------------------------------

LIMITS: Any = SimpleNamespace(device=CPU, launch=None, tensor_tflops=0.1, copy_tb_s=0.01)


@pytest.fixture(scope="module")
def record() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "Limits", lambda device: LIMITS)
        yield layer.run_layer(CPU, quick=True)


def test_the_full_record(record: dict[str, Any]) -> None:
    rows = {(r["variant"], r["shape"]["T"]): r for r in record["results"]}
    assert [r["variant"] for r in record["results"]][:2] == [QUANTIZING, REUSING]
    for row in rows.values():
        assert row["repeat"]["min"] <= row["ms"] <= row["repeat"]["max"]
        assert "errors" not in row
    variants = {variant for variant, _ in rows}
    for part in ("zipf", "one-hot", "main_grad", "recompute", "pre-activation", "no_grad"):
        assert any(part in variant for variant in variants), part
    assert {t for v, t in rows if v == "forward, no_grad"} == {1, 16, 64}
    assert rows[QUANTIZING, 64]["peers"].keys() == {TORCH}
    reused = rows[REUSING, 64]
    assert reused["peers"][TORCH] > 0
    assert len(reused["kernels"]) == 17
    # By arithmetic only for those whose saved tensors are known.
    saved = {who: m.get("saved_arithmetic") for who, m in reused["memory"].items()}
    assert saved.pop(OURS) < saved.pop(TORCH)
    assert saved == {"torch bf16, index_select and index_add": None}


def test_a_failing_contender_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(TorchExperts, "forward", broken)
    monkeypatch.setattr(layer, "Limits", lambda device: LIMITS)
    monkeypatch.setitem(SHAPES, "quick", {"tiny": block(16, 2, 2, 128, 128)})
    rows = layer.run_layer(CPU, quick=True)["results"]
    errors = dict.fromkeys(peers(CPU), "RuntimeError: no such kernel")
    assert all(row["errors"] == errors for row in rows)
    assert all(row["ms"] > 0 and not row["peers"] for row in rows)
