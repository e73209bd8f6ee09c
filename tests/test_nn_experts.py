"""MoEExperts in a training framework: state, main_grad, deferral, copies, refusals."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fp8moe_cutlass import Activation, Fp8Recipe
from fp8moe_cutlass.nn import MoEExperts
from moe_problem import assert_same, problem, run_unaligned

FP8_AND_BF16 = pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])


def out_of(layer: nn.Module, p: Any, **call: Any) -> torch.Tensor:
    with torch.no_grad():
        return layer(p.x, p.topk_idx, p.probs, **call)


# ---- state --------------------------------------------------------------------------------------


def scaled(layer: MoEExperts) -> None:
    with torch.no_grad():
        for w in layer.parameters():
            w.add_(torch.ones_like(w), alpha=0.1)


def test_state_dict_holds_the_parameters_alone() -> None:
    p = problem(64)
    layer = p.experts()
    out_of(layer, p)
    assert set(layer.state_dict()) == {"gate_up_proj", "down_proj"}
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = MoEExperts(4, 256, 128)
    other.load_state_dict(torch.load(buffer))
    assert_same(p.run(other), p.run(layer))


def saved_and_loaded(layer: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved_and_loaded,
}


@FP8_AND_BF16
@pytest.mark.parametrize("copier", COPIERS)
def test_copies_of_the_module(copier: str, recipe: Fp8Recipe | None) -> None:
    p = problem(64)
    layer = p.experts(recipe=recipe)
    want = p.run(layer)
    layer.zero_grad()
    twin = COPIERS[copier](layer)
    assert_same(p.run(twin), want)
    scaled(twin)
    assert not torch.equal(out_of(twin, p), want.out)
    assert torch.equal(out_of(layer, p), want.out)


@FP8_AND_BF16
def test_meta_device(recipe: Fp8Recipe | None) -> None:
    p = problem(64)
    want = p.run(p.experts(recipe=recipe))
    with torch.device("meta"):
        layer = MoEExperts(4, 256, 128, recipe=recipe)
    assert layer.gate_up_proj.is_meta
    with pytest.raises(RuntimeError, match="to_empty"):
        layer(p.x, p.topk_idx, p.probs)
    layer.to_empty(device="cpu")
    layer.load_state_dict({"gate_up_proj": p.gate_up, "down_proj": p.down})
    assert_same(p.run(layer), want)
    layer.reset_parameters()
    assert layer.gate_up_proj.abs().max() <= 256**-0.5

    with torch.device("meta"):
        layer = MoEExperts(4, 256, 128, recipe=recipe)
    layer.load_state_dict({"gate_up_proj": p.gate_up, "down_proj": p.down}, assign=True)
    assert_same(p.run(layer), want)


class Doubled(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return 2 * w


@FP8_AND_BF16
def test_a_parametrized_module(recipe: Fp8Recipe | None) -> None:
    p = problem(64)
    layer = p.experts(recipe=recipe)
    parametrize.register_parametrization(layer, "down_proj", Doubled())
    out = out_of(layer, p)
    p.down = 2 * p.down
    assert torch.equal(out, out_of(p.experts(recipe=recipe), p))
    assert torch.equal(out, out_of(copy.deepcopy(layer), p))


@FP8_AND_BF16
def test_moved_in_inference_mode(recipe: Fp8Recipe | None) -> None:
    p = problem(64)
    want = p.run(p.experts(recipe=recipe))
    layer = p.experts(recipe=recipe)
    with torch.inference_mode():
        layer.to("cpu")
    assert_same(p.run(layer), want)


@FP8_AND_BF16
def test_a_move_that_fails_leaves_a_layer_that_runs(recipe: Fp8Recipe | None) -> None:
    def out_of_memory(t: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    p = problem(64)
    want = p.run(p.experts(recipe=recipe))
    layer = p.experts(recipe=recipe)
    with pytest.raises(torch.OutOfMemoryError):
        layer._apply(out_of_memory)
    assert_same(p.run(layer), want)


@FP8_AND_BF16
def test_a_cast_of_the_module(recipe: Fp8Recipe | None) -> None:
    p = problem(64, dtype=torch.float32)
    layer = p.experts(recipe=recipe)
    out_of(layer, p)
    layer.to(torch.bfloat16)
    p.gate_up, p.down = p.gate_up.bfloat16(), p.down.bfloat16()
    assert torch.equal(out_of(layer, p), out_of(p.experts(recipe=recipe), p))


# ---- where weight gradients go ------------------------------------------------------------------


def microbatches() -> list[Any]:
    batches = [problem(96, seed=seed) for seed in range(3)]
    for b in batches[1:]:
        b.gate_up, b.down = batches[0].gate_up, batches[0].down
    return batches


def weight_grads(layer: MoEExperts) -> list[torch.Tensor | None]:
    return [w.grad for w in layer.parameters()]


@FP8_AND_BF16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_accumulates_the_sum(recipe: Fp8Recipe | None, dtype: torch.dtype) -> None:
    batches = microbatches()
    layer = batches[0].experts(recipe=recipe)
    for w in layer.parameters():
        w.main_grad = torch.zeros(w.shape, dtype=dtype)
    for b in batches:
        b.run(layer)
    assert weight_grads(layer) == [None, None]
    exact = [
        b.run(b.experts(recipe=recipe, dtype=torch.float32)) for b in batches
    ]  # float32 parameters: gradients not rounded to bfloat16
    for w, name in ((layer.gate_up_proj, "dgate_up"), (layer.down_proj, "ddown")):
        want = sum(getattr(r, name) for r in exact)
        limit = 1e-5 if dtype == torch.float32 else 1e-2
        error = (w.main_grad - want).norm() / want.norm()
        assert error < limit, error


def test_main_grad_adds_by_default() -> None:
    p = problem(96)
    layer = p.experts()
    for w in layer.parameters():
        w.main_grad = torch.zeros(w.shape)
    p.run(layer)
    once = [w.main_grad.clone() for w in layer.parameters()]
    p.run(layer)
    for w, first in zip(layer.parameters(), once, strict=True):
        torch.testing.assert_close(w.main_grad, 2 * first)


@FP8_AND_BF16
@pytest.mark.parametrize("zero", [False, True])
def test_megatron_hooks_see_the_gradient_arrive(recipe: Fp8Recipe | None, zero: bool) -> None:
    p = problem(96)
    layer = p.experts(recipe=recipe)
    arrived = []
    for w in layer.parameters():
        w.main_grad = torch.zeros(w.shape)
        w.grad_added_to_main_grad = False
        w.zero_out_wgrad = zero
        w.register_post_accumulate_grad_hook(arrived.append)
    p.run(layer)
    assert len(arrived) == 2
    for w in layer.parameters():
        assert w.grad_added_to_main_grad
        assert w.grad.shape == w.shape
        assert w.grad.dtype == w.dtype
        assert w.main_grad.any()
        if zero:
            assert not w.grad.any()


@FP8_AND_BF16
@pytest.mark.parametrize("main_grad", [False, True])
def test_deferred_wgrad_equals_immediate(recipe: Fp8Recipe | None, main_grad: bool) -> None:
    batches = microbatches()
    grads = []
    for delay in (False, True):
        layer = batches[0].experts(recipe=recipe, delay_wgrad=delay)
        if main_grad:
            for w in layer.parameters():
                w.main_grad = torch.zeros(w.shape)
        for b in batches:
            before = [w.main_grad.clone() if main_grad else w.grad for w in layer.parameters()]
            b.run(layer)
            if delay:  # nothing has arrived yet
                now = [w.main_grad if main_grad else w.grad for w in layer.parameters()]
                assert all(a is b or torch.equal(a, b) for a, b in zip(now, before, strict=True))
            layer.backward_dw()
        grads.append([w.main_grad if main_grad else w.grad for w in layer.parameters()])
        layer.backward_dw()  # nothing is left
    for now, later in zip(*grads, strict=True):
        assert torch.equal(now, later)


@FP8_AND_BF16
def test_deferred_wgrads_outlive_an_error(recipe: Fp8Recipe | None) -> None:
    p = problem(32)
    want = p.run(p.experts(recipe=recipe))
    layer = p.experts(recipe=recipe, delay_wgrad=True)
    layer.down_proj.main_grad = torch.zeros(1)
    p.run(layer)
    with pytest.raises(ValueError, match=r"\[main_grad\]"):
        layer.backward_dw()
    layer.down_proj.main_grad = None
    layer.backward_dw()
    assert torch.equal(layer.gate_up_proj.grad, want.dgate_up)
    assert torch.equal(layer.down_proj.grad, want.ddown)


@FP8_AND_BF16
def test_gradients_of_computed_weights_are_not_deferred(recipe: Fp8Recipe | None) -> None:
    p = problem(32)
    layer = p.experts(recipe=recipe, delay_wgrad=True)
    parametrize.register_parametrization(layer, "down_proj", Doubled())
    with pytest.raises(RuntimeError, match="delay_wgrad must be False"):
        layer(p.x, p.topk_idx, p.probs)
    out_of(layer, p)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(4, 256, 256, dtype=torch.float16),
        torch.zeros(4, 256, 128),
        torch.zeros(4, 256, 256).transpose(1, 2),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_bad_main_grad(bad: torch.Tensor) -> None:
    p = problem(32)
    layer = p.experts()
    layer.gate_up_proj.main_grad = bad
    out = layer(p.x, p.topk_idx, p.probs)
    with pytest.raises(ValueError, match=r"\[main_grad\]"):
        out.backward(p.dout)
    assert not bad.any()


# ---- torch around it ----------------------------------------------------------------------------


def save_gemms(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "gemm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "plain": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, save_gemms),
    },
}


@FP8_AND_BF16
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_activation_checkpointing(recipe: Fp8Recipe | None, kind: str) -> None:
    p = problem(96)
    want = p.run(p.experts(recipe=recipe))
    layer = p.experts(recipe=recipe)

    class Checkpointed(nn.Module):
        gate_up_proj, down_proj = layer.gate_up_proj, layer.down_proj

        def forward(self, *args: Any) -> torch.Tensor:
            return checkpoint(layer, *args, **CHECKPOINTS[kind])

    assert_same(p.run(Checkpointed()), want)


@FP8_AND_BF16
def test_views_of_flat_buffers(recipe: Fp8Recipe | None) -> None:
    p = problem(64)
    want = p.run(p.experts(recipe=recipe))
    assert_same(run_unaligned(p, p.experts(recipe=recipe)), want)


@FP8_AND_BF16
def test_autocast(recipe: Fp8Recipe | None) -> None:
    p = problem(96, dtype=torch.float32)
    layer = p.experts(recipe=recipe)
    x = p.x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, p.topk_idx, p.probs)
    assert out.dtype == torch.bfloat16
    out.backward(p.dout.bfloat16())
    assert x.grad.dtype == layer.gate_up_proj.grad.dtype == torch.float32
    p.x, p.dout = p.x.bfloat16(), p.dout.bfloat16()
    want = p.run(p.experts(recipe=recipe, dtype=torch.float32))
    assert torch.equal(out, want.out)
    assert torch.equal(x.grad, want.dx.float())
    assert torch.equal(layer.gate_up_proj.grad, want.dgate_up)


@FP8_AND_BF16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"interleaved": True}], ids=str)
def test_autocast_around_the_backward_too(
    recipe: Fp8Recipe | None, dtype: torch.dtype, options: dict[str, bool]
) -> None:
    """torch's default on CUDA is float16, and the block's own tensors are bfloat16."""
    p = problem(64, dtype=dtype)
    activation = Activation(interleaved="interleaved" in options)
    layer = p.experts(recipe=recipe, activation=activation, bias="bias" in options)
    want = p.run(layer)
    layer.zero_grad()
    with torch.autocast("cpu", dtype):
        assert_same(p.run(layer), want)


def test_functional_call_uses_the_given_weights() -> None:
    p = problem(64)
    layer = p.experts()
    other = {"gate_up_proj": p.gate_up * 2, "down_proj": p.down * 2}
    args = (p.x, p.topk_idx, p.probs)
    out = torch.func.functional_call(layer, other, args)
    twin = p.experts()
    with torch.no_grad():
        twin.gate_up_proj.mul_(2)
        twin.down_proj.mul_(2)
    assert torch.equal(out, twin(*args))
    assert torch.equal(layer(*args), p.experts()(*args))


# ---- transposed codes: saved, or made again ------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preactivation": "recompute"},
        {"delay_wgrad": True},
        {"recipe": Fp8Recipe(scale="fp32", columns="column")},
    ],
    ids=str,
)
def test_recomputed_transposes_are_the_saved_ones(options: dict[str, Any]) -> None:
    p = problem(300, 2, 3, 208, 144)
    runs = []
    for transposed in ("save", "recompute"):
        layer = p.experts(transposed_weights=transposed, **options)
        result = p.run(layer)
        layer.backward_dw()
        weights = layer.gate_up_proj.grad, layer.down_proj.grad
        runs.append(dataclasses.replace(result, dgate_up=weights[0], ddown=weights[1]))
    assert_same(*runs)


# ---- refusals -----------------------------------------------------------------------------------

BAD_OPTIONS = {
    "preactivation": ({"preactivation": "save_fp16"}, ValueError, "'save_fp16'"),
    "transposed": ({"transposed_weights": "none"}, ValueError, "'none'"),
    "save_bf16": ({"preactivation": "save_fp8", "recipe": None}, ValueError, "recipe"),
    "dtype": ({"dtype": torch.float64}, ValueError, "float64"),
    "recipe": ({"recipe": "fp8"}, ValueError, "an Fp8Recipe or None .* 'fp8'"),
    "hidden": ({"hidden_size": 100}, ValueError, "hidden_size .* 100"),
    "intermediate": ({"intermediate_size": 8}, ValueError, "intermediate_size .* 8"),
    "experts": ({"num_experts": 0}, ValueError, "num_experts"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name: str) -> None:
    options, error, message = BAD_OPTIONS[name]
    sizes = {"num_experts": 2, "hidden_size": 128, "intermediate_size": 128}
    with pytest.raises(error, match=message):
        MoEExperts(**{**sizes, **options})


BAD_INPUTS: dict[str, tuple[dict[str, Callable[[Any], Any]], str]] = {
    "x_dtype": ({"x": lambda p: p.x.double()}, "x must be bfloat16.*float64"),
    "x_fp8": ({"x": lambda p: p.x.to(torch.float8_e4m3fn)}, "x must be .*float8_e4m3fn"),
    "x_width": ({"x": lambda p: p.x[:, :128]}, r"\(32, 128\)"),
    "x_rank": ({"x": lambda p: p.x[0]}, r"\(256,\)"),
    "x_device": ({"x": lambda p: p.x.to("meta")}, "x must be on .*meta"),
    "idx_dtype": ({"topk_idx": lambda p: p.topk_idx.float()}, "topk_idx .*float32"),
    "idx_shape": ({"topk_idx": lambda p: p.topk_idx[:7]}, r"topk_idx .*\(7, 2\)"),
    "no_slots": (
        {"topk_idx": lambda p: p.topk_idx[:, :0], "probs": lambda p: p.probs[:, :0]},
        r"topk_idx .*\(32, 0\)",
    ),
    "idx_high": ({"topk_idx": lambda p: p.topk_idx + 1}, r"topk_idx .*\[-1, 4\); got 4"),
    "idx_low": ({"topk_idx": lambda p: p.topk_idx - 3}, r"topk_idx .*\[-1, 4\); got -"),
    "probs_shape": ({"probs": lambda p: p.probs[:, :1]}, r"topk_weights .*\(32, 1\)"),
    "probs_dtype": ({"probs": lambda p: p.topk_idx}, "topk_weights .*int64"),
}


@FP8_AND_BF16
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs(name: str, recipe: Fp8Recipe | None) -> None:
    changes, message = BAD_INPUTS[name]
    p = problem(32)
    layer = p.experts(recipe=recipe)
    args = {"x": p.x, "topk_idx": p.topk_idx, "probs": p.probs}
    args |= {key: change(p) for key, change in changes.items()}
    with pytest.raises(ValueError, match=message):
        layer(*args.values())


def test_more_experts_than_a_plan_has_are_refused_when_made() -> None:
    MoEExperts(1024, 16, 16, device="meta")
    MoEExperts(1025, 16, 16, device="meta", recipe=None)
    with pytest.raises(ValueError, match=r"\[MoEExperts\] num_experts must be at most 1024"):
        MoEExperts(1025, 16, 16, device="meta")
