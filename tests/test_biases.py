"""MoEExperts with biases against the formula in float64, in FP8 and in bf16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import ranks
from activations import ACTIVATIONS, formula
from fp8moe_cutlass import Fp8Recipe, autograd
from fp8moe_cutlass.autograd import biases
from fp8moe_cutlass.nn import MoEExperts, shard_experts
from fp8moe_cutlass.nn.lora import factors
from ranks import Pool, results
from reference import relative_error

pool = ranks.pool(2)

T, S, E, H = 256, 2, 4, 128
NAMES = ["out", "x", "probs", "gate_up", "down", "gate_up_bias", "down_bias"]
RECIPES = {
    "fp8": Fp8Recipe(),
    "column": Fp8Recipe(columns="column"),
    "fp32": Fp8Recipe(scale="fp32", columns="column"),
    "e5m2": Fp8Recipe(grad_dtype="e5m2"),
    "output": Fp8Recipe(weighting="output"),
    "bf16": None,
}


def layer_of(name: str, inner: int, hidden: int = H, **options: Any) -> MoEExperts:
    torch.manual_seed(3)
    how = {"activation": ACTIVATIONS[name], "bias": True, **options}
    layer = MoEExperts(E, hidden, inner, **how)
    with torch.no_grad():  # z and its bias of about 1, so that limits are met
        layer.gate_up_proj.mul_(3.0**0.5)
        for bias in layer.local_biases():
            bias.normal_()
    return layer


def inputs(tokens: int = T, hidden: int = H) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(4)
    idx = torch.rand(tokens, E - 1).topk(S).indices  # the last expert has no tokens
    x, dout = torch.randn(2, tokens, hidden).bfloat16()
    return x, idx, torch.rand(tokens, S), dout


def parameters(layer: MoEExperts) -> list[Tensor]:
    return [layer.gate_up_proj, layer.down_proj, *layer.local_biases()]


def run(layer: Any, x: Tensor, idx: Tensor, probs: Tensor, dout: Tensor) -> list[Any]:
    """Output and gradients, by NAMES."""
    device = layer.down_proj.device
    x, idx, probs, dout = (t.to(device) for t in (x, idx, probs, dout))
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, idx, probs)
    out.backward(dout)
    return [out.detach(), x.grad, probs.grad, *(p.grad for p in parameters(layer))]


def truth(layer: MoEExperts, x: Tensor, idx: Tensor, probs: Tensor, dout: Tensor) -> list[Any]:
    given = x, probs, *parameters(layer)
    leaves = [t.detach().cpu().double().requires_grad_() for t in given]
    x, probs, gate_up, down, gate_up_bias, down_bias = leaves
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = (idx == e).nonzero(as_tuple=True)
        h = formula(x[token] @ gate_up[e].T + gate_up_bias[e], layer.activation)
        out = out.index_add(0, token, probs[token, slot, None] * (h @ down[e].T + down_bias[e]))
    out.backward(dout.double())
    return [out.detach(), *(t.grad for t in leaves)]


# The tests of the layer without biases allow 0.1 in FP8 and 0.012 in bf16; E5M2 has a bit less.
BOUND = {"fp8": 0.1, "column": 0.1, "fp32": 0.1, "e5m2": 0.12, "output": 0.1, "bf16": 0.012}


@pytest.mark.parametrize("inner", [128, 176])
@pytest.mark.parametrize("preactivation", ["save", "save_fp8", "recompute"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["swiglu", "gpt-oss interleaved", "gelu_tanh", "relu2"])
def test_against_float64(
    name: str, recipe: str, preactivation: str, inner: int, device: torch.device
) -> None:
    if recipe == "bf16" and preactivation == "save_fp8":
        return
    options = {"recipe": RECIPES[recipe], "preactivation": preactivation}
    layer = layer_of(name, inner, **options).to(device)
    given = inputs()
    for what, got, want in zip(NAMES, run(layer, *given), truth(layer, *given), strict=True):
        assert relative_error(got.cpu(), want) < BOUND[recipe], what


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_two_runs_and_recompute_are_equal(recipe: str, device: torch.device) -> None:
    given = inputs()
    made = []
    for preactivation in ("save", "save", "recompute"):
        layer = layer_of("gpt-oss interleaved", 176, recipe=RECIPES[recipe])
        layer._options = layer._options._replace(preactivation=preactivation)
        made.append(run(layer.to(device), *given))
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


def test_a_zero_bias_changes_no_bit(device: torch.device) -> None:
    layer = layer_of("gpt-oss", 176).to(device)
    with torch.no_grad():
        for bias in layer.local_biases():
            bias.zero_()
    plain = MoEExperts(E, H, 176, activation=layer.activation, device=device)
    plain.load_state_dict(
        {key: w for key, w in layer.state_dict().items() if not key.endswith("_bias")}
    )
    given = inputs()
    plain.local_biases = lambda: None
    got = run(layer, *given)
    x, idx, probs, dout = (t.to(device) for t in given)
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    out = plain(x, idx, probs)
    out.backward(dout)
    want = [out, x.grad, probs.grad, plain.gate_up_proj.grad, plain.down_proj.grad]
    assert all(torch.equal(a, b) for a, b in zip(got[:5], want, strict=True))


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
@pytest.mark.parametrize("tokens", [0, 1, 129])
def test_few_tokens(recipe: str, tokens: int, device: torch.device) -> None:
    """Zero, one and a tile and one; experts without tokens have gradients of zero."""
    check(recipe, "gpt-oss interleaved", 144, inputs(tokens, 208), device)


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
@pytest.mark.parametrize("name", ["swiglu", "gpt-oss interleaved", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("inner", [16, 704, 1856, 2880])
def test_sizes_off_the_tile(inner: int, name: str, recipe: str, device: torch.device) -> None:
    """Models' intermediate sizes, and the least."""
    check(recipe, name, inner, inputs(200, 80), device)


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
@pytest.mark.parametrize("name", ["swiglu", "gpt-oss interleaved", "relu2"])
def test_one_expert_takes_all(name: str, recipe: str, device: torch.device) -> None:
    """And so every token has it twice."""
    x, idx, probs, dout = inputs(150)
    check(recipe, name, 176, (x, torch.ones_like(idx), probs, dout), device)


def check(recipe: str, name: str, inner: int, given: Any, device: torch.device) -> None:
    layer = layer_of(name, inner, given[0].shape[1], recipe=RECIPES[recipe]).to(device)
    got, want = run(layer, *given), truth(layer, *given)
    for what, a, b in zip(NAMES, got, want, strict=True):
        assert relative_error(a.cpu(), b) < 1.5 * BOUND[recipe], what
    for grad in got[5:]:
        assert not grad[E - 1].any()


@pytest.mark.parametrize("recipe", ["fp8", "output", "bf16"])
@pytest.mark.parametrize("weighted", [True, False])
def test_rows_that_came_grouped(recipe: str, weighted: bool, device: torch.device) -> None:
    """A slot per token: the rows of the block that groups them, with and without weights."""
    layer = layer_of("gpt-oss interleaved", 176, recipe=RECIPES[recipe]).to(device)
    x, idx, probs, dout = inputs()
    order = torch.argsort(idx[:, 0], stable=True)
    x, idx, dout = x[order], idx[order, :1], dout[order]
    probs = probs[order, :1] if weighted else torch.ones(T, 1)
    want = run(layer, x, idx, probs, dout)
    counts = torch.bincount(idx[:, 0], minlength=E).to(device)

    def forward(rows: Tensor, _: Tensor, weights: Tensor) -> Tensor:
        return layer.forward_rows(rows, counts, weights[:, 0] if weighted else None)

    forward.down_proj, forward.zero_grad = layer.down_proj, layer.zero_grad  # type: ignore[attr-defined]
    forward.gate_up_proj, forward.local_biases = layer.gate_up_proj, layer.local_biases  # type: ignore[attr-defined]
    got = run(forward, x, idx, probs, dout)
    for what, a, b in zip(NAMES, got, want, strict=True):
        if what != "probs" or weighted:
            assert relative_error(a, b) < (1e-2 if what.endswith("bias") else 0.0 + 1e-6), what


def test_what_traces_has_the_same_bits() -> None:
    given = inputs()
    for recipe in ("fp8", "bf16"):
        layer = layer_of("gpt-oss interleaved", 176, recipe=RECIPES[recipe])
        want = run(layer, *given)
        torch._dynamo.reset()
        layer.compile(backend="aot_eager", fullgraph=True)
        for what, a, b in zip(NAMES, run(layer, *given), want, strict=True):
            assert torch.equal(a, b), what


def test_lora_has_the_same_bits_traced() -> None:
    layer, given = layer_of("gpt-oss interleaved", 176), inputs()
    layer.add_lora(8, alpha=8.0)
    for b in factors(layer)[1::2]:
        torch.nn.init.normal_(b, std=0.05)
    want = run(layer, *given)[:3] + [f.grad for f in factors(layer)]
    torch._dynamo.reset()
    layer.compile(backend="aot_eager", fullgraph=True)
    got = run(layer, *given)[:3] + [f.grad for f in factors(layer)]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("trained", ["weights", "biases", "one bias"])
@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_frozen(recipe: str, trained: str) -> None:
    given = inputs()
    layer = layer_of("gpt-oss", 176, recipe=RECIPES[recipe])
    want = run(layer, *given)
    kept = {"weights": (0, 1), "biases": (2, 3), "one bias": (3,)}[trained]
    layer.zero_grad()
    for n, p in enumerate(parameters(layer)):
        p.requires_grad_(n in kept)
    got = run(layer, *given)
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) if n - 3 not in (-3, -2, -1, *kept) else torch.equal(a, b), NAMES[n]


@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("recipe", ["fp8", "output"])
def test_lora(recipe: str, preactivation: str, device: torch.device) -> None:
    """Against float64 of the weights with their low-rank terms; merged; the biases are frozen."""
    options = {"recipe": RECIPES[recipe], "preactivation": preactivation}
    layer, given = layer_of("gpt-oss interleaved", 176, **options), inputs()
    merged = copy.deepcopy(layer)
    layer.add_lora(8, alpha=8.0, dtype=torch.float32)
    assert not any(p.requires_grad for p in parameters(layer))
    with torch.no_grad():
        for b in factors(layer)[1::2]:
            b.normal_(std=0.05)
        for w, a, b in zip(
            parameters(merged), *(factors(layer)[n::2] for n in (0, 1)), strict=False
        ):
            w.add_(b @ a)
    want = truth(merged, *given)
    of_weights = want[3:5]
    for n, dw in enumerate(of_weights):
        a, b = (f.detach().double() for f in factors(layer)[2 * n : 2 * n + 2])
        want[3 + 2 * n : 3 + 2 * n] = [b.mT @ dw, dw @ a.mT]
    layer = layer.to(device)
    got = run(layer, *given)[:3] + [f.grad for f in factors(layer)]
    for n, (a, b) in enumerate(zip(got, want, strict=False)):
        assert relative_error(a.cpu(), b) < BOUND[recipe], n
    layer.merge_lora()
    for w, its in zip(parameters(layer), parameters(merged), strict=True):
        torch.testing.assert_close(w.cpu(), its)


def rounds(t: Tensor) -> bool:
    return not torch.equal(t, t.bfloat16().float())


@pytest.mark.parametrize("into", ["grad_dtype", "main_grad", "Megatron's main_grad"])
def test_float32_gradients_do_not_pass_bf16(into: str, device: torch.device) -> None:
    """By grad_dtype, and added to main_grad, which a bias that is frozen or asked for leaves."""
    layer, given = layer_of("gpt-oss", 176, dtype=torch.bfloat16).to(device), inputs()
    plain = run(layer, *given)[5:]
    biases_of = layer.local_biases()
    if into == "grad_dtype":
        for bias in biases_of:
            bias.grad = None
            bias.grad_dtype = torch.float32
        found = run(layer, *given)[5:]
    else:
        for bias in biases_of:
            bias.main_grad = torch.ones(bias.shape, dtype=torch.float32, device=device)
            if into != "main_grad":
                bias.grad_added_to_main_grad = False
        unread = run(layer, *given)[5:]
        if into == "main_grad":
            assert unread == [None, None]
        else:
            assert all(bias.grad_added_to_main_grad for bias in biases_of)
            assert not any(grad.any() for grad in unread)
        run(layer, *given)
        kept = [bias.main_grad.clone() for bias in biases_of]
        found = [(m - 1) / 2 for m in kept]
        biases_of.down.requires_grad_(False)
        x, idx, probs, dout = (t.to(device) for t in given)
        [asked] = torch.autograd.grad(layer(x, idx, probs), [biases_of.gate_up], dout)
        assert torch.equal(asked, plain[0])
        assert all(torch.equal(bias.main_grad, m) for bias, m in zip(biases_of, kept, strict=True))
    for got, want in zip(found, plain, strict=True):
        assert got.dtype == torch.float32
        assert rounds(got)
        assert relative_error(got, want) < 2**-8


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_main_grad_in_a_compiled_layer(recipe: str) -> None:
    """Of one bias, the other's in .grad: eager's bits, which do not pass bf16 in FP8."""
    given, made = inputs(), []
    for compiled in (False, True):
        layer = layer_of("gpt-oss", 176, dtype=torch.bfloat16, recipe=RECIPES[recipe])
        main_grad = torch.ones(layer.down_proj_bias.shape)
        layer.down_proj_bias.main_grad = main_grad
        torch._dynamo.reset()
        if compiled:
            layer.compile(backend="aot_eager", fullgraph=True)
        made.append([*run(layer, *given)[:6], main_grad])
        assert layer.down_proj_bias.grad is None
        layer.down_proj_bias.requires_grad_(False)
        run(layer, *given)
        assert torch.equal(main_grad, made[-1][-1])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert recipe == "bf16" or rounds(made[1][-1] - 1)
    layer.gate_up_proj_bias.grad = None
    layer.gate_up_proj_bias.grad_dtype = torch.float32
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="grad_dtype cannot be compiled"):
        run(layer, *given)


def test_parameters_and_names() -> None:
    layer = layer_of("gpt-oss", 176)
    names = ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"]
    assert [name for name, _ in layer.named_parameters()] == names
    assert layer.gate_up_proj_bias.shape == (E, 352)
    assert layer.down_proj_bias.shape == (E, H)
    assert "bias=True" in repr(layer)
    layer.reset_parameters()
    assert 0 < layer.gate_up_proj_bias.abs().max() <= H**-0.5
    assert 0 < layer.down_proj_bias.abs().max() <= 176**-0.5
    assert MoEExperts(E, H, 176).local_biases() is None
    assert layer_of("relu2", 176).state_dict().keys() >= {"up_proj_bias", "down_proj_bias"}
    twin = copy.deepcopy(layer)
    assert all(torch.equal(a, b) for a, b in zip(run(twin, *inputs()), run(layer, *inputs())))  # noqa: B905


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_columns_of_a_bias_hold_it(dtype: torch.dtype, device: torch.device) -> None:
    """Rounded to bf16, down to 2^-17 of the largest at its scale."""
    torch.manual_seed(0)
    bias = (torch.randn(3, 208) * torch.logspace(-3, 2, 208)).to(dtype).to(device)
    made = biases.quantized(bias).float()
    assert made.shape == (3, 208, 16)
    assert not made[..., 2:].any()
    want = bias.to(torch.bfloat16).float()
    for first in (0, 128):
        part = slice(first, first + 128)
        floor = want[:, part].abs().amax() * 2.0**-17
        assert ((made[:, part].sum(-1) - want[:, part]).abs() <= floor).all()
    large = want.abs() > 0.5
    assert torch.equal(made.sum(-1)[:, 128:][large[:, 128:]], want[:, 128:][large[:, 128:]])


REFUSED = {
    r"\[fp8_tensors\] the layer must have no biases": lambda m: list(m.fp8_tensors()),
    r"\[MoEExperts\] FP8 weights have no biases": lambda m: MoEExperts(
        E, H, 128, bias=True, dtype=torch.float8_e4m3fn
    ),
    r"\[MoEExperts\] FP8 weights have no biases; got bias=True": lambda m: MoEExperts.from_fp8(
        dict(MoEExperts(E, H, 128).fp8_tensors(fused=True)), num_experts=E, bias=True
    ),
    r"\[MoEExperts\] bias must be True or False; got 1": lambda m: MoEExperts(E, H, 128, bias=1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        REFUSED[message](layer_of("swiglu", 128))


def test_biases_of_other_shapes_are_refused() -> None:
    x, idx, probs, _ = inputs()
    layer = layer_of("swiglu", 128)
    weights, (first, second) = (layer.gate_up_proj, layer.down_proj), layer.local_biases()
    message = r"\[experts\] biases: gate_up must be \(4, 256\); got \(4, 128\)"
    with pytest.raises(ValueError, match=message):
        autograd.experts(x, idx, probs, *weights, biases=(first[:, :128], second))
    out = autograd.experts(x, idx, probs, *weights, biases=(first, second))
    assert torch.equal(out, layer(x, idx, probs))


@pytest.mark.parametrize("recipe", ["fp8", "column", "e5m2", "bf16"])
def test_weights_in_out(recipe: str, device: torch.device) -> None:
    """Weights [E, in, out] passed as w.mT: the same bits, and gradients that lie as they do."""
    layer = layer_of("gpt-oss interleaved", 176, recipe=RECIPES[recipe]).to(device)
    given = inputs()
    want = run(layer, *given)
    lying = [w.detach().mT.contiguous().requires_grad_() for w in parameters(layer)[:2]]
    x, idx, probs, dout = (t.to(device) for t in given)
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    of, turned = layer.local_biases(), (w.mT for w in lying)
    out = autograd.experts(x, idx, probs, *turned, layer._options, biases=of)
    out.backward(dout)
    assert all(torch.equal(a, b) for a, b in zip((out, x.grad, probs.grad), want, strict=False))
    for w, grad in zip(lying, want[3:5], strict=True):
        assert w.grad.is_contiguous()
        assert relative_error(w.grad.mT, grad) < 4e-3  # the operands have changed places


# ---- several ranks ------------------------------------------------------------------------------


def step(group: Any, how: str, recipe: Any) -> list[Tensor]:
    """Output and gradients of this rank's half of the tokens; group None: of all."""
    own = group if how == "group" else None
    layer = layer_of("gpt-oss interleaved", 112, recipe=recipe, group=own)
    if how == "group" and group is not None:  # the values of all ranks' layers
        whole, mine = layer_of("gpt-oss interleaved", 112, recipe=recipe), layer.local_experts
        with torch.no_grad():
            for a, b in zip(parameters(layer), parameters(whole), strict=True):
                a.copy_(b[mine.start : mine.stop])
    if how == "shard_experts" and group is not None:
        shard_experts(layer, group)
    if how == "fully_shard" and group is not None:
        mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
        fully_shard(layer, mesh=mesh)
    given = inputs()
    if group is not None:
        rank = torch.distributed.get_rank(group)
        given = tuple(t.chunk(2)[rank] for t in given)  # type: ignore[assignment]
    x, idx, probs, dout = given
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    out = layer(x, idx, probs)
    out.backward(dout)
    grads = [p.grad for p in layer.parameters()]
    grads = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
    return [out.detach(), x.grad, probs.grad, *grads]


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
@pytest.mark.parametrize("how", ["group", "shard_experts", "fully_shard"])
def test_ranks_are_one_process(pool: Pool, how: str, recipe: Any) -> None:
    want = step(None, how, recipe)
    found = results(pool.run(2, step, how, recipe))
    for n, parts in enumerate(zip(*found, strict=True)):
        made = torch.cat(parts) if n < 3 or how == "group" else 2.0 * parts[0].float()
        assert relative_error(made, want[n]) < 0.02, n
