"""The block as one operator of torch's: traced and compiled it gives eager's bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from fp8moe_cutlass import Activation, Fp8Recipe, __version__, autograd, ops, telemetry
from fp8moe_cutlass.nn import MoEExperts
from moe_problem import assert_same, problem

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "recompute": {"preactivation": "recompute"},
    "fp8_z": {"preactivation": "save_fp8"},
    "transposed": {"transposed_weights": "recompute"},
    "fp32_scales": {"recipe": Fp8Recipe(scale="fp32", columns="column")},
    "e5m2": {"recipe": Fp8Recipe(grad_dtype="e5m2", eps=0.25)},
    "rollout": {"recipe": Fp8Recipe.rollout("vllm")},
    "bf16": {"recipe": None},
    "bf16_recompute": {"recipe": None, "preactivation": "recompute"},
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(f: Any, backend: str = "aot_eager") -> Any:
    # aot_eager traces forward and backward as inductor does and leaves out its code generation.
    return torch.compile(f, fullgraph=True, backend=backend)


class Compiled:
    """A compiled layer with the layer's parameters, as Problem.run takes it."""

    def __init__(self, layer: MoEExperts, backend: str = "aot_eager") -> None:
        self.call = compiled(layer, backend)
        self.gate_up_proj, self.down_proj = layer.gate_up_proj, layer.down_proj

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    p, q = problem(96), problem(160, seed=1)
    layer = p.experts(**OPTIONS[name])
    fast = Compiled(layer)
    assert_same(p.run(fast), p.run(p.experts(**OPTIONS[name])))
    layer.zero_grad()
    got = q.run(fast)  # another number of tokens, and, since, no new graph
    layer.zero_grad()
    assert_same(got, q.run(layer))
    layer.zero_grad()
    with torch.compiler.set_stance("fail_on_recompile"):
        problem(176, seed=2).run(fast)
    with torch.no_grad():
        assert torch.equal(fast(p.x, p.topk_idx, p.probs), layer(p.x, p.topk_idx, p.probs))


@pytest.mark.slow
def test_inductor() -> None:
    p = problem(96)
    assert_same(p.run(Compiled(p.experts(), "inductor")), p.run(p.experts()))


def step(f: Callable[..., Tensor], p: Any, layer: Any, **call: Any) -> list[Tensor]:
    """out and all gradients."""
    x, probs = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_()
    out = f(x, p.topk_idx, probs, **call)
    out.backward(p.dout.to(out.dtype))
    grads = [w.grad for w in layer.parameters() if w.grad is not None]
    layer.zero_grad()
    return [out.detach(), x.grad, probs.grad, *grads]


def equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("transposed", [True, False])
def test_given_weights(transposed: bool) -> None:
    p = problem(96)
    layer = p.experts()
    with torch.set_grad_enabled(transposed):
        weights = layer.quantize_weights()
    fast = compiled(lambda x, ids, probs, weights: layer(x, ids, probs, weights=weights))
    call = {"weights": weights}
    equal(step(fast, p, layer, **call), step(layer, p, layer, **call))


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
@pytest.mark.parametrize("given", ["counts", "list", "plan"])
def test_grouped_rows(recipe: Fp8Recipe | None, given: str) -> None:
    p = problem(96)
    layer = p.experts(recipe=recipe)
    counts: Any = torch.tensor([30, 0, 50, 10])
    if given == "plan":
        counts = ops.plan_from_counts(counts, capacity=96)
    elif given == "list":
        counts = counts.tolist()
    rows = lambda f: lambda x, _, probs: f(x, counts, probs[:, 0])  # noqa: E731
    fast = compiled(lambda x, c, probs: layer.forward_rows(x, c, probs))
    kept = 90  # rows past the counts' sum are unspecified

    def run(f: Any) -> list[Tensor]:
        out, dx, dprobs, *grads = step(rows(f), p, layer)
        return [out[:kept], dx[:kept], dprobs[:kept], *grads]

    p.dout[kept:] = 0
    equal(run(fast), run(layer.forward_rows))


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_mask(recipe: Fp8Recipe | None) -> None:
    p = problem(96)
    layer = p.experts(recipe=recipe)
    mask = torch.zeros(96, 4, dtype=torch.bool).scatter_(1, p.topk_idx, True)
    probs = torch.rand(96, 4)
    held = int(mask.sum())
    routed = lambda f, most: lambda x, _, w: f(x, mask, probs * w.sum(), max_assignments=most)  # noqa: E731
    for most in (held, held + 7):
        equal(
            step(compiled(routed(layer, most)), p, layer),
            step(routed(layer, most), p, layer),
        )
    for call in (layer, compiled(layer)):
        with pytest.raises(ValueError, match=f"must hold at most {held - 1}; got {held}"):
            call(p.x, mask, probs, max_assignments=held - 1)


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_main_grad_of_two_forwards_in_flight(recipe: Fp8Recipe | None) -> None:
    """Forward, forward, backward, backward, as pipelines run them; main_grad written between."""
    p = problem(96)
    results = []
    for wrap in (lambda layer: layer, compiled):
        layer = p.experts(recipe=recipe)
        for w in layer.parameters():
            w.main_grad = torch.full(w.shape, 7.0)
        f = wrap(layer)
        ends = []
        for _ in range(2):
            x, probs = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_()
            ends.append((f(x, p.topk_idx, probs), x, probs))
        for out, _, _ in ends:
            for w in layer.parameters():
                w.main_grad.mul_(0.5)
            out.backward(p.dout)
        assert layer.down_proj.grad is None
        tensors = [t for out, x, probs in ends for t in (out.detach(), x.grad, probs.grad)]
        results.append([*tensors, *(w.main_grad for w in layer.parameters())])
    equal(*results)


def test_what_a_compiled_backward_cannot_do_is_refused() -> None:
    p = problem(96)
    layer = p.experts()
    for w in layer.parameters():
        w.main_grad = torch.zeros(w.shape)
    with pytest.raises(RuntimeError, match="x or topk_weights that require a gradient"):
        compiled(layer)(p.x, p.topk_idx, p.probs)
    layer.gate_up_proj.grad_added_to_main_grad = False
    x = p.x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="grad_added_to_main_grad cannot be set"):
        compiled(layer)(x, p.topk_idx, p.probs)
    with pytest.raises(RuntimeError, match="delay_wgrad=True cannot be traced or compiled"):
        compiled(p.experts(delay_wgrad=True))(x, p.topk_idx, p.probs)
    layer = p.experts()
    layer.gate_up_proj.grad_dtype = torch.float32
    with pytest.raises(RuntimeError, match="grad_dtype cannot be compiled"):
        compiled(layer)(x, p.topk_idx, p.probs)


def test_layers_share_a_graph() -> None:
    """Layers of one configuration, compiled one by one as blocks of a model are."""
    p = problem(96)
    layers = [p.experts() for _ in range(3)]
    with torch.no_grad():
        for n, layer in enumerate(layers):
            layer.down_proj.mul_(1.0 + n)
    fast = [torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in layers]
    step(fast[0], p, layers[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for f, layer in zip(fast, layers, strict=True):
            equal(step(f, p, layer), step(layer, p, layer))


def test_one_layer_twice() -> None:
    p = problem(96)
    layer = p.experts()
    twice = lambda x, ids, probs: layer(layer(x, ids, probs), ids, probs)  # noqa: E731
    equal(step(compiled(twice), p, layer), step(twice, p, layer))


def test_counters() -> None:
    p = problem(96)
    reports = []
    for wrap in (lambda layer: layer, compiled):
        layer = p.experts()
        with telemetry.watch(layer, every=1) as seen:
            step(wrap(layer), p, layer)
        reports.append(seen.report())
    assert reports[0] == reports[1]
    assert reports[0][""]["transposes"]["x columns"]["shifts"] != [0] * 17


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_checkpoint(reentrant: bool, wrap: Any) -> None:
    p = problem(96)
    layer = p.experts()
    again = functools.partial(checkpoint, layer, use_reentrant=reentrant)
    if reentrant and wrap is compiled:
        pytest.skip("torch.compile takes no reentrant checkpoint in one graph")
    equal(step(wrap(lambda *a: again(*a)), p, layer), step(layer, p, layer))


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
@pytest.mark.parametrize("save", [True, False])
def test_selective_checkpoint(
    save: bool, recipe: Fp8Recipe | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that saves the operator's outputs runs it once."""
    p = problem(96)
    layer = p.experts(recipe=recipe)
    want = step(layer, p, layer)
    forwards = []
    run = autograd.block.forward
    monkeypatch.setattr(autograd.block, "forward", lambda *a: forwards.append(1) or run(*a))
    op = torch.ops.fp8moe.experts.default
    must, may = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    policy = lambda _, called, *a, **k: must if save and called is op else may  # noqa: E731
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    again = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)
    equal(step(again, p, layer), want)
    assert len(forwards) == (1 if save else 2)


@pytest.mark.parametrize("name", OPTIONS)
def test_flops_are_counted(name: str) -> None:
    p = problem(96, hidden=256, intermediate=128)
    layer = p.experts(**OPTIONS[name])
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        layer(p.x, p.topk_idx, p.probs)
    gemm = 2 * 96 * 2 * 256 * 128  # of down_proj; gate_up_proj takes two
    assert forward.get_total_flops() == 3 * gemm
    with FlopCounterMode(display=False) as both:
        step(layer, p, layer)
    again = 2 if "recompute" in name else 0
    assert both.get_total_flops() == (9 + again) * gemm


def test_make_fx_records_one_operator_each_way() -> None:
    p = problem(96)
    layer = p.experts()

    def f(x: Tensor, probs: Tensor) -> Any:
        out = layer(x.requires_grad_(), p.topk_idx, probs)
        return torch.autograd.grad(out, x, torch.ones_like(out))

    graph = make_fx(f)(p.x.clone(), p.probs)
    ours = [n.target for n in graph.graph.nodes if "fp8moe" in str(n.target)]
    ops = torch.ops.fp8moe
    assert ours == [ops.experts.default, ops.experts_backward.default]
    assert torch.equal(graph(p.x.clone(), p.probs)[0], f(p.x.clone(), p.probs)[0])


def test_gradient_of_x_alone() -> None:
    p = problem(96)
    layer = p.experts()
    f = lambda x: torch.autograd.grad(layer(x, p.topk_idx, p.probs).sum(), x)[0]  # noqa: E731
    x = p.x.clone().requires_grad_()
    g = lambda x: layer(x, p.topk_idx, p.probs).sum()  # noqa: E731
    assert torch.equal(torch.autograd.grad(compiled(g)(x), x)[0], f(x))
    assert layer.down_proj.grad is None


@pytest.mark.parametrize("tokens", [1, 5])
def test_export_from_one_token_on(tokens: int) -> None:
    p = problem(96)
    layer = p.experts()
    dim = torch.export.Dim("tokens", min=1, max=4096)
    program = torch.export.export(
        layer, (p.x, p.topk_idx, p.probs), dynamic_shapes=({0: dim}, {0: dim}, {0: dim})
    ).module()
    q = problem(tokens, seed=3)
    with torch.no_grad():
        assert torch.equal(program(q.x, q.topk_idx, q.probs), layer(q.x, q.topk_idx, q.probs))


@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck(name: str) -> None:
    p = problem(33)
    layer = p.experts(**OPTIONS[name])
    args = []

    def seen(x: Tensor, *rest: Any) -> Any:
        args.append((x, *rest))
        return [x]

    through = autograd.torch_op.torch.ops.fp8moe.experts
    need = [True] * 4 + [False] * 4
    how = f"{__version__} tokens {autograd.torch_op.words_of(layer._options)}"
    x, probs = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_()
    weights = tuple(layer.parameters())
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    rest = how, [33, 2, 4, 1, 66], -1
    given = (x, p.topk_idx, probs, None, *weights, None, [], [], [], 0.0, *rest, need)
    torch.library.opcheck(through, given, test_utils=utils)
    biases = [w.new_ones(w.shape[:2]).requires_grad_() for w in weights]
    of_biases = [*[True] * 4, False, True, *[False] * 4]
    given = (x, p.topk_idx, probs, None, *weights, None, [], biases, [], 0.0, *rest, of_biases)
    torch.library.opcheck(through, given, test_utils=utils)
    if layer.recipe is None:
        return
    layer.add_lora(16, alpha=32)
    factors = list(layer.parameters())[2:]
    need = [True, True, False, False, True, False, False, False]
    given = (x, p.topk_idx, probs, None, *weights, None, [], [], factors, 2.0, *rest, need)
    torch.library.opcheck(through, given, test_utils=utils)


@pytest.mark.parametrize(
    "name", ["default", "recompute", "fp8_z", "fp32_scales", "e5m2", "rollout"]
)
@pytest.mark.parametrize("trains", ["all", "gate", "up", "down"])
def test_gate_and_up_as_two_tensors(name: str, trains: str) -> None:
    """The bits of one tensor, eager and compiled; each gradient has memory of its own."""
    p = problem(96, hidden=256, intermediate=128)
    options = p.experts(**OPTIONS[name])._options
    gate_up, down = (torch.randn(4, *shape) / 16 for shape in ((256, 256), (256, 128)))

    def one(x: Tensor, probs: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        both, move = torch.cat([gate, up], dim=1), autograd.Local(4)
        return autograd.torch_op.run(x, p.topk_idx, probs, both, down, options, move)

    def two(x: Tensor, probs: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        move = autograd.Local(4)
        return autograd.torch_op.run(x, p.topk_idx, probs, gate, down, options, move, up=up)

    results = []
    for run in (one, two, compiled(two)):
        parts = [*gate_up.clone().chunk(2, dim=1), down.clone()]
        weights = [
            w.contiguous().requires_grad_(trains in ("all", of))
            for w, of in zip(parts, ("gate", "up", "down"), strict=True)
        ]
        x, probs = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_()
        out = run(x, probs, *weights)
        out.backward(p.dout)
        assert [w.grad is not None for w in weights] == [w.requires_grad for w in weights]
        grads = [w.grad for w in weights if w.grad is not None]
        assert all(g.is_contiguous() for g in grads)
        results.append([out.detach(), x.grad, probs.grad, *grads])
        with torch.no_grad():
            results[-1].append(run(x, probs, *weights))
    equal(results[0], results[1])
    equal(results[0], results[2])


def test_opcheck_of_gate_and_up() -> None:
    p = problem(33, hidden=256, intermediate=128)
    layer = p.experts()
    gate, up = (w.detach().contiguous().requires_grad_() for w in layer.gate_up_proj.chunk(2, 1))
    x, probs = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_()
    how = f"{__version__} tokens {autograd.torch_op.words_of(layer._options)}"
    weights, rest = (gate, layer.down_proj, up, [], [], [], 0.0), (how, [33, 2, 4, 1, 66], -1)
    given = (x, p.topk_idx, probs, None, *weights, *rest, [True] * 4 + [False] * 4)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.fp8moe.experts, given, test_utils=utils)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        torch.ops.fp8moe.experts(*given[:-1], [])
    assert counted.get_total_flops() == 2 * 66 * 3 * 256 * 128


def test_layers_whose_numbers_differ_compile_in_one_process() -> None:
    """torch.compile takes a number that differs from layer to layer for a symbol."""
    call = torch.randn(4, 128).bfloat16(), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    for number in (7.0, 10.0, 12.0):
        recipe = Fp8Recipe(eps=1e-4 / number, activation_eps=1e-3 / number)
        how: dict[str, Any] = {"activation": Activation(limit=number), "recipe": recipe}
        layer = MoEExperts(2, 128, 128, **how)
        run = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(run(*call), layer(*call))
