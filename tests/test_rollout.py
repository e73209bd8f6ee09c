"""The forward of inference engines, against their rules in plain torch (reference_engines.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import reference_engines as engines
from fp8moe_cutlass import Fp8Recipe, Fp8Tensor, autograd, nn, ops
from moe_problem import problem
from reference_engines import Quantized, weighted_sum


def test_output_weights_multiply_the_rows_of_the_down_projection(device: torch.device) -> None:
    """Bit for bit: each slot's row by itself comes from a forward with weights of 1."""
    p = problem(300, 3, 5, 208, 144).to(device)
    layer = p.experts(recipe=Fp8Recipe(weighting="output"))
    with torch.no_grad():
        one = torch.ones_like(p.probs[:, :1])
        rows = [layer(p.x, p.topk_idx[:, s : s + 1], one) for s in range(3)]
        out = layer(p.x, p.topk_idx, p.probs)
    assert torch.equal(out, weighted_sum(torch.stack(rows, dim=1).cpu(), p.probs.cpu()).to(device))
    unweighted = p.experts()
    with torch.no_grad():
        assert torch.equal(rows[0], unweighted(p.x, p.topk_idx[:, :1], one))
        assert not torch.equal(out, unweighted(p.x, p.topk_idx, p.probs))


def test_output_weights_where_a_lora_is_off() -> None:
    """Whoever moves the tokens may announce the gradients of a LoRA that the forward leaves out."""
    p, options = problem(64), autograd.Options(Fp8Recipe(weighting="output"))
    found = []
    for need in (None, autograd.Need(lora=True)):
        given = [t.clone().requires_grad_() for t in (p.x, p.probs, p.gate_up, p.down)]
        x, probs, *weights = given
        out = autograd.experts(x, p.topk_idx, probs, *weights, options, need=need)
        found.append(torch.autograd.grad(out, given, p.dout))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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


# ---- rounding -----------------------------------------------------------------------------------


def gates() -> Tensor:
    """Every finite bf16 above -87.5, below which silu vanishes beside any tile's floor."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return every[every.isfinite() & (every.float() > -87.5)]


def test_rounded_silu_is_the_nearest_bf16_for_every_gate(device: torch.device) -> None:
    """So h is RN(RN(silu) up), bit for bit. One gate per tile, or its neighbours hide it."""
    gate = gates()[:, None]
    z = torch.zeros(len(gate), 32, dtype=torch.bfloat16)
    z[:, :1] = gate
    for up in (1.0, -1.296875):
        z[:, 16] = up
        got = ops.act_quantize(z.to(device), rounding="silu", eps=0.0, scale_layout="row")
        h = engines.activation(torch.cat([gate, z[:, 16:17]], 1), "vllm").float()
        small = h[:, 0].abs() < 2.0**-110  # where a power of two stops at 2^126
        want = ops.quantize(torch.cat([h, torch.zeros(len(h), 15)], 1), eps=0.0)
        kept = ~small & ~h.isinf()[:, 0]
        for mine, its in ((got.data, want.data), (got.scale_inv, want.scale_inv)):
            bits = mine.cpu()[kept].contiguous().view(torch.uint8)
            assert torch.equal(bits, its[kept].contiguous().view(torch.uint8))


@pytest.mark.parametrize("inner", [128, 144])
@pytest.mark.parametrize("scale", ["pow2", "approx"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rounding", ["product", "silu"])
def test_rounding(
    rounding: Any, dtype: torch.dtype, scale: Any, inner: int, device: torch.device
) -> None:
    """h is a bf16: its codes are those of h rounded by the rule, but for one in 10^3 of "product",
    where silu in float32 decides."""
    g = torch.Generator().manual_seed(3)
    z, probs = torch.randn(200, 2 * inner, generator=g).to(dtype), torch.rand(200, generator=g)
    got = ops.act_quantize(z.to(device), rounding=rounding, scale=scale, scale_layout="row")
    gate, up = z.float().chunk(2, dim=1)
    silu = (gate.double() / (1 + torch.exp(-gate.double()))).float()
    silu = silu.bfloat16().float() if rounding == "silu" else silu
    h = (silu * up).bfloat16()
    want = ops.quantize(h.to(device), scale=scale)
    differ = (got.data.cpu().view(torch.uint8) != want.data.cpu().view(torch.uint8)).float().mean()
    assert differ <= (0 if rounding == "silu" and dtype == torch.bfloat16 else 1e-3)
    plain = ops.act_quantize(z.to(device), scale=scale, scale_layout="row")
    assert (plain.data.cpu().view(torch.uint8) != want.data.cpu().view(torch.uint8)).any()
    weighted = ops.act_quantize(
        z.to(device), probs=probs.to(device), rounding=rounding, scale="fp32", scale_layout="row"
    )
    want = ops.quantize((h.float() * probs[:, None]).to(device), scale="fp32")
    differ = (weighted.data.cpu().view(torch.uint8) != want.data.cpu().view(torch.uint8)).float()
    assert differ.mean() <= 1e-3


# ---- the layer ----------------------------------------------------------------------------------


def gemm_of(weights: Any, device: Any) -> engines.Gemm:
    """The library's GEMM of one expert at a time: an expert's rows have its bits in any batch."""

    def gemm(rows: Quantized, expert: int, projection: str) -> Tensor:
        w = getattr(weights, projection)
        one = Fp8Tensor(w.data[expert][None], w.scale_inv[expert][None], "block", w.pow2)
        m = len(rows.codes)
        scale = torch.nn.functional.pad(rows.scale.T, (0, -m % 4)).contiguous()
        a = Fp8Tensor(rows.codes.to(device), scale.to(device), "gemm", w.pow2)
        plan = ops.plan_from_counts(torch.tensor([m], dtype=torch.int32).to(device), capacity=m)
        return ops.grouped_gemm(a, one, plan).cpu()

    return gemm


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_layer_has_the_engines_bits(
    engine: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every bit, SGLang's by the approximate instructions of a GPU. A CPU has none: an element
    of h in 10^5 is rounded otherwise there."""
    approximate = engine == "sglang" and device.type == "cuda"
    if approximate:
        monkeypatch.setattr(engines, "largest_over", engines.on_gpu(engines.LARGEST_OVER))
        monkeypatch.setattr(engines, "silu", engines.on_gpu(engines.SILU))
    p = problem(300, 3, 5, 256, 128)
    p.x[:40] *= torch.exp2(torch.linspace(-40, 20, 40))[:, None].bfloat16()  # about the floors
    p.x[3] = 0
    q = p.to(device)
    layer = q.experts(recipe=Fp8Recipe.rollout(engine))
    with torch.no_grad():
        out = layer(q.x, q.topk_idx, q.probs).cpu()
    gemm = gemm_of(layer.quantize_weights(), device)
    want = engines.experts(p.x, p.topk_idx, p.probs, engine, gemm)
    assert torch.equal(q.run(layer).out.cpu(), out)
    equal = (out == want).all(1).float().mean()
    assert equal == 1 if engine == "vllm" or approximate else equal > 0.9
    assert (out - want).norm() < 1e-2 * want.norm()


def test_rollout_takes_the_names_of_two_engines() -> None:
    with pytest.raises(ValueError, match=r"\[rollout\] engine must be 'sglang' or 'vllm'; got 'x'"):
        Fp8Recipe.rollout("x")  # type: ignore[arg-type]


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_exported_codes_are_what_the_forward_multiplied(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(60)
    layer = p.experts(recipe=Fp8Recipe.rollout(engine))
    exported = dict(layer.fp8_tensors(fused=True))
    multiplied: list[Fp8Tensor] = []
    gemm = ops.grouped_gemm

    def spied(a: Any, w: Any, plan: Any, **more: Any) -> Any:
        multiplied.append(w)
        return gemm(a, w, plan, **more)

    monkeypatch.setattr(ops, "grouped_gemm", spied)
    with torch.no_grad():
        layer(p.x, p.topk_idx, p.probs)
    for w, name in zip(multiplied, ("gate_up_proj", "down_proj"), strict=True):
        assert torch.equal(w.data.view(torch.uint8), exported[name].view(torch.uint8))
        assert torch.equal(w.scale_inv, exported[f"{name}_scale_inv"])


def test_vllm_quantizes_exported_weights_again_to_the_same_values() -> None:
    """Dequantized in float32, then power-of-two scales with a floor of 1e-4."""
    layer = problem().experts(recipe=Fp8Recipe.rollout("vllm"))
    for w in (layer.quantize_weights().gate_up, layer.quantize_weights().down):
        again = ops.quantize_weight(w.dequantize("float32"), transposed=False, eps=1e-4)
        assert torch.equal(again.dequantize("float32"), w.dequantize("float32"))


def test_experts_of_a_checkpoint(device: torch.device) -> None:
    """Frozen codes by an engine's rule: the forward of the layer that wrote them."""
    p = problem(60).to(device)
    recipe = Fp8Recipe.rollout("sglang")
    layer = p.experts(recipe=recipe)
    tensors = dict(layer.fp8_tensors())
    frozen = nn.MoEExperts.from_fp8(tensors, num_experts=4, recipe=recipe, device=device)
    with torch.no_grad():
        assert torch.equal(frozen(p.x, p.topk_idx, p.probs), layer(p.x, p.topk_idx, p.probs))
