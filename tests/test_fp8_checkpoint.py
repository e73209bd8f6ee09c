"""Experts of an FP8 checkpoint: read, run, trained through and written again."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from fp8moe_cutlass import Fp8Recipe, Fp8Tensor, ops, telemetry
from fp8moe_cutlass.autograd import weights as fp8_weights
from fp8moe_cutlass.nn import MoE, MoEExperts, Router, reuse_fp8_weights
from moe_problem import Problem, problem

E, H, I = 3, 256, 128
PREFIX = "model.layers.3.mlp.experts."
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "recompute": {"transposed_weights": "recompute"},
    "recompute_z": {"preactivation": "recompute"},
    "fp8_z": {"preactivation": "save_fp8"},
    "e5m2": {"recipe": Fp8Recipe(grad_dtype="e5m2")},
    "fp32": {"recipe": Fp8Recipe(scale="fp32", columns="column")},
    "delay_wgrad": {"delay_wgrad": True},
}


def trained(i: int = I, **options: Any) -> tuple[Problem, MoEExperts]:
    """A layer that quantizes, of a problem of its weights."""
    p = problem(64, 2, E, H, i)
    return p, p.experts(**options)


def tensors_of(layer: MoEExperts, **how: Any) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in layer.fp8_tensors(PREFIX, **how)}


def frozen(tensors: dict[str, Tensor], **options: Any) -> MoEExperts:
    return MoEExperts.from_fp8(tensors, PREFIX, num_experts=E, **options)


def small(**options: Any) -> tuple[Problem, MoEExperts, dict[str, Tensor]]:
    p, layer = trained()
    tensors = tensors_of(layer)
    return p, frozen(tensors, **options), tensors


def step(p: Problem, run: Any, **call: Any) -> list[Tensor]:
    """Output and the gradients of x and probs."""
    x, probs = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_()
    out = run(x, p.topk_idx, probs, **call)
    out.backward(p.dout)
    return [out.detach(), x.grad, probs.grad]  # type: ignore[list-item]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(
        x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip(a.values(), b.values(), strict=True)
    )


# ---- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_layer_that_quantizes(name: str, fused: bool) -> None:
    p, layer = trained(**OPTIONS[name])
    tensors = tensors_of(layer, fused=fused)
    got = frozen(tensors, **OPTIONS[name])
    assert same(step(p, got), step(p, layer))
    assert same_bytes(tensors_of(got, fused=fused), tensors)
    assert [w.grad for w in got.parameters()] == [None] * 4
    got.backward_dw()
    with torch.no_grad():
        assert torch.equal(got(p.x, p.topk_idx, p.probs), layer(p.x, p.topk_idx, p.probs))


def any_scales(p: Problem, dtype: torch.dtype) -> tuple[Problem, dict[str, Tensor]]:
    """Fused tensors, whose scales are powers of two in e8m0 alone; the problem of their values."""
    tensors, values = {}, []
    for name, w in (("gate_up_proj", p.gate_up), ("down_proj", p.down)):
        q = ops.quantize_weight(w, transposed=False, scale="pow2" if dtype == E8M0 else "amax")
        scale: Any = q.scale_inv.to(dtype)
        tensors[PREFIX + name], tensors[f"{PREFIX}{name}_scale_inv"] = q.data, scale
        values.append(Fp8Tensor(q.data, scale.float(), "block", False).dequantize("float32"))
    return replace(p, gate_up=values[0], down=values[1]), tensors


@pytest.mark.parametrize("i", [128, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E8M0])
def test_scales_of_any_kind(dtype: torch.dtype, i: int) -> None:
    """Beside float64's products of the exact weights: what activations lose alone."""
    p, tensors = any_scales(problem(64, 2, E, H, i), dtype)
    layer = frozen(tensors)
    assert layer.gate_up_proj_scale_inv.dtype == layer.down_proj_scale_inv.dtype == dtype
    assert same_bytes(tensors_of(layer, fused=True), tensors)
    truth = p.truth()
    for got, want in zip(step(p, layer), (truth.out, truth.dx, truth.dprobs), strict=True):
        assert float((got.double() - want).norm() / want.norm()) < 0.055


def test_rows_that_came_grouped() -> None:
    p, layer = trained()
    got = frozen(tensors_of(layer))
    counts = [30, 0, 34]
    assert torch.equal(got.forward_rows(p.x, counts), layer.forward_rows(p.x, counts))


def test_one_byte_per_parameter() -> None:
    p, layer, _ = small()
    parameters = E * 3 * H * I
    assert sum(w.nbytes for w in layer.parameters()) < 1.001 * parameters
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(p.x.clone().requires_grad_(), p.topk_idx, p.probs)
    own = {w.untyped_storage().data_ptr() for w in layer.parameters()}
    rest = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in saved
        if t.untyped_storage().data_ptr() not in own
    }
    assert sum(rest.values()) < 64 * 2 * (4 * I + 64)  # z, probs and the plan


def test_one_expert_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, layer = trained()
    tensors, read, quantized = tensors_of(layer), [], []

    class Lazy(Mapping[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return tensors[name]

        def __contains__(self, name: object) -> bool:
            return name in tensors

        def __iter__(self) -> Iterator[str]:
            return iter(tensors)

        def __len__(self) -> int:
            return len(tensors)

    MoEExperts.from_fp8(Lazy(), PREFIX, num_experts=E)
    experts = [int(name.removeprefix(PREFIX)[0]) for name in read]
    assert experts == sorted(experts)
    assert len(read) == len(tensors) + 3  # sizes first
    quantize = ops.quantize_weight

    def spy(w: Tensor, **how: Any) -> Any:
        quantized.append(len(w))
        return quantize(w, **how)

    monkeypatch.setattr(fp8_weights.ops, "quantize_weight", spy)
    written = layer.fp8_tensors(PREFIX)
    assert not quantized
    next(written)
    assert quantized == [1]
    assert len(list(written)) == E * 6 - 1
    assert quantized == [1] * E * 3


# ---- dgrad's copy -------------------------------------------------------------------------------


def test_the_copy_is_kept_where_weights_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    p, layer, _ = small()
    want, turned = step(p, layer), []
    turn = ops.turn_weight
    monkeypatch.setattr(
        fp8_weights.ops, "turn_weight", lambda *a, **k: turned.append(0) or turn(*a, **k)
    )
    step(p, layer)
    assert len(turned) == 2  # remade in the backward
    kept = layer.quantize_weights()
    for _ in range(2):
        assert same(step(p, layer, weights=kept), want)
    assert len(turned) == 4
    with reuse_fp8_weights(layer):
        for _ in range(2):
            assert same(step(p, layer), want)
    assert len(turned) == 6
    assert kept.gate_up.data.data_ptr() == layer.gate_up_proj.data_ptr()
    del layer
    recompute = small(transposed_weights="recompute")[1].quantize_weights()
    assert recompute.gate_up_t is None
    assert recompute.down_t is None


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj_scale_inv"])
def test_reuse_sees_what_is_written(name: str) -> None:
    _, layer, _ = small()
    rule = f"{name}, which has been written"
    with pytest.raises(RuntimeError, match=rule), reuse_fp8_weights(layer), torch.no_grad():
        getattr(layer, name).view(torch.uint8).zero_()
    rule = "down_proj, which quantizes to other codes"
    with pytest.raises(RuntimeError, match=rule), reuse_fp8_weights(layer, check=True):
        layer.down_proj.data.view(torch.uint8).fill_(1)


def test_update_is_refused() -> None:
    _, layer, _ = small()
    with pytest.raises(ValueError, match=r"\[Fp8Weights\] layer must hold parameters to quantize"):
        layer.quantize_weights().update_(layer)


# ---- how it runs --------------------------------------------------------------------------------


def test_compiled() -> None:
    p, layer, _ = small()
    want = step(p, layer)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert same(step(p, run), want)
    with reuse_fp8_weights(layer):
        assert same(step(p, run), want)


COMPILED_TWICE = """
import torch
from fp8moe_cutlass.nn import MoEExperts
layer = MoEExperts(2, 128, 128, dtype=torch.float8_e4m3fn)
run = torch.compile(layer, fullgraph=True, backend="eager")
call = torch.randn(4, 128).bfloat16(), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
run(*call)
with torch.compiler.set_stance("fail_on_recompile"):
    run(*call)
"""


@pytest.mark.slow
def test_the_first_graph_is_the_last() -> None:
    """In a process that has made no Fp8Tensor before it compiles."""
    subprocess.run([sys.executable, "-c", COMPILED_TWICE], check=True, timeout=300)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool) -> None:
    p, layer, _ = small()

    def run(*batch: Tensor) -> Tensor:
        out: Any = checkpoint(layer, *batch, use_reentrant=reentrant)
        return out

    assert same(step(p, run), step(p, layer))


def test_two_forwards_in_flight() -> None:
    p, layer, _ = small()
    x = [p.x.clone().requires_grad_() for _ in range(2)]
    outs = [layer(t, p.topk_idx, p.probs) for t in x]
    for out in outs:
        out.backward(p.dout)
    want = step(p, layer)[1]
    assert all(torch.equal(t.grad, want) for t in x)  # type: ignore[arg-type]


def test_in_a_moe_whose_router_trains() -> None:
    p, layer, _ = small()
    moe = MoE(Router(H, num_experts=E, top_k=2), layer)
    trainable = {name for name, w in moe.named_parameters() if w.requires_grad}
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2)
    before = [w.detach().clone() for w in moe.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        moe(p.x.float()).float().square().mean().backward()
    optimizer.step()
    changed = {
        name
        for (name, w), old in zip(moe.named_parameters(), before, strict=True)
        if not torch.equal(w.view(torch.uint8), old.view(torch.uint8))
    }
    assert changed == trainable
    assert all(name.startswith("router.") for name in trainable)


def test_telemetry() -> None:
    p, layer, _ = small()
    with telemetry.watch(layer, every=1) as seen:
        step(p, layer)
    assert seen.report()[""]["underflowed"]["dz"] > 0
    with pytest.raises(ValueError, match="must hold parameters before quantization"):
        telemetry.snr(layer, p.x, p.topk_idx, p.probs, p.dout)


# ---- as a module --------------------------------------------------------------------------------


def test_moves_and_keeps_its_dtypes() -> None:
    p, layer, tensors = small()
    want = step(p, layer)
    model = nn.ModuleList([layer, nn.Linear(8, 8)])
    for cast in (model.bfloat16, model.half, model.double, lambda: model.to("cpu", torch.float16)):
        cast()
        assert same_bytes(tensors_of(layer), tensors)
    assert model[1].weight.dtype == torch.float16
    with pytest.raises(RuntimeError, match=r"FP8 weights cannot be cast; got torch\.float16"):
        layer.type(torch.float16)
    assert same_bytes(tensors_of(layer), tensors)
    assert layer.to("meta").gate_up_proj.dtype == E4M3
    layer.to_empty(device="cpu")
    layer.load_state_dict(frozen(tensors).state_dict())
    assert same(step(p, layer), want)


def test_copies(tmp_path: Path) -> None:
    p, layer, tensors = small()
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    loaded = MoEExperts(E, H, I, dtype=E4M3)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    for made in (copy.deepcopy(layer), loaded):
        assert same(step(p, made), step(p, layer))
        assert same_bytes(tensors_of(made), tensors)
        assert not any(w.requires_grad for w in made.parameters())


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_is_the_fused_form(assign: bool) -> None:
    p, layer, _ = small()
    state = {PREFIX + name: w for name, w in layer.state_dict().items()}
    assert same_bytes(tensors_of(frozen(state)), tensors_of(layer))
    empty = MoEExperts(E, H, I, dtype=E4M3, device="meta" if assign else "cpu")
    empty.load_state_dict(layer.state_dict(), assign=assign)
    assert same(step(p, empty), step(p, layer))


def test_state_of_other_dtypes_is_refused() -> None:
    _, layer, _ = small()
    codes = layer.state_dict()
    values = {name: torch.ones(w.shape) for name, w in codes.items()}
    other = MoEExperts(E, H, I)
    before = other.gate_up_proj.detach().clone()
    for into, state in ((layer, values), (other, codes)):
        with pytest.raises(RuntimeError, match=r"gate_up_proj must be torch\.\w+, as the layer's"):
            into.load_state_dict(state, strict=False)
    assert torch.equal(other.gate_up_proj, before)
    assert same_bytes(layer.state_dict(), codes)
    with pytest.raises(RuntimeError, match=r"down_proj_scale_inv must be torch\.float32"):
        layer.load_state_dict({"down_proj_scale_inv": torch.ones(E, 2, 1).to(E8M0)}, strict=False)


def test_an_empty_layer_is_zero() -> None:
    p, _ = trained()
    empty = MoEExperts(E, H, I, dtype=E4M3)
    assert not empty(p.x, p.topk_idx, p.probs).any()


# ---- what is refused ----------------------------------------------------------------------------


def test_codes_are_not_trained() -> None:
    p, layer, _ = small()
    layer.requires_grad_(True)
    rule = r"\[MoEExperts\] gate_up_proj holds FP8 codes and must be a frozen parameter; got one th"
    with pytest.raises(RuntimeError, match=rule):
        layer(p.x, p.topk_idx, p.probs)
    with torch.no_grad():
        layer(p.x, p.topk_idx, p.probs)


def test_codes_are_not_computed() -> None:
    class Twice(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return (2 * w.float()).to(w.dtype)

    p, layer, _ = small()
    parametrize.register_parametrization(layer, "down_proj", Twice(), unsafe=True)
    with pytest.raises(RuntimeError, match=r"down_proj holds FP8 codes .* got a computed one"):
        layer(p.x, p.topk_idx, p.probs)


def test_a_recipe_is_needed() -> None:
    _, _, tensors = small()
    with pytest.raises(ValueError, match="FP8 weights need an FP8 recipe; got recipe=None"):
        frozen(tensors, recipe=None)
    with pytest.raises(ValueError, match=r"\[fp8_tensors\] the layer must have an FP8 recipe"):
        MoEExperts(E, H, I, recipe=None).fp8_tensors()


def test_blocks_of_gate_and_up() -> None:
    """Where I is no multiple of 128 a fused block has rows of both."""
    _, layer = trained(192)
    apart = tensors_of(layer)
    assert apart[f"{PREFIX}1.up_proj.weight_scale_inv"].shape == (2, 2)
    with pytest.raises(ValueError, match=r"0\.gate_proj\.weight must have a multiple of 128 rows"):
        frozen(apart)
    fused = frozen(tensors_of(layer, fused=True))
    with pytest.raises(ValueError, match=r"\[fp8_tensors\] fused must be True where I is no"):
        fused.fp8_tensors()


KEYS: dict[str, tuple[bool, str, Any, str]] = {
    # name: (fused, key, what becomes of it, what is said)
    "no tensors": (False, "0.down_proj.weight", None, "gate_up_proj or .*0.down_proj.weight"),
    "a missing expert": (False, "2.up_proj.weight", None, "must have .*2.up_proj.weight; got"),
    "a missing scale": (False, "1.down_proj.weight_scale_inv", None, "must have "),
    "a missing fused scale": (True, "down_proj_scale_inv", None, "must have "),
    "e5m2": (False, "1.gate_proj.weight", lambda t: t.float().to(torch.float8_e5m2), "e5m2"),
    "values": (True, "gate_up_proj", lambda t: t.float(), "must be float8_e4m3fn; got"),
    "another size": (False, "1.down_proj.weight", lambda t: t[:128], r"be \[256, 128\]; got \[128"),
    "another rank": (True, "down_proj", lambda t: t[0], r"must be \[3, H, I\]; got \[256, 128\]"),
    "fewer experts": (True, "down_proj", lambda t: t[:2], r"must be \[3, H, I\]; got \[2, 256"),
    "other blocks": (
        *(False, "2.gate_proj.weight_scale_inv", lambda t: t.repeat(2, 2)),
        r"must be \[1, 2\], one scale per 128x128 block of \[128, 256\]; got \[2, 4\]",
    ),
    "a scale per row": (True, "down_proj_scale_inv", lambda t: t.repeat(1, 128, 1), "got .3, 256"),
    "squeezed": (True, "down_proj_scale_inv", lambda t: t.squeeze(-1), r"got \[3, 2\]"),
    "half scales": (
        True,
        "down_proj_scale_inv",
        lambda t: t.half(),
        "float32, bfloat16 or float8_",
    ),
    "another projection": (False, "1.bias_proj.weight", None, "which would not be read"),
    "a bias": (False, "1.up_proj.bias", None, "weights and scales alone, per expert; got"),
    "a fused bias": (True, "gate_up_proj_bias", None, "weights and scales alone, fused; got"),
    "both forms": (True, "1.up_proj.weight", None, "weights and scales alone, fused; got"),
    "an activation's scale": (False, "0.up_proj.input_scale", None, "which would not be read"),
    "scales of two kinds": (
        *(False, "2.down_proj.weight_scale_inv", lambda t: t.bfloat16()),
        "as the first expert's; got torch.bfloat16",
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_bad_tensors_are_named(name: str) -> None:
    fused, key, change, said = KEYS[name]
    _, layer = trained()
    tensors = tensors_of(layer, fused=fused)
    was = tensors.pop(PREFIX + key, None)
    if was is None:  # of what the file should not have
        tensors[PREFIX + key] = torch.ones(2)
    if change is not None:
        tensors[PREFIX + key] = change(was)
    with pytest.raises(ValueError, match=said) as raised:
        frozen(tensors)
    assert str(raised.value).startswith("[from_fp8] ")
    assert PREFIX + key in str(raised.value)


def test_a_half_written_file_is_refused(tmp_path: Path) -> None:
    """By safetensors, as it opens the file: no tensor is read."""
    safetensors = pytest.importorskip("safetensors.torch")
    _, layer = trained()
    path = tmp_path / "experts.safetensors"
    safetensors.save_file(tensors_of(layer), path)
    assert len(frozen(safetensors.load_file(path)).local_experts) == E
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Exception, match="file not fully covered"):
        safetensors.load_file(path)


def test_other_arguments() -> None:
    _, _, tensors = small()
    with pytest.raises(ValueError, match=r"\[from_fp8\] tensors must be a mapping by name; got li"):
        MoEExperts.from_fp8(list(tensors), num_experts=E)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[from_fp8\] num_experts must be at least 1; got 0"):
        MoEExperts.from_fp8(tensors, PREFIX, num_experts=0)
    for fewer in (1, E - 1):
        with pytest.raises(ValueError, match=rf"num_experts must count all .* got {fewer}, and "):
            MoEExperts.from_fp8(tensors, PREFIX, num_experts=fewer)
    with pytest.raises(TypeError, match="dtype"):
        frozen(tensors, dtype=torch.bfloat16)
