"""What a layer computes and keeps for gradients: frozen parameters, main_grad at any address,
grad_dtype, deferral, saved-tensor hooks, and torch around them."""

from __future__ import annotations

import copy
import math
import multiprocessing
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8moe_cutlass import _C, Fp8Recipe, ops
from fp8moe_cutlass.autograd import weight_grad
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.ops import _torch
from moe_problem import Problem, assert_same, problem, unaligned

SMALL = (24, 2, 2, 128, 128)


def small(**options: Any) -> tuple[Problem, MoEExperts]:
    p = problem(*SMALL)
    return p, p.experts(**options)


def main_grads(layer: MoEExperts) -> list[Tensor]:
    for w in layer.parameters():
        w.main_grad = torch.zeros(w.shape)
    return [w.main_grad for w in layer.parameters()]


# ---- what nobody takes --------------------------------------------------------------------------

WANTED: dict[str, tuple[dict[str, bool], bool, bool]] = {
    # which leaves require grad -> whether gate_up is also written transposed, whether x is saved
    "everything": ({}, True, True),
    "frozen_weights": ({"gate_up": False, "down": False}, True, False),
    "no_dx": ({"x": False}, False, True),
    "down_alone": ({"x": False, "probs": False, "gate_up": False}, False, False),
    "probs_alone": ({"x": False, "gate_up": False, "down": False}, False, False),
}


def directions(patch: pytest.MonkeyPatch) -> list[bool | str]:
    """Fills with `transposed` of each quantize_weight."""
    made: list[bool | str] = []
    quantize_weight = ops.quantize_weight

    def spy(w: Tensor, *, transposed: bool | str = True, **how: Any) -> Any:
        made.append(transposed)
        return quantize_weight(w, transposed=transposed, **how)

    patch.setattr(ops, "quantize_weight", spy)
    return made


@pytest.mark.parametrize("probs", [True, False], ids=["tokens", "rows"])
@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_a_backward_for_some_inputs_leaves_the_others_alone(
    recipe: Fp8Recipe | None, probs: bool
) -> None:
    """autograd.grad(out, x), backward(inputs=): no weight's gradient is computed, written to
    main_grad, or deferred; one weight's alone is that of the whole backward."""
    p = problem(*SMALL)
    layer, delayed = p.experts(recipe=recipe), p.experts(recipe=recipe, delay_wgrad=True)
    grads = main_grads(layer)
    counts = torch.tensor([len(p.x) - 3, 3])

    def forward(layer: MoEExperts) -> tuple[Tensor, Tensor]:
        x = p.x.clone().requires_grad_()
        if probs:
            return x, layer(x, p.topk_idx, p.probs)
        return x, layer.forward_rows(x, counts)

    x, out = forward(layer)
    out.backward(p.dout, retain_graph=True)
    whole = [x.grad.clone(), *(g.clone() for g in grads)]
    for g in grads:
        g.zero_()
    (dx,) = torch.autograd.grad(out, x, p.dout, retain_graph=True)
    assert torch.equal(dx, whole[0])
    x.grad = None
    out.backward(p.dout, inputs=[x], retain_graph=True)
    assert torch.equal(x.grad, whole[0])
    assert not any(g.any() for g in grads)
    out.backward(p.dout, inputs=[layer.down_proj], retain_graph=True)
    assert not grads[0].any()
    assert torch.equal(grads[1], whole[2])

    for g in grads:
        g.zero_()
    for of in (layer, delayed):  # returned, with a main_grad and where it would wait
        delayed.load_state_dict(layer.state_dict())
        x, out = forward(of)
        gate_up, down = torch.autograd.grad(out, list(of.parameters()), p.dout)
        assert torch.equal(gate_up, whole[1].to(gate_up.dtype))
        assert torch.equal(down, whole[2].to(down.dtype))
        assert not any(g.any() for g in grads)

    delayed.load_state_dict(layer.state_dict())
    x, out = forward(delayed)
    torch.autograd.grad(out, x, p.dout)
    delayed.backward_dw()
    assert all(w.grad is None for w in delayed.parameters())


def test_a_torch_that_does_not_tell_what_a_backward_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight's gradient is then computed, and main_grad written; dx is right."""
    assert _torch._will_run is not None
    p = problem(*SMALL)
    layer = p.experts()
    grads = main_grads(layer)
    x = p.x.clone().requires_grad_()
    layer(x, p.topk_idx, p.probs).backward(p.dout)
    whole = [g.clone() for g in grads]
    for g in grads:
        g.zero_()
    monkeypatch.setattr(_torch, "_will_run", None)
    (dx,) = torch.autograd.grad(layer(x, p.topk_idx, p.probs), x, p.dout)
    assert torch.equal(dx, x.grad)
    assert all(map(torch.equal, grads, whole))


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("options", [{}, {"transposed_weights": "recompute"}], ids=str)
def test_nothing_is_made_or_saved_for_a_gradient_nobody_takes(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves, gate_up_t, x_saved = WANTED[name]
    p, layer = small(**options)
    want = p.run(p.experts())
    made = directions(monkeypatch)
    layer.gate_up_proj.requires_grad_(leaves.get("gate_up", True))
    layer.down_proj.requires_grad_(leaves.get("down", True))
    x = p.x.clone().requires_grad_(leaves.get("x", True))
    probs = p.probs.clone().requires_grad_(leaves.get("probs", True))
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks:
        out = layer(x, p.topk_idx, probs)
    if options:
        assert made == [False, False]
        assert any(t is layer.down_proj for t in kept)
        assert any(t is layer.gate_up_proj for t in kept) == gate_up_t
    else:
        assert made == [gate_up_t, True]
        codes = [t.shape for t in kept if t.dtype == torch.float8_e4m3fn]
        assert codes.count(torch.Size((2, 128, 256))) == gate_up_t
        assert codes.count(torch.Size((2, 128, 128))) == 1
    rows = [t for t in kept if t.dtype == torch.float8_e4m3fn and t.shape == x.shape]
    assert len(rows) == x_saved
    out.backward(p.dout)
    taken = (x, probs, layer.gate_up_proj, layer.down_proj)
    for leaf, grad in zip(taken, (want.dx, want.dprobs, want.dgate_up, want.ddown), strict=True):
        assert (leaf.grad is not None) == leaf.requires_grad
        assert leaf.grad is None or torch.equal(leaf.grad, grad)


def test_no_grad_writes_one_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    p, layer = small()
    made = directions(monkeypatch)
    with torch.no_grad():
        layer(p.x, p.topk_idx, p.probs)
    assert made == [False, False]


@pytest.mark.parametrize("delay", [False, True])
def test_placeholders_are_one_memory_per_shape(delay: bool) -> None:
    """Megatron's hooks want a .grad where main_grad has the gradient; also after backward_dw."""
    addresses = set()
    for _ in range(2):
        p, layer = small(delay_wgrad=delay)
        main_grads(layer)
        for w in layer.parameters():
            w.grad_added_to_main_grad = False
        for _ in range(2):
            p.run(layer)
            assert (layer.down_proj.grad is None) == delay
            layer.backward_dw()
            addresses.add(layer.down_proj.grad.data_ptr())
            assert all(w.grad_added_to_main_grad for w in layer.parameters())
            layer.zero_grad()
    assert len(addresses) == 1


@pytest.mark.parametrize("zero", [False, True])
def test_anomaly_detection_sees_no_placeholder(zero: bool) -> None:
    p, layer = small()
    main_grads(layer)
    for w in layer.parameters():
        w.grad_added_to_main_grad, w.zero_out_wgrad = False, zero
    torch.use_deterministic_algorithms(True)  # empty tensors are NaN
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            p.run(layer)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not layer.down_proj.grad.any()


# ---- main_grad ----------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_at_any_address(delay: bool, dtype: torch.dtype) -> None:
    """Plain Megatron DDP packs gradients into one buffer without padding."""
    grads = []
    for place in (lambda t: t, unaligned):
        p, layer = small(delay_wgrad=delay)
        for w in layer.parameters():
            w.main_grad = place(torch.full(w.shape, 0.5, dtype=dtype))
        for _ in range(2):
            p.run(layer)
            layer.backward_dw()
        grads.append([w.main_grad for w in layer.parameters()])
    assert grads[1][0].data_ptr() % 16
    for aligned, packed in zip(*grads, strict=True):
        assert torch.equal(aligned, packed)


# ---- grad_dtype ---------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [False, True])
def test_grad_dtype_is_honoured(delay: bool) -> None:
    p, layer = small(delay_wgrad=delay)
    exact = p.run(p.experts(dtype=torch.float32))
    for w in layer.parameters():
        w.grad_dtype = torch.float32
    for times in (1, 2):
        layer(p.x, p.topk_idx, p.probs).backward(p.dout)
        layer.backward_dw()
        for w, want in zip(layer.parameters(), (exact.dgate_up, exact.ddown), strict=True):
            assert w.grad.dtype == torch.float32
            assert torch.equal(w.grad, times * want)


def test_grad_dtype_is_refused_by_a_compiled_forward() -> None:
    """AOTAutograd casts every gradient to its parameter's dtype."""
    torch._dynamo.reset()
    p, layer = small()
    layer.down_proj.grad_dtype = torch.float32
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"grad_dtype cannot be compiled; got torch\.float32"):
        run(p.x, p.topk_idx, p.probs)


# ---- main_grad, compiled ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_equal_calls_in_one_graph_add_to_main_grad_each(recipe: Fp8Recipe | None) -> None:
    """torch merges calls of an operator with equal arguments."""
    torch._dynamo.reset()
    p, layer = small(recipe=recipe)

    def twice(x: Tensor) -> Tensor:
        first: Tensor = layer(x, p.topk_idx, p.probs)
        return first + layer(x, p.topk_idx, p.probs)

    sums = []
    for forward in (twice, torch.compile(twice, backend="aot_eager", fullgraph=True)):
        for w in layer.parameters():
            w.main_grad = torch.zeros_like(w, dtype=torch.float32)
        forward(p.x.clone().requires_grad_()).backward(p.dout)
        sums.append([w.main_grad for w in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


def test_a_main_grad_that_is_gone_in_a_compiled_backward() -> None:
    """The compiled backward returns no gradient for .grad: it would be lost."""
    torch._dynamo.reset()
    p, layer = small()
    for w in layer.parameters():
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    out = run(p.x.clone().requires_grad_(), p.topk_idx, p.probs)
    del layer.down_proj.main_grad
    with pytest.raises(RuntimeError, match=r"main_grad must stay from a compiled forward to its"):
        out.backward(p.dout)


# ---- deferral -----------------------------------------------------------------------------------


def test_a_forgotten_backward_dw_is_told() -> None:
    p, layer = small(delay_wgrad=True)
    outs = [layer(p.x, p.topk_idx, p.probs) for _ in range(2)]
    for out in outs:  # two in flight are no mistake
        out.backward(p.dout)
    net = nn.ModuleDict({"moe": layer})
    for act, before in (
        (lambda: layer(p.x, p.topk_idx, p.probs), "the next training forward"),
        (net.state_dict, r"state_dict\(\)"),
        (lambda: copy.deepcopy(net), "a copy of the layer"),
    ):
        with pytest.raises(
            RuntimeError, match=rf"must run before {before}; got 4 weight gradients"
        ):
            act()
    with torch.no_grad():
        layer(p.x, p.topk_idx, p.probs)
    layer.backward_dw()
    p.run(copy.deepcopy(layer))


def test_checkpointed_forwards_inside_backwards_are_no_next_ones() -> None:
    p, layer = small(delay_wgrad=True)
    args = (p.x.clone().requires_grad_(), p.topk_idx, p.probs)
    outs = [torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False) for _ in range(2)]
    sum(outs).backward(p.dout)
    layer.backward_dw()
    assert torch.equal(layer.down_proj.grad, 2 * p.run(p.experts()).ddown)


@pytest.mark.parametrize("main", [False, True])
def test_a_backward_dw_out_of_memory_runs_again(main: bool, monkeypatch: Any) -> None:
    """At each of its allocations: the gradient is there once."""
    p, layer = small(delay_wgrad=True)
    if main:
        main_grads(layer)
    for w in layer.parameters():
        w.grad_added_to_main_grad = False
    want = p.run(p.experts(dtype=torch.float32 if main else torch.bfloat16))
    p.run(layer)
    raised = allocated = 0

    def failing(make: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal raised, allocated
            if allocated == raised:
                raised += 1
                raise torch.OutOfMemoryError
            allocated += 1
            return make(*args, **kwargs)

        return run

    monkeypatch.setattr(weight_grad, "_placeholders", {})
    monkeypatch.setattr(torch, "zeros", failing(torch.zeros))
    for name in _C.operators():  # which allocate their outputs before all else
        monkeypatch.setattr(_C, name, failing(getattr(_C, name)))
    while layer._delayed:
        allocated = 0
        with suppress(torch.OutOfMemoryError):
            layer.backward_dw()
    assert raised > 2
    for w, grad in zip(layer.parameters(), (want.dgate_up, want.ddown), strict=True):
        assert torch.equal(w.main_grad if main else w.grad, grad)


def test_deferred_gradients_need_the_parameter_that_forward_saw() -> None:
    p, layer = small(delay_wgrad=True)
    p.run(layer)
    layer.down_proj = nn.Parameter(layer.down_proj.detach().clone())
    layer.gate_up_proj = nn.Parameter(layer.gate_up_proj.detach().clone())
    with pytest.raises(RuntimeError, match="needs the parameters that forward saw"):
        layer.backward_dw()


# ---- what is saved ------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [Fp8Recipe(), Fp8Recipe(scale="fp32", columns="column"), None])
@pytest.mark.parametrize("options", [{}, {"transposed_weights": "recompute"}], ids=str)
def test_saved_tensors_in_flat_buffers(recipe: Fp8Recipe | None, options: dict[str, Any]) -> None:
    """A saved-tensor hook may give back any memory."""
    p = problem(*SMALL)
    layer = p.experts(recipe=recipe, **options)
    want = p.run(p.experts(recipe=recipe))
    with torch.autograd.graph.saved_tensors_hooks(unaligned, lambda t: t):
        assert_same(p.run(layer), want)


def test_a_misaligned_parameter_is_quantized_in_backward() -> None:
    p, layer = small(transposed_weights="recompute")
    want = p.run(p.experts())
    memory = torch.frombuffer(bytearray(2 * 2 * 256 * 128 + 2), dtype=torch.bfloat16, offset=2)
    for w in layer.parameters():
        held = memory[: w.numel()].clone().new_zeros(w.numel() + 1)[1:].view(w.shape)
        w.data = held.copy_(w.detach())
        assert w.data_ptr() % 16
    assert_same(p.run(layer), want)


# ---- options, moves, threads, processes, export -------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recipe", None),
        ("preactivation", "recompute"),
        ("transposed_weights", "recompute"),
        ("delay_wgrad", True),
    ],
)
def test_options_are_fixed(name: str, value: Any) -> None:
    p, layer = small()
    want = p.run(p.experts())
    with pytest.raises(
        AttributeError, match=rf"property '{name}' of 'MoEExperts' object has no setter"
    ):
        setattr(layer, name, value)
    assert_same(p.run(layer), want)


def test_a_move_that_fails_halfway() -> None:
    calls = []

    def second_fails(t: Tensor) -> Tensor:
        calls.append(t)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return t.clone()

    p, layer = small()
    with pytest.raises(KeyboardInterrupt):
        layer._apply(second_fails)
    assert_same(p.run(layer), p.run(p.experts()))


def test_threads_beside_an_unrelated_optimizer() -> None:
    """Two threads on a frozen layer, a third one steps another model."""
    p, layer = small()
    layer.requires_grad_(False)
    want = p.run(p.experts()).dx
    other = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    wrong: list[Any] = []
    done = threading.Event()

    def work() -> None:
        for _ in range(20):
            try:
                x = p.x.clone().requires_grad_()
                layer(x, p.topk_idx, p.probs).backward(p.dout)
                if not torch.equal(x.grad, want):
                    wrong.append("another gradient")
            except RuntimeError as error:
                wrong.append(error)

    def steps() -> None:
        while not done.is_set():
            other(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    threads = [threading.Thread(target=work) for _ in range(2)]
    stepping = threading.Thread(target=steps)
    for t in (stepping, *threads):
        t.start()
    for t in threads:
        t.join()
    done.set()
    stepping.join()
    assert not wrong


def double(layer: MoEExperts) -> None:
    layer.down_proj.detach().view(torch.int16).numpy()[:] += 1 << 7  # an exponent: twice the value


def test_another_process_writes_a_shared_parameter() -> None:
    p, layer = small()
    layer.share_memory()
    before = p.run(layer).out
    child = multiprocessing.get_context("fork").Process(target=double, args=(layer,))
    child.start()
    child.join()
    torch.testing.assert_close(p.run(layer).out, 2 * before, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_follows_its_weights(strict: bool) -> None:
    p, layer = small()
    args = (p.x, p.topk_idx, p.probs)
    with torch.no_grad():
        exported = torch.export.export(layer, args, strict=strict)
        assert set(exported.state_dict) == {"gate_up_proj", "down_proj"}
        run = exported.module()
        assert torch.equal(run(*args), layer(*args))
        other = {k: 1.5 * v for k, v in layer.state_dict().items()}
        run.load_state_dict(other)
        layer.load_state_dict(other)
        assert torch.equal(run(*args), layer(*args))


def test_no_second_copy_of_the_weights_under_torch_compile() -> None:
    """With "recompute" the transposed codes are made in the backward's graph, not kept for it."""
    kept = {}
    for transposed in ("save", "recompute"):
        torch._dynamo.reset()
        p, layer = small(transposed_weights=transposed)
        run = torch.compile(layer, backend="aot_eager", fullgraph=True)
        out = run(p.x.clone().requires_grad_(), p.topk_idx, p.probs)
        own = {w.data_ptr() for w in layer.parameters()}
        kept[transposed] = sum(
            t.nbytes for t in out.grad_fn.saved_tensors if t.data_ptr() not in own
        )
    assert kept["save"] - kept["recompute"] == 2 * 3 * 128 * 128 + 4 * 2 * 3


# ---- what is not finite -------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("where", ["x", "dout"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(
    "recipe",
    [Fp8Recipe(), Fp8Recipe(grad_dtype="e5m2"), Fp8Recipe(scale="fp32", columns="column"), None],
    ids=["fp8", "e5m2", "fp32", "bf16"],
)
def test_what_a_grad_scaler_sees(recipe: Any, value: float, where: str, device: str) -> None:
    """FP8 saturates an infinity, so that no overflow is found; a NaN is."""
    p = problem(*SMALL)
    (p.x if where == "x" else p.dout)[3, 5] = value
    p.x, p.dout, p.topk_idx, p.probs = (t.to(device) for t in (p.x, p.dout, p.topk_idx, p.probs))
    # CUDA's unscale_ takes no bfloat16.
    layer = p.experts(recipe=recipe, device=device, dtype=torch.float32)
    got = p.run(layer)
    optimizer = torch.optim.SGD(layer.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=1.0)
    scaler.scale(torch.ones(1, device=device))
    scaler.unscale_(optimizer)
    [found] = scaler._found_inf_per_device(optimizer).values()
    assert bool(found) == (recipe is None or math.isnan(value))
    assert got.dx.isfinite().all() == (not found)
