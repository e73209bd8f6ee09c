"""MoEExperts of each activation against the formula in float64, in FP8 and in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from activations import ACTIVATIONS, formula
from fp8moe_cutlass import Activation, Fp8Recipe, autograd
from fp8moe_cutlass.nn import MoEExperts
from moe_problem import moved
from reference import Result, relative_error

T, S, E, H = 256, 2, 4, 128


def layer_of(name: str, inner: int, **options: Any) -> MoEExperts:
    torch.manual_seed(3)
    layer = MoEExperts(E, H, inner, activation=ACTIVATIONS[name], **options)
    with torch.no_grad():  # z of about 1, so that limits are met
        layer.gate_up_proj.mul_(3.0**0.5)
    return layer


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(4)
    idx = torch.rand(T, E - 1).topk(S).indices  # the last expert has no tokens
    return torch.randn(T, H).bfloat16(), idx, torch.rand(T, S), torch.randn(T, H).bfloat16()


def run(layer: MoEExperts, x: Tensor, idx: Tensor, probs: Tensor, dout: Tensor) -> Result:
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, idx, probs)
    out.backward(dout)
    return Result(out.detach(), x.grad, probs.grad, layer.gate_up_proj.grad, layer.down_proj.grad)


def truth(layer: MoEExperts, x: Tensor, idx: Tensor, probs: Tensor, dout: Tensor) -> Result:
    given = x, probs, layer.gate_up_proj, layer.down_proj
    x, probs, gate_up, down = (t.detach().cpu().double().requires_grad_() for t in given)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = (idx == e).nonzero(as_tuple=True)
        h = formula(x[token] @ gate_up[e].T, layer.activation)
        out = out.index_add(0, token, probs[token, slot, None] * (h @ down[e].T))
    out.backward(dout.double())
    return Result(out.detach(), x.grad, probs.grad, gate_up.grad, down.grad)


@pytest.mark.parametrize("inner", [128, 176])
@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_against_float64(
    name: str, recipe: Fp8Recipe | None, preactivation: str, inner: int, device: torch.device
) -> None:
    given = inputs()
    layer = layer_of(name, inner, recipe=recipe, preactivation=preactivation)
    want = truth(layer, *given)
    layer = layer.to(device)
    got = moved(run(layer, *(t.to(device) for t in given)), "cpu")
    assert layer.gate_up_proj.shape == (E, layer.activation.parts * inner, H)
    # relu^2 doubles the error of z. Of z as far from a limit as its own error the gradient comes or
    # goes, all of it: a limit in the midst of the values costs the square root of their share.
    limited = layer.activation.limit is not None and layer.activation.limit < 3.0
    bound = (0.2 if limited else 0.1) if recipe else (0.07 if limited else 0.012)
    found = {part: relative_error(getattr(got, part), exact) for part, exact in vars(want).items()}
    assert max(found.values()) <= bound, found


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_traces_has_the_same_bits(name: str) -> None:
    """The block as an operator of torch's, and with its shapes alone."""
    layer, (x, idx, probs, dout) = layer_of(name, 176), inputs()
    eager = run(layer, x, idx, probs, dout)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    layer.zero_grad()
    out = compiled(x, idx, probs)
    out.backward(dout)
    made = Result(out.detach(), x.grad, probs.grad, layer.gate_up_proj.grad, layer.down_proj.grad)
    for part, value in vars(eager).items():
        assert torch.equal(getattr(made, part), value), part


def test_without_a_gate_the_parameter_is_up_proj() -> None:
    layer = layer_of("relu2", 176)
    assert layer.state_dict().keys() == {"up_proj", "down_proj"}
    assert layer.gate_up_proj is layer.up_proj
    other = MoEExperts(E, H, 176, activation=Activation("relu2"))
    other.load_state_dict(layer.state_dict())
    given = inputs()
    assert torch.equal(run(layer, *given).out, run(other, *given).out)
    assert "activation=Activation(kind='relu2'" in repr(layer)
    layer.add_lora(8, alpha=8.0)
    assert layer.base_layer.lora_B["default"].weight.shape == (E, 176, 8)
    assert run_of_lora(layer, given).isfinite().all()


def run_of_lora(layer: MoEExperts, given: tuple[Tensor, ...]) -> Tensor:
    x, idx, probs, dout = given
    out: Tensor = layer(x.requires_grad_(), idx, probs)
    out.backward(dout)
    return out


BAD = {
    "kind must be one of .* got 'silu'": {"kind": "silu"},
    "alpha must be a number; got '2'": {"alpha": "2"},
    r"alpha must lie in \[1, 4\]": {"alpha": 0.5},
    "limit must be positive, None for none; got -1.0": {"limit": -1.0},
    "limit must be positive, None for none; got nan": {"limit": float("nan")},
    "limit must be None of 'gelu_tanh'; got 7.0": {"kind": "gelu_tanh", "limit": 7.0},
    "alpha and offset must be 1.0 and 0.0 of 'relu2'": {"kind": "relu2", "offset": 1.0},
    "interleaved must be True or False; got 1": {"interleaved": 1},
    "interleaved must be False of 'relu2'": {"kind": "relu2", "interleaved": True},
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_activation(message: str) -> None:
    with pytest.raises(ValueError, match=rf"\[Activation\] {message}"):
        Activation(**BAD[message])


def test_what_an_activation_does_not_fit() -> None:
    x, idx, probs, _ = inputs()
    with pytest.raises(ValueError, match=r"\[MoEExperts\] activation must be an Activation; got '"):
        MoEExperts(E, H, 128, activation="relu2")  # type: ignore[arg-type]
    for activation in (Activation("relu2"), Activation(interleaved=True)):
        with pytest.raises(ValueError, match="FP8 weights must be those of an activation with a g"):
            MoEExperts(E, H, 128, activation=activation, dtype=torch.float8_e4m3fn)
    options = autograd.Options(activation=Activation("relu2"))
    up, down = torch.randn(E, 256, H), torch.randn(E, H, 128)
    with pytest.raises(ValueError, match=r"gate_up must be \[E, I, H\] and down \[E, H, I\]; got"):
        autograd.experts(x, idx, probs, up, down, options)


def test_fp8_tensors_need_gate_and_up_side_by_side() -> None:
    for name in ("relu2", "swiglu interleaved"):
        with pytest.raises(ValueError, match=r"\[fp8_tensors\] the layer must have a gate beside"):
            list(layer_of(name, 128).fp8_tensors())


def test_words() -> None:
    for activation in ACTIVATIONS.values():
        assert Activation.of_word(activation.word) == activation
