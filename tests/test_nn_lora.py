"""MoEExperts.add_lora: against float64, its gradients, its state dict, merging."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8moe_cutlass import Fp8Recipe, nn
from fp8moe_cutlass.nn.lora import NAMES, factors

E, H, I = 4, 256, 128


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def base_layer(kind: str, inner: int = I, **options: Any) -> nn.MoEExperts:
    made = nn.MoEExperts(E, H, inner, **options)
    if kind == "values":
        return made
    tensors = dict(nn.MoEExperts(E, H, inner).fp8_tensors(fused=True))
    return nn.MoEExperts.from_fp8(tensors, num_experts=E, **options)


def with_lora(
    kind: str = "codes", rank: int = 16, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> nn.MoEExperts:
    """A layer whose low-rank terms are about a third of its output."""
    layer = base_layer(kind, **options)
    layer.add_lora(rank, alpha=2 * rank, dtype=dtype)
    with torch.no_grad():
        for b in factors(layer)[1::2]:
            torch.nn.init.normal_(b, std=0.2 * rank**-0.5)
    return layer


def problem(tokens: int = 96, *, device: Any = "cpu") -> dict[str, Tensor]:
    """Expert 2 is empty, a slot is dropped."""
    ids = torch.tensor([0, 1, 3])[torch.rand(tokens, 3).argsort(1)[:, :2]]
    ids[5, 1] = -1
    return {
        "x": torch.randn(tokens, H).bfloat16().to(device).requires_grad_(),
        "topk_idx": ids.to(device),
        "topk_weights": torch.rand(tokens, 2).to(device).requires_grad_(),
    }


def values_of(layer: nn.MoEExperts) -> tuple[Tensor, Tensor]:
    """The weights in float64, as they are multiplied."""
    q = layer.quantize_weights()
    return tuple(t.dequantize("float32").double().cpu() for t in (q.gate_up, q.down))  # type: ignore[return-value]


def exact(layer: nn.MoEExperts, given: dict[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    """out and all gradients in float64, expert by expert, over the weights that are multiplied."""
    gate_up, down = values_of(layer)
    leaves = {
        name: t.detach().double().cpu() for name, t in zip(NAMES, factors(layer), strict=True)
    }
    leaves["x"], leaves["probs"] = (
        given[key].detach().double().cpu() for key in ("x", "topk_weights")
    )
    for t in leaves.values():
        t.requires_grad_()
    a1, b1, a2, b2 = (leaves[name] for name in NAMES)
    s = layer._lora.scaling if layer._lora else 0.0
    w1, w2 = gate_up + s * b1 @ a1, down + s * b2 @ a2
    out = torch.zeros(leaves["x"].shape, dtype=torch.float64)
    ids = given["topk_idx"].cpu()
    for e in range(E):
        t, slot = (ids == e).nonzero(as_tuple=True)
        z = leaves["x"][t] @ w1[e].T
        gate, up = z.chunk(2, -1)
        h = torch.nn.functional.silu(gate) * up * leaves["probs"][t, slot, None]
        out = out.index_add(0, t, h @ w2[e].T)
    grads = torch.autograd.grad(out, list(leaves.values()), dout.double().cpu())
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def run(layer: nn.MoEExperts, given: dict[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    out = layer(**given)
    wanted = [p for p in layer.parameters() if p.requires_grad]
    grads = torch.autograd.grad(out, [given["x"], given["topk_weights"], *wanted], dout)
    names = [name for name, p in layer.named_parameters() if p.requires_grad]
    made = {"out": out.detach(), **dict(zip(["x", "probs", *names], grads, strict=True))}
    return {name: t.cpu() for name, t in made.items()}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], factors: float = 0.075) -> None:
    for name, t in got.items():
        error = (t.double() - want[name]).norm() / want[name].norm()
        limit = factors if "lora" in name else 0.8 * factors
        assert error < limit, f"{name}: {error:.4f}"
        assert t.isfinite().all()


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, t in want.items():
        assert torch.equal(got[name], t), name


@pytest.mark.parametrize("rank", [8, 16, 24, 64])
@pytest.mark.parametrize("kind", ["codes", "values"])
def test_against_float64(kind: str, rank: int, on: torch.device) -> None:
    layer, given = with_lora(kind, rank).to(on), problem(device=on)
    dout = torch.randn(given["x"].shape).bfloat16().to(on)
    got = run(layer, given, dout)
    assert set(got) == {"out", "x", "probs", *NAMES}
    assert_close(got, exact(layer, given, dout))
    for name in NAMES:
        assert got[name].dtype == torch.bfloat16
        assert not got[name][2].any()  # expert 2 has no tokens
    same_bits(run(layer, given, dout), got)


def test_the_low_rank_term_is_there(on: torch.device) -> None:
    """What LoRA adds to out is right to a few percent of itself, not of out."""
    layer, given = with_lora().to(on), problem(device=on)
    with torch.no_grad():
        out = layer(**given).double().cpu()
        layer.lora_enabled = False
        added = out - layer(**given).double().cpu()
    zero = torch.zeros(given["x"].shape)
    want = exact(layer, given, zero)["out"]
    layer._lora = layer._lora._replace(scaling=0.0)
    want -= exact(layer, given, zero)["out"]
    assert (added - want).norm() < 0.15 * want.norm()


@pytest.mark.parametrize("preactivation", ["save", "save_fp8", "recompute"])
@pytest.mark.parametrize(
    "recipe",
    [
        Fp8Recipe(),
        Fp8Recipe(grad_dtype="e5m2"),
        Fp8Recipe(scale="fp32", columns="column"),
        Fp8Recipe(weighting="output"),
    ],
    ids=["pow2", "e5m2", "fp32", "weighted_output"],
)
def test_options(recipe: Fp8Recipe, preactivation: str, on: torch.device) -> None:
    options = {"recipe": recipe, "preactivation": preactivation}
    layer, given = with_lora(**options).to(on), problem(device=on)
    dout = torch.randn(given["x"].shape).bfloat16().to(on)
    limit = 0.14 if recipe.grad_dtype == "e5m2" else 0.09
    got, want = run(layer, given, dout), exact(layer, given, dout)
    if recipe.grad_dtype == "e5m2":
        for name in ("x", "probs"):
            assert (got.pop(name).double() - want[name]).norm() < 0.12 * want[name].norm()
    assert_close(got, want, limit)


def test_recompute_has_the_bits_of_save(on: torch.device) -> None:
    made, given = [], problem(device=on)
    dout = torch.randn(given["x"].shape).bfloat16().to(on)
    for preactivation in ("save", "recompute"):
        torch.manual_seed(1)
        made.append(run(with_lora(preactivation=preactivation).to(on), given, dout))
    same_bits(*made)


@pytest.mark.parametrize("inner", [192, 80])
def test_an_inner_size_off_the_tile(inner: int, on: torch.device) -> None:
    layer, given = with_lora(inner=inner).to(on), problem(device=on)
    dout = torch.randn(given["x"].shape).bfloat16().to(on)
    assert_close(run(layer, given, dout), exact(layer, given, dout))


@pytest.mark.parametrize("kind", ["codes", "values"])
def test_b_of_zero_is_the_frozen_layer(kind: str, on: torch.device) -> None:
    frozen = base_layer(kind).to(on).requires_grad_(False)
    layer, given = copy.deepcopy(frozen), problem(device=on)
    layer.add_lora(16, alpha=32)
    dout = torch.randn(given["x"].shape).bfloat16().to(on)
    got = run(layer, given, dout)
    same_bits(got, run(frozen, given, dout))
    assert got[NAMES[3]].any()
    assert not got[NAMES[2]].any()


def test_float32_factors_and_their_gradients(on: torch.device) -> None:
    layer, given = with_lora(dtype=torch.float32).to(on), problem(device=on)
    dout = torch.randn(given["x"].shape).bfloat16().to(on)
    got = run(layer, given, dout)
    assert got[NAMES[0]].dtype == torch.float32
    assert_close(got, exact(layer, given, dout))


def test_rows_that_came_grouped(on: torch.device) -> None:
    layer, counts = with_lora().to(on), torch.tensor([40, 0, 9, 47])
    given = problem(device=on)
    rows = given["x"].detach().requires_grad_()
    out = layer.forward_rows(rows, counts)
    out.square().sum().backward()
    ids = torch.repeat_interleave(torch.arange(E), counts)[:, None].to(on)
    as_tokens = {"x": rows, "topk_idx": ids, "topk_weights": torch.ones(96, 1, device=on)}
    as_tokens["topk_weights"].requires_grad_()
    grads = [p.grad.clone() for p in layer.parameters() if p.requires_grad and p.grad is not None]
    same = run(layer, as_tokens, 2 * out.detach())
    assert torch.equal(out, same["out"].to(on))
    for grad, name in zip(grads, NAMES, strict=True):
        assert torch.equal(grad.cpu(), same[name])


def test_frozen_factors_pass_gradients_on(on: torch.device) -> None:
    layer, given = with_lora().to(on), problem(device=on)
    dout = torch.randn(given["x"].shape).bfloat16().to(on)
    want = run(layer, given, dout)
    got = run(layer.requires_grad_(False), given, dout)
    assert set(got) == {"out", "x", "probs"}
    same_bits(got, {name: want[name] for name in got})


def test_two_forwards_then_two_backwards(on: torch.device) -> None:
    """The order of DPO."""
    layer, one, two = with_lora().to(on), problem(device=on), problem(40, device=on)
    apart = []
    for given in (one, two):
        layer(**given).square().sum().backward()
        apart.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
        layer.zero_grad()
    losses = [layer(**given).square().sum() for given in (one, two)]
    losses[0].backward()
    for p, grad in zip([p for p in layer.parameters() if p.requires_grad], apart[0], strict=True):
        assert torch.equal(p.grad, grad)
        p.grad = None
    losses[1].backward()
    for p, grad in zip([p for p in layer.parameters() if p.requires_grad], apart[1], strict=True):
        assert torch.equal(p.grad, grad)


def test_a_factor_changed_between_forward_and_backward_raises() -> None:
    layer, given = with_lora(), problem()
    out = layer(**given)
    with torch.no_grad():
        factors(layer)[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpointing_and_reuse_have_the_same_bits(on: torch.device) -> None:
    layer, given = with_lora().to(on), problem(device=on)
    dout = torch.randn(given["x"].shape).bfloat16().to(on)
    want = run(layer, given, dout)
    wrapped: Any = lambda **kwargs: checkpoint(layer, use_reentrant=False, **kwargs)  # noqa: E731
    wrapped.parameters, wrapped.named_parameters = layer.parameters, layer.named_parameters
    same_bits(run(wrapped, given, dout), want)
    with nn.reuse_fp8_weights(layer):
        same_bits(run(layer, given, dout), want)


@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("kind", ["codes", "values"])
def test_compiled(kind: str, preactivation: str, on: torch.device) -> None:
    torch._dynamo.reset()  # a test that breaks the graph at the experts has dynamo skip them
    layer, given = with_lora(kind, preactivation=preactivation).to(on), problem(device=on)
    dout = torch.randn(given["x"].shape).bfloat16().to(on)
    want = run(layer, given, dout)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = run(compiled, given, dout)
    same_bits(got, {name: want[name] for name in ("out", "x", "probs")})
    layer.zero_grad()
    compiled(**given).backward(dout)
    for name, p in zip(NAMES, factors(layer), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad.cpu(), want[name]), name


def test_state_dict_has_pefts_names_and_loads() -> None:
    layer = with_lora()
    state = layer.state_dict()
    shapes = [tuple(state[name].shape) for name in NAMES]
    assert shapes == [(E * 16, H), (2 * I, 16 * E), (E * 16, I), (H, 16 * E)]
    other = base_layer("codes")
    other.add_lora(16, alpha=32)
    other.load_state_dict(state)
    for mine, its in zip(factors(other), factors(layer), strict=True):
        assert torch.equal(mine, its)
    a, b = state[NAMES[2]], state[NAMES[3]]
    for e in range(E):
        assert torch.equal(a[16 * e : 16 * e + 16], factors(layer)[2][e])
        assert torch.equal(b[:, e::E], factors(layer)[3][e])


@pytest.mark.parametrize("experts", [1, E])
def test_a_state_dict_is_a_copy_and_loads_where_it_comes_from(experts: int) -> None:
    layer = nn.MoEExperts(experts, H, I)
    layer.add_lora(16, alpha=32)
    state = layer.state_dict()
    layer.load_state_dict(state)
    kept = {name: state[name].clone() for name in NAMES}
    for factor in factors(layer):
        torch.nn.init.normal_(factor)
    assert all(torch.equal(state[name], kept[name]) for name in NAMES)
    layer.load_state_dict(state)
    assert not any(factor.any() for factor in factors(layer)[1::2])


def test_bad_state_dicts_name_the_key() -> None:
    layer = with_lora()
    state = layer.state_dict()
    short = {k: t[:-1] if k == NAMES[0] else t for k, t in state.items()}
    before = factors(layer)[0].clone()
    with pytest.raises(RuntimeError, match=r"base_layer.lora_A.default.weight must be \[64, 256\]"):
        layer.load_state_dict(short)
    assert torch.equal(factors(layer)[0], before)
    for name, dim in zip(NAMES, (0, 1, 0, 1), strict=True):  # of a layer of twice as many experts
        twice = {k: torch.cat([t, t], dim) if k == name else t for k, t in state.items()}
        with pytest.raises(RuntimeError, match=rf"{name} must be .* on {E} experts; got \["):
            layer.load_state_dict(twice)
    del state[NAMES[3]]
    with pytest.raises(RuntimeError, match=r'Missing key.*"lora_B.default.weight"'):
        layer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"base_layer.lora_A.default.weight"'):
        base_layer("codes").load_state_dict(layer.state_dict())


@pytest.mark.parametrize("kind", ["codes", "values"])
def test_merge(kind: str) -> None:
    layer = with_lora(kind)
    scaling = layer._lora.scaling if layer._lora else 0.0
    low = [t.detach().double() for t in factors(layer)]
    base = values_of(layer)
    if kind == "values":
        base = layer.gate_up_proj.double(), layer.down_proj.double()
    pairs = zip(base, low[::2], low[1::2], strict=True)
    want = [w + scaling * b @ a for w, a, b in pairs]
    written = dict(layer.fp8_tensors())
    layer.merge_lora()
    assert layer.lora_rank == 0
    assert not [name for name, _ in layer.named_parameters() if "lora" in name]
    if kind == "values":
        got = [layer.gate_up_proj.double(), layer.down_proj.double()]
    else:
        got = list(values_of(layer))
    for g, w in zip(got, want, strict=True):
        assert (g - w).norm() < (2.0**-8 if kind == "values" else 0.03) * w.norm()
    again = nn.MoEExperts.from_fp8(written, num_experts=E)
    for g, w in zip(values_of(again), want, strict=True):
        assert (g - w).norm() < 0.03 * w.norm()
    if kind == "codes":
        for name, tensor in layer.fp8_tensors():
            assert torch.equal(tensor.view(torch.uint8), written[name].view(torch.uint8)), name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", [Fp8Recipe(), Fp8Recipe(scale="fp32", columns="column")])
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.bfloat16, torch.float32], ids=str)
def test_terms_are_written_merged_as_merge_lora_leaves_them(
    dtype: torch.dtype, recipe: Fp8Recipe, fused: bool
) -> None:
    tensors = {
        name: t.to(dtype) if name.endswith("scale_inv") else t
        for name, t in base_layer("values").fp8_tensors()
    }
    layer = nn.MoEExperts.from_fp8(tensors, num_experts=E, recipe=recipe)
    layer.add_lora(16, alpha=32)
    for b in factors(layer)[1::2]:
        torch.nn.init.normal_(b, std=0.05)
    written = dict(layer.fp8_tensors(fused=fused))
    layer.merge_lora()
    for name, t in layer.fp8_tensors(fused=fused):
        assert t.dtype == written[name].dtype, name
        assert torch.equal(t.view(torch.uint8), written[name].view(torch.uint8)), name


@pytest.mark.parametrize("kind", ["codes", "values"])
def test_autocast_changes_nothing_merged(kind: str) -> None:
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        layer = with_lora(kind).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            written = dict(layer.fp8_tensors(fused=True))
            layer.merge_lora()
        found.append({**written, "of the layer": layer.down_proj.detach()})
    for name, t in found[0].items():
        assert torch.equal(t.view(torch.uint8), found[1][name].view(torch.uint8)), name


def test_casts_and_copies_keep_codes_and_move_factors() -> None:
    layer = with_lora().float()
    assert factors(layer)[0].dtype == torch.float32
    assert layer.gate_up_proj.dtype == torch.float8_e4m3fn
    other = copy.deepcopy(layer)
    given = problem()
    assert torch.equal(layer(**given), other(**given))
    other.lora_enabled = False
    assert not torch.equal(layer(**given), other(**given))
    assert "lora_rank=16" in repr(layer)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"rank": 12}, "rank must be a multiple of 8, 8 to 64; got 12"),
        ({"rank": 72}, "rank must be a multiple of 8, 8 to 64; got 72"),
        ({"rank": True}, "rank must be an int; got True"),
        ({"alpha": 0}, "alpha must be more than 0; got 0"),
        ({"alpha": "2"}, "alpha must be finite and not negative; got '2'"),
        ({"dtype": torch.int8}, "dtype must be bfloat16, float16 or float32"),
    ],
)
def test_refused(given: dict[str, Any], rule: str) -> None:
    layer = base_layer("codes")
    with pytest.raises(ValueError, match=rf"\[add_lora\] {rule}"):
        layer.add_lora(**{"rank": 16, "alpha": 32} | given)
    assert layer.lora_rank == 0
    assert not [name for name, _ in layer.named_parameters() if "lora" in name]


def test_refused_orders() -> None:
    layer = with_lora()
    with pytest.raises(RuntimeError, match=r"\[add_lora\] the layer must have no LoRA"):
        layer.add_lora(16, alpha=32)
    with pytest.raises(RuntimeError, match=r"\[merge_lora\] the layer must have a LoRA"):
        base_layer("codes").merge_lora()
    with pytest.raises(ValueError, match=r"\[add_lora\] the layer must have an FP8 recipe"):
        nn.MoEExperts(E, H, I, recipe=None).add_lora(16, alpha=32)
