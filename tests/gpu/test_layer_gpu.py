"""MoEExperts on CUDA: numbers, what it launches, graphs, streams, where weight gradients go."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import MoEExperts, reuse_fp8_weights
from kernel_trace import PREFIX, kernels_of, spans, trace
from moe_problem import Problem, assert_same, problem
from on_device import capture
from reference import Result, relative_error
from test_layer import zipf

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "column": {"recipe": Fp8Recipe(columns="column")},
    "recompute": {"preactivation": "recompute"},
    "fp8_z": {"preactivation": "save_fp8"},
    "transposes_recomputed": {"transposed_weights": "recompute"},
    "fp32_scales": {"recipe": Fp8Recipe(scale="fp32", columns="column")},
    "amax_scales": {"recipe": Fp8Recipe(scale="amax", columns="column")},
    "e5m2_grads": {"recipe": Fp8Recipe(grad_dtype="e5m2")},
    "weighted_output": {"recipe": Fp8Recipe(weighting="output")},
}
BOTH_COLUMNS = pytest.mark.parametrize("name", ["default", "column"])


def on(device: torch.device, *sizes: int, **options: Any) -> Problem:
    return problem(*sizes, **options).to(device)


def step(layer: Any, p: Problem, params: tuple[Tensor, ...]) -> Result:
    """Output and gradients without touching .grad: nothing but the layer runs."""
    x, probs = p.x.detach().requires_grad_(), p.probs.detach().requires_grad_()
    out = layer(x, p.topk_idx, probs)
    return Result(out.detach(), *torch.autograd.grad(out, (x, probs, *params), p.dout))


# ---- numbers ------------------------------------------------------------------------------------


def test_bad_expert_ids_are_dropped(device: torch.device) -> None:
    """CUDA has no sync to raise with: an id out of range counts as dropped."""
    p = on(device, 300)
    bad, dropped = p.topk_idx.clone(), p.topk_idx.clone()
    bad[::7, 0], bad[3::7, 1] = 99, -5
    dropped[::7, 0], dropped[3::7, 1] = -1, -1
    results = []
    for idx in (bad, dropped):
        p.topk_idx = idx
        results.append(p.run(p.experts()))
    assert_same(*results)


# ---- what is launched ---------------------------------------------------------------------------

FORWARD = [
    *("route", "quantize_weight", "quantize_weight", "quantize", "permute_pad", "grouped_gemm"),
    *("act_quantize", "grouped_gemm", "unpermute_unpad"),
]
BACKWARD = [
    *("quantize", "permute_pad", "grouped_gemm", "act_quantize_backward", "grouped_gemm"),
    *("permute_pad_backward", "permute_transpose_fp8", "grouped_gemm_wgrad"),
    *("permute_transpose_fp8", "grouped_gemm_wgrad"),
]


@pytest.mark.parametrize("preactivation", ["save", "recompute"])
def test_two_casts_and_nothing_of_torch(preactivation: str, device: torch.device) -> None:
    """The kernels of a step, as the profiler saw them on the device: those of the operators above,
    quantize twice, and of torch's no copy, no cast and one fill, of the backward's workspace."""
    p = on(device, 512, 4, 8, 512, 256)
    layer = p.experts(preactivation=preactivation)
    params = tuple(layer.parameters())
    step(layer, p, params)
    events = trace(lambda: step(layer, p, params), device)
    kernels = kernels_of(events, cuda=True)
    launched: list[str] = []
    fills = [kernel for kernel in kernels if kernel.op == "torch"]
    assert len(fills) == 1, fills
    assert "fill" in fills[0].name.lower() or "memset" in fills[0].name.lower(), fills
    for kernel in kernels:
        if kernel.op == "torch":
            continue
        assert "fp8moe" in kernel.name or "mem" in kernel.name.lower(), kernel
        if not launched or launched[-1] != (kernel.op, kernel.call):
            launched.append((kernel.op, kernel.call))
    ops = [op for op, _ in launched]
    assert ops.count("quantize") == 2
    again = ["permute_pad", "grouped_gemm"] if preactivation == "recompute" else []
    assert sorted(ops) == sorted(FORWARD + BACKWARD + again)
    # Inside the operators the host neither waits nor allocates.
    calls = [e for e in events if e.get("cat") == "cpu_op" and e["name"].startswith(PREFIX)]
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            inside = any(c["tid"] == event["tid"] and spans(c, event) for c in calls)
            forbidden = ("Synchronize", "Malloc", "Free", "cudaMemcpy", "Query")
            assert not inside or not any(word in event["name"] for word in forbidden), event["name"]


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", OPTIONS)
def test_no_host_sync(name: str, device: torch.device) -> None:
    p = on(device, 512, 2, 4)
    layer = p.experts(**OPTIONS[name])
    for w in layer.parameters():
        w.main_grad = torch.zeros(w.shape, device=device)
    p.run(layer)
    with no_sync():
        p.run(layer)
        p.run(layer, weights=layer.quantize_weights())
        with torch.no_grad():
            layer(p.x, p.topk_idx, p.probs)


@pytest.mark.parametrize("name", OPTIONS)
def test_side_stream(name: str, device: torch.device) -> None:
    p = on(device, 512, 2, 4)
    layer = p.experts(**OPTIONS[name])
    params = tuple(layer.parameters())
    want = step(layer, p, params)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # whoever runs on another stream comes too early
        x = p.x.clone()
        got = step(layer, dataclasses.replace(p, x=x), params)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(got, want)


# ---- CUDA graphs --------------------------------------------------------------------------------


class Captured:
    """One graph of forward and backward over fixed addresses."""

    def __init__(self, layer: MoEExperts, p: Problem) -> None:
        self.p = dataclasses.replace(p, **{name: t.clone() for name, t in vars(p).items()})
        params = tuple(layer.parameters())
        self.graph, self.result = capture(lambda: step(layer, self.p, params), 2)

    def __call__(self, p: Problem) -> Result:
        for name in ("x", "topk_idx", "probs", "dout"):
            getattr(self.p, name).copy_(getattr(p, name))
        self.graph.replay()
        return self.result


def routing_kinds(tokens: int, slots: int, experts: int) -> Iterator[Tensor]:
    """Routings whose counts differ as much as they can, over and over."""
    while True:
        yield torch.rand(tokens, experts).topk(slots).indices
        yield zipf(tokens, experts, slots)
        yield torch.full((tokens, slots), int(torch.randint(experts, ())))
        some = torch.randint(experts, (tokens, slots))
        yield some.masked_fill(torch.rand(some.shape) < 0.5, -1)
        yield torch.full((tokens, slots), -1)
        yield some // 2 * 2


def other_inputs(p: Problem, idx: Tensor, seed: int) -> Problem:
    """New tokens, probs and gradients under another routing, for the same weights."""
    fresh = on(p.x.device, *idx.shape, *p.down.shape, topk_idx=idx, seed=seed)
    return dataclasses.replace(fresh, gate_up=p.gate_up, down=p.down)


@pytest.mark.parametrize("name", OPTIONS)
def test_one_graph_for_every_routing(name: str, device: torch.device) -> None:
    p = on(device, 384, 3, 8, 256, 128)
    layer = p.experts(**OPTIONS[name])
    params = tuple(layer.parameters())
    captured = Captured(layer, p)
    kinds = routing_kinds(384, 3, 8)
    for seed in range(12):
        q = other_inputs(p, next(kinds), seed)
        assert_same(captured(q), step(layer, q, params))


def test_newer_weights_reach_the_graph(device: torch.device) -> None:
    p = on(device, 384, 2, 4)
    layer = p.experts()
    captured = Captured(layer, p)
    before = captured(p).out.clone()
    scale(layer)
    after = captured(p)
    assert not torch.equal(after.out, before)
    assert_same(after, step(layer, p, tuple(layer.parameters())))


@torch.no_grad()
def scale(layer: MoEExperts) -> None:
    for w in layer.parameters():
        w.mul_(1.25)


def test_a_graph_over_weights_that_are_updated_in_place(device: torch.device) -> None:
    p = on(device, 384, 2, 4)
    layer = p.experts()
    weights = layer.quantize_weights()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        layer(p.x, p.topk_idx, p.probs, weights=weights)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad(), torch.cuda.graph(graph):
        out = layer(p.x, p.topk_idx, p.probs, weights=weights)
    for _ in range(3):
        scale(layer)
        weights.update_(layer)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(out, layer(p.x, p.topk_idx, p.probs))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ["default", "transposes_recomputed"])
def test_captured_steps_train_as_eager_ones(name: str, inside: bool, device: torch.device) -> None:
    """The optimizer's step in the graph, or between its replays."""
    p = on(device, 384, 2, 4, dtype=torch.float32)
    trained = []
    for captured in (False, True):
        layer = p.experts(**OPTIONS[name])
        adamw = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True, capturable=True)
        x = p.x.clone().requires_grad_()

        def forward_backward(layer: MoEExperts = layer, x: Tensor = x) -> None:
            layer(x, p.topk_idx, p.probs).backward(p.dout)

        def run(adamw: Any = adamw, backward: Any = forward_backward) -> None:
            adamw.zero_grad(set_to_none=False)
            backward()
            if inside:
                adamw.step()

        start = copy.deepcopy(layer.state_dict())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
                adamw.step()
        torch.cuda.current_stream().wait_stream(stream)
        layer.load_state_dict(start)
        for state in adamw.state.values():
            for value in state.values():
                value.zero_()
        step = run
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            step = graph.replay
        for _ in range(10):
            step()
            if not inside:
                adamw.step()
        trained.append([w.detach().clone() for w in layer.parameters()])
    for eager, replayed, start_ in zip(*trained, start.values(), strict=True):
        assert not torch.equal(eager, start_)
        assert torch.equal(eager, replayed)


# ---- streams ------------------------------------------------------------------------------------


def other_stream() -> torch.cuda.Stream:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


@pytest.mark.parametrize("how", ["each forward", "weights", "reuse"])
def test_two_streams_right_after_a_change(how: str, device: torch.device) -> None:
    """One is late with making what the other is to read."""
    p, q = on(device, 64, 2, 4), on(device, 64, 2, 4, seed=1)
    layer = p.experts()
    with torch.no_grad():
        layer(p.x, p.topk_idx, p.probs)
    for _ in range(10):
        scale(layer)
        streams = other_stream(), other_stream()
        outs = []
        with torch.no_grad(), contextlib.ExitStack() as stack:
            weights = None
            with torch.cuda.stream(streams[0]):
                torch.cuda._sleep(20_000_000)
                if how == "reuse":
                    stack.enter_context(reuse_fp8_weights(layer))
                elif how == "weights":
                    weights = layer.quantize_weights()
            for stream, problem_ in zip(streams, (p, q), strict=True):
                with torch.cuda.stream(stream):
                    args = problem_.x, problem_.topk_idx, problem_.probs
                    outs.append(layer(*args, weights=weights))
        torch.cuda.synchronize()
        with torch.no_grad():
            assert torch.equal(outs[0], layer(p.x, p.topk_idx, p.probs))
            assert torch.equal(outs[1], layer(q.x, q.topk_idx, q.probs))


def test_check_on_another_stream_than_the_scopes(device: torch.device) -> None:
    """Which compares codes that the scope's stream has yet to write."""
    p = on(device, 64, 2, 4)
    layer = p.experts()
    for _ in range(10):
        scale(layer)
        streams = other_stream(), other_stream()
        with torch.no_grad(), contextlib.ExitStack() as stack:
            with torch.cuda.stream(streams[0]):
                torch.cuda._sleep(20_000_000)
                stack.enter_context(reuse_fp8_weights(layer, check=True))
            with torch.cuda.stream(streams[1]):
                out = layer(p.x, p.topk_idx, p.probs)
        torch.cuda.synchronize()
        with torch.no_grad():
            assert torch.equal(out, layer(p.x, p.topk_idx, p.probs))


def test_a_graph_of_a_part_of_a_reuse_scope_is_refused(device: torch.device) -> None:
    p = on(device, 64, 2, 4)
    layer = p.experts()
    with torch.no_grad():
        want = layer(p.x, p.topk_idx, p.probs)
    with torch.no_grad(), reuse_fp8_weights(layer):
        layer(p.x, p.topk_idx, p.probs)
        with (
            pytest.raises(RuntimeError, match="must be in one capture of a CUDA graph"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            layer(p.x, p.topk_idx, p.probs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph), reuse_fp8_weights(layer):
        outs = [layer(p.x, p.topk_idx, p.probs) for _ in range(2)]
    filler = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(8)]
    graph.replay()
    assert all(torch.equal(out, want) for out in outs)
    del filler


@BOTH_COLUMNS
@pytest.mark.parametrize("beside", ["replay", "eager"])
def test_backwards_at_once(beside: str, name: str, device: torch.device) -> None:
    """Two captures of one backward, or one and an eager step, at once on two streams:
    sums of dprobs go from SM to SM, and tiles of wgrad are claimed, by counters of each call."""
    p = on(device, 768, 2, 16, 512, 1024)
    layer = p.experts(**OPTIONS[name])
    params = tuple(layer.parameters())
    capturing = other_stream()
    with torch.cuda.stream(capturing):
        x, probs = p.x.detach().requires_grad_(), p.probs.detach().requires_grad_()
        out = layer(x, p.topk_idx, probs)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (x, probs, *params), p.dout, retain_graph=True)

    with torch.cuda.stream(capturing):
        want = backward()
    graphs, made = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=capturing):
            made.append(backward())
    streams = other_stream(), other_stream()
    for _ in range(10):
        eager: list[Result] = []
        for t in (t for grads in made for t in grads):
            t.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # until both streams have work
                for _ in range(4):
                    if beside == "replay" or graph is graphs[0]:
                        graph.replay()
                    else:
                        eager.append(step(layer, p, params))
        torch.cuda.synchronize()
        for grads in made[: 2 if beside == "replay" else 1]:
            for got, exact in zip(grads, want, strict=True):
                assert torch.equal(got, exact)
        for result in eager:
            for got, exact in zip(list(vars(result).values())[1:], want, strict=True):
                assert torch.equal(got, exact)


def test_main_grad_is_ordered_as_grad_is(device: torch.device) -> None:
    """Read on the default stream right after backward(), the forward having run on
    another, with no gradient that autograd itself would order."""
    p = on(device, 512, 2, 4)
    layer = p.experts()
    for w in layer.parameters():
        w.main_grad = torch.zeros(w.shape, device=device)
    p.run(layer)
    torch.cuda.synchronize()
    want = [w.main_grad.clone() for w in layer.parameters()]
    for w in layer.parameters():
        w.main_grad.zero_()
    stream = other_stream()
    with torch.cuda.stream(stream):
        out = layer(p.x, p.topk_idx, p.probs)
        torch.cuda._sleep(50_000_000)
    out.backward(p.dout)
    got = [w.main_grad.clone() for w in layer.parameters()]
    torch.cuda.synchronize()
    for g, w in zip(got, want, strict=True):
        assert w.any()
        assert torch.equal(g, w)


@pytest.mark.parametrize("main_grad", [False, True])
def test_backward_dw_on_another_stream(main_grad: bool, device: torch.device) -> None:
    """Behind other work, while the default stream goes on and takes memory."""
    p = on(device, 512, 2, 4)
    want = p.run(p.experts())
    layer = p.experts(delay_wgrad=True)
    if main_grad:
        for w in layer.parameters():
            w.main_grad = torch.zeros(w.shape, device=device)
    p.run(layer)
    stream = torch.cuda.Stream()  # which waits for nothing
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        layer.backward_dw()
    poison = [torch.full((1 << n,), float("nan"), device=device) for n in range(10, 24)]
    torch.cuda.synchronize()
    del poison
    for w, exact in zip(layer.parameters(), (want.dgate_up, want.ddown), strict=True):
        assert torch.equal(w.main_grad.bfloat16() if main_grad else w.grad, exact)


def test_a_graph_accumulates_into_main_grad(device: torch.device) -> None:
    p = on(device, 384, 2, 4)
    grads = []
    for graph in (False, True):
        layer = p.experts()
        for w in layer.parameters():
            w.main_grad = torch.zeros(w.shape, device=device)
        x = p.x.clone().requires_grad_()
        run = lambda x=x, layer=layer: layer(x, p.topk_idx, p.probs).backward(p.dout)  # noqa: E731
        if graph:
            captured, _ = capture(run)
            for w in layer.parameters():
                w.main_grad.zero_()
            run = captured.replay
        for _ in range(3):
            run()
        grads.append([w.main_grad for w in layer.parameters()])
    for eager, replayed in zip(*grads, strict=True):
        assert eager.any()
        assert torch.equal(eager, replayed)


def test_weights_and_deferred_wgrads_in_the_graph(device: torch.device) -> None:
    """Forward, which quantizes, backward and backward_dw captured; replayed after the parameters
    changed, it gives what eager does with the new ones."""
    p = on(device, 384, 2, 4)
    layer = p.experts(delay_wgrad=True)
    x = p.x.clone().requires_grad_()

    def run() -> None:
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        layer(x, p.topk_idx, p.probs).backward(p.dout)
        layer.backward_dw()

    graph, _ = capture(run)
    grads = [leaf.grad for leaf in (x, *layer.parameters())]
    with torch.no_grad():
        for w in layer.parameters():
            w.mul_(1.25)
    graph.replay()
    replayed = [g.clone() for g in grads]
    run()
    for eager, again in zip((x, *layer.parameters()), replayed, strict=True):
        assert eager.grad.any()
        assert torch.equal(eager.grad, again)


@pytest.mark.slow
def test_ten_thousand_replays(device: torch.device) -> None:
    """Every hundredth is compared with eager; between them routings change as well."""
    tokens, slots, experts = 512, 4, 16
    p = on(device, tokens, slots, experts, 512, 256)
    layer = p.experts()
    params = tuple(layer.parameters())
    captured = Captured(layer, p)
    kinds = routing_kinds(tokens, slots, experts)
    inputs = [other_inputs(p, next(kinds), seed) for seed in range(97)]
    compared = 0
    for n in range(1, 10_001):
        q = inputs[n % len(inputs)]
        got = captured(q)
        if n % 100 == 0:
            assert_same(got, step(layer, q, params))
            compared += 1
    assert compared == 100


# ---- torch.compile ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "recompute", "fp8_z"])
def test_compiled_equals_eager(name: str, device: torch.device) -> None:
    torch._dynamo.reset()
    p = on(device, 512, 2, 4)
    layer = p.experts(**OPTIONS[name])
    params = tuple(layer.parameters())
    compiled = torch.compile(layer, fullgraph=True)
    assert_same(step(compiled, p, params), step(layer, p, params))
    q = other_inputs(p, zipf(512, 4, 2), seed=1)
    assert_same(step(compiled, q, params), step(layer, q, params))


def test_compiled_reuse_equals_eager(device: torch.device) -> None:
    """`weights=` and reuse_fp8_weights under fullgraph, the codes made on this stream before."""
    torch._dynamo.reset()
    p = on(device, 512, 2, 4)
    layer = p.experts()
    params = tuple(layer.parameters())
    compiled = torch.compile(layer, fullgraph=True)
    want, weights = step(layer, p, params), layer.quantize_weights()
    assert_same(step(lambda *given: compiled(*given, weights=weights), p, params), want)
    with reuse_fp8_weights(layer):
        assert_same(step(compiled, p, params), want)


# ---- where weight gradients go ------------------------------------------------------------------


def microbatches(device: torch.device) -> list[Problem]:
    batches = [on(device, 384, seed=seed) for seed in range(3)]
    return [
        dataclasses.replace(b, gate_up=batches[0].gate_up, down=batches[0].down) for b in batches
    ]


@BOTH_COLUMNS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_holds_the_sum(name: str, dtype: torch.dtype, device: torch.device) -> None:
    batches = microbatches(device)
    layer = batches[0].experts(**OPTIONS[name])
    for w in layer.parameters():
        w.main_grad = torch.zeros(w.shape, dtype=dtype, device=device)
    for b in batches:
        b.run(layer)
    assert [w.grad for w in layer.parameters()] == [None, None]
    # Of float32 parameters the gradients are float32: what main_grad has to add up.
    exact = [b.run(b.experts(dtype=torch.float32, **OPTIONS[name])) for b in batches]
    for w, field in ((layer.gate_up_proj, "dgate_up"), (layer.down_proj, "ddown")):
        want = sum(getattr(r, field).double() for r in exact)
        assert relative_error(w.main_grad, want) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_grad_is_the_rounded_float32_gradient(device: torch.device) -> None:
    p = on(device, 512)
    got = p.run(p.experts())
    exact = p.run(p.experts(dtype=torch.float32))
    for field in ("dgate_up", "ddown"):
        assert getattr(got, field).dtype == torch.bfloat16
        assert torch.equal(getattr(got, field), getattr(exact, field).bfloat16())


@pytest.mark.parametrize("main_grad", [False, True])
def test_deferred_wgrad_equals_immediate(main_grad: bool, device: torch.device) -> None:
    batches = microbatches(device)
    grads = []
    for delay in (False, True):
        layer = batches[0].experts(delay_wgrad=delay)
        if main_grad:
            for w in layer.parameters():
                w.main_grad = torch.zeros(w.shape, device=device)
        for b in batches:
            before = [w.grad for w in layer.parameters()]
            b.run(layer)
            if delay:
                assert all(w.grad is g for w, g in zip(layer.parameters(), before, strict=True))
            layer.backward_dw()
        grads.append([w.main_grad if main_grad else w.grad for w in layer.parameters()])
    for now, later in zip(*grads, strict=True):
        assert torch.equal(now, later)


# ---- memory -------------------------------------------------------------------------------------


def requested_bytes() -> int:
    """What live tensors asked for; memory_allocated adds what the allocator could not split off."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize("name", ["default", "recompute", "fp8_z"])
def test_saved_for_backward_by_the_allocator(name: str, device: torch.device) -> None:
    """What a forward leaves allocated is what the arithmetic says, and the output."""
    from layer_memory import saved_bytes

    t, s, e, h, i = 2048, 4, 8, 1024, 512
    p = on(device, t, s, e, h, i)
    layer = p.experts(**OPTIONS[name])
    x = p.x.clone().requires_grad_()
    layer(x, p.topk_idx, p.probs).backward(p.dout)
    before = requested_bytes()
    out = layer(x, p.topk_idx, p.probs)
    kept = requested_bytes() - before - out.nbytes
    keep = {"default": "bf16", "recompute": "none", "fp8_z": "fp8"}[name]
    gate_up = e * (2 * i * h + 4 * (2 * i // 128) * (h // 128))  # codes and scales
    codes = gate_up + e * (h * i + 4 * (h // 128) * (i // 128))  # as dgrad reads both
    if name == "recompute":  # and gate_up as fprop reads it
        codes += gate_up
    assert kept == saved_bytes(t, s, e, h, i, keep=keep) + codes
