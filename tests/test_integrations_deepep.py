"""DeepEP's dispatch into the experts and their sums into its combine, over a stand-in of its
buffers, against the single-process layer."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from deepep_stand_in import Buffer, ElasticBuffer, World
from fp8moe_cutlass import Fp8Recipe, ops, telemetry
from fp8moe_cutlass.autograd import Options, fp8
from fp8moe_cutlass.autograd.body import COUNTED
from fp8moe_cutlass.integrations import deepep
from fp8moe_cutlass.nn import MoEExperts
from moe_problem import Problem, problem
from reference import Result, relative_error

E = 8


def local_layer(p: Problem, rank: int, ranks: int, **options: Any) -> MoEExperts:
    """The layer of one rank: its slice of the problem's experts."""
    mine = slice(rank * E // ranks, (rank + 1) * E // ranks)
    part = Problem(p.x, p.topk_idx, p.probs, p.gate_up[mine], p.down[mine], p.dout)
    return part.experts(**options)


def buffer_of(kind: str, world: World, rank: int, tokens: int) -> Any:
    return Buffer(world, rank) if kind == "Buffer" else ElasticBuffer(world, rank, tokens)


def run_ranks(
    p: Problem, parts: list[int], kind: str = "Buffer", options: Any = None, **layer_options: Any
) -> Result:
    """Output and gradients of all ranks put together; rank r has parts[r] of the tokens."""
    ranks = len(parts)
    world = World(ranks)
    xs, ids, probs, douts = (t.split(parts) for t in (p.x, p.topk_idx, p.probs, p.dout))

    def job(rank: int) -> Result:
        layer = local_layer(p, rank, ranks, **layer_options)
        x, prob = xs[rank].clone().requires_grad_(), probs[rank].clone().requires_grad_()
        buffer = buffer_of(kind, world, rank, max(parts))
        out = deepep.experts(
            layer, buffer, x, ids[rank], prob, num_experts=E, dispatch=options or {}
        )
        out.backward(douts[rank].to(out.dtype))
        if layer.delay_wgrad:
            assert layer.gate_up_proj.grad is None
            layer.backward_dw()
        return Result(
            out.detach(), x.grad, prob.grad, layer.gate_up_proj.grad, layer.down_proj.grad
        )

    results = world.run(job)
    return Result(*(torch.cat([getattr(r, name) for r in results]) for name in vars(results[0])))


def test_no_grad_quantizes_one_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    p, seen = problem(24, 2, E), []
    quantize_weight = ops.quantize_weight

    def spy(w: Tensor, **how: Any) -> Any:
        seen.append(how.get("transposed", True))
        return quantize_weight(w, **how)

    monkeypatch.setattr(ops, "quantize_weight", spy)

    def job(rank: int) -> Tensor:
        layer = local_layer(p, rank, 1)
        buffer = buffer_of("Buffer", world, rank, 24)
        with torch.no_grad():
            return deepep.experts(layer, buffer, p.x, p.topk_idx, p.probs, num_experts=E)

    world = World(1)
    [out] = world.run(job)
    assert seen == [False, False]
    assert torch.equal(out, p.run(p.experts()).out)


def partial_sums(p: Problem, ranks: int) -> tuple[Tensor, Tensor]:
    """out and dx as bf16 partial sums of the experts of each rank, summed in rank order."""
    out, dx = torch.zeros(p.x.shape), torch.zeros(p.x.shape)
    for rank in range(ranks):
        here = p.topk_idx // (E // ranks) == rank
        ids = torch.where(here & (p.topk_idx >= 0), p.topk_idx, -1)
        q = Problem(p.x, ids, p.probs, p.gate_up, p.down, p.dout)
        part = q.run(q.experts())
        out, dx = out + part.out.float(), dx + part.dx.float()
    return out.to(p.x.dtype), dx.to(p.x.dtype)


def check(p: Problem, got: Result, ranks: int) -> None:
    """Bit-equal to one process; what is summed over ranks, to the same sums of bf16 parts."""
    want = p.run(p.experts())
    for name in ("dprobs", "dgate_up", "ddown"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    out, dx = partial_sums(p, ranks)
    assert torch.equal(got.out, out)
    assert torch.equal(got.dx, dx)


@pytest.mark.parametrize("kind", ["Buffer", "ElasticBuffer"])
@pytest.mark.parametrize("slots", [1, 3])
def test_equals_one_process(kind: str, slots: int) -> None:
    p = problem(tokens=96, slots=slots, experts=E)
    p.topk_idx[5] = -1
    got = run_ranks(p, [40, 0, 50, 6], kind)
    check(p, got, ranks=4)
    if slots == 1:  # one rank a token: nothing is rounded twice
        assert torch.equal(got.out, p.run(p.experts()).out)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Buffer", {"num_worst_tokens": 200}),
        ("Buffer", {"expert_alignment": 16}),
        ("ElasticBuffer", {"do_cpu_sync": False}),
    ],
)
def test_buffers_larger_than_what_came(kind: str, options: dict[str, Any]) -> None:
    """Rows nobody sent hold NaN; they reach no result."""
    p = problem(tokens=64, slots=3, experts=E)
    check(p, run_ranks(p, [32, 32], kind, options), ranks=2)


def test_one_rank_gets_all() -> None:
    p = problem(tokens=48, slots=2, experts=E)
    p.topk_idx = p.topk_idx % 2  # experts 0 and 1, of rank 0
    p.topk_idx[:, 1] = 1 - p.topk_idx[:, 0]
    check(p, run_ranks(p, [24, 24]), ranks=2)


@pytest.mark.parametrize("kind", ["Buffer", "ElasticBuffer"])
def test_biases(kind: str) -> None:
    """Output, and gradients of tokens, weights' and biases', are those of one process."""
    p, world, tokens = problem(tokens=96, slots=2, experts=E), World(2), [40, 56]
    biases = [torch.randn(shape).bfloat16() for shape in (p.gate_up.shape[:2], p.down.shape[:2])]
    xs, ids, probs, douts = (t.split(tokens) for t in (p.x, p.topk_idx, p.probs, p.dout))

    def run(mine: slice, x: Tensor, idx: Tensor, prob: Tensor, dout: Tensor, by: Any) -> list[Any]:
        gate_up, down = p.gate_up[mine], p.down[mine]
        layer = MoEExperts(len(down), down.shape[1], down.shape[2], bias=True, dtype=down.dtype)
        of = layer.gate_up_proj, layer.down_proj, *layer.local_biases()
        with torch.no_grad():
            for a, b in zip(of, (gate_up, down, *(bias[mine] for bias in biases)), strict=True):
                a.copy_(b)
        x, prob = x.clone().requires_grad_(), prob.clone().requires_grad_()
        out = by(layer, x, idx, prob)
        out.backward(dout.to(out.dtype))
        return [out.detach(), x.grad, prob.grad, *(w.grad for w in of)]

    def job(rank: int) -> list[Any]:
        buffer = buffer_of(kind, world, rank, max(tokens))
        given = xs[rank], ids[rank], probs[rank], douts[rank]
        mine = slice(rank * E // 2, (rank + 1) * E // 2)
        call = deepep.experts
        return run(mine, *given, lambda m, *of: call(m, buffer, *of, num_experts=E))

    want = run(slice(E), p.x, p.topk_idx, p.probs, p.dout, lambda m, *of: m(*of))
    for n, (got, its) in enumerate(zip(zip(*world.run(job), strict=True), want, strict=True)):
        assert relative_error(torch.cat(got), its) < 5e-3, n


@pytest.mark.parametrize("options", [{"preactivation": "recompute"}, {"delay_wgrad": True}])
def test_options_of_the_layer(options: dict[str, Any]) -> None:
    p = problem(tokens=64, slots=2, experts=E)
    check(p, run_ranks(p, [30, 34], **options), ranks=2)


def test_a_second_derivative_is_refused() -> None:
    p = problem(32)
    x = p.x.clone().requires_grad_()
    buffer = Buffer(World(1), 0)
    out = deepep.experts(p.experts(), buffer, x, p.topk_idx, p.probs, num_experts=E)
    with pytest.raises(RuntimeError, match="has no second derivative; got create_graph=True"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_expanded_rows_forward_and_backward() -> None:
    """do_expand: a row for each (token, expert), experts aligned, padding NaN."""
    p = problem(tokens=80, slots=2, experts=E)
    ranks, align = 2, 16
    world = World(ranks)
    recipe = Fp8Recipe()
    whole_layer = p.experts()
    with telemetry.watch(whole_layer, every=1) as seen_whole:
        want = p.run(whole_layer)

    def job(rank: int) -> tuple[Tensor, ...]:
        layer = local_layer(p, rank, ranks)
        held = layer.quantize_weights()
        buffer = ElasticBuffer(world, rank, 40)
        x, ids, probs, dout = (
            t.split(40)[rank].contiguous() for t in (p.x, p.topk_idx, p.probs, p.dout)
        )
        q = ops.quantize(x)
        data, _, weights, handle, _ = buffer.dispatch(
            (q.data, q.scale_inv), ids, probs, E, align, do_expand=True
        )
        counts = handle.num_unaligned_recv_tokens_per_expert
        rows = deepep.received_expanded(data, weights, counts, align=align)
        seen = telemetry.enable(layer, every=1)
        y, saved = deepep.forward(layer, held, rows, preactivation="save")
        dout_q = ops.quantize(dout, fp8_dtype=recipe.grad_dtype)
        grad = buffer.dispatch((dout_q.data, dout_q.scale_inv), handle=handle)[0]
        grads = deepep.backward(layer, saved, grad)
        dw = grads.gate_up.run(None, False, "bfloat16"), grads.down.run(None, False, "bfloat16")
        token, slot = handle.slots
        first = len(handle.sources[0])  # received rows of rank 0 come first
        held = token >= 0
        came = torch.cat([handle.sources[0], handle.sources[1] + 40])[token[held]]
        assert first == int((handle.psum_num_recv_tokens_per_scaleup_rank)[0])
        assert grads.dx is not None
        assert grads.dprobs is not None
        assert not y[~held].any()
        assert not grads.dx[~held].any()
        return (
            came,
            slot[held],
            y[held],
            grads.dx[held],
            grads.dprobs[held],
            *dw,
            seen.counters[""].counts,
        )

    results = world.run(job)
    came, slot, y, dx, dprobs = (torch.cat([r[i] for r in results]) for i in range(5))
    assert torch.equal(torch.cat([r[5] for r in results]), want.dgate_up)
    assert torch.equal(torch.cat([r[6] for r in results]), want.ddown)
    counted = sum(r[7] for r in results)
    assert counted.any(dim=1).all()
    for name in ("h", "dz"):  # rows of an expert there and here
        row = COUNTED.index(name)
        assert torch.equal(counted[row], seen_whole.counters[""].counts[row])
    got = torch.empty_like(want.dprobs)
    got[came, slot] = dprobs[:, 0]
    assert torch.equal(got, want.dprobs)
    # What combine adds is each expert's row: in float32 and rounded once, one process's result.
    for rows, whole in ((y, want.out), (dx, want.dx)):
        by_slot = torch.zeros(2, *whole.shape)
        by_slot[slot, came] = rows.float()
        assert torch.equal((by_slot[0] + by_slot[1]).bfloat16(), whole)


@pytest.mark.parametrize("round_scale", [True, False])
def test_low_latency_forward(round_scale: bool) -> None:
    """[E, N, H] and column-major scales in, [E, N, H] out; combine weights."""
    p = problem(tokens=40, slots=2, experts=E)
    ranks = 2
    world = World(ranks)

    def job(rank: int) -> Tensor:
        layer = local_layer(p, rank, ranks)
        held = layer.quantize_weights()
        buffer = Buffer(world, rank)
        x, ids, probs = (t.split([24, 16])[rank].contiguous() for t in (p.x, p.topk_idx, p.probs))
        data, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, 24, E, round_scale)
        assert data[1].stride(1) == 1  # tokens contiguous
        rows = deepep.received_low_latency(data, counts, pow2=round_scale)
        assert rows.x.data.data_ptr() == data[0].data_ptr()  # read in place
        y, _ = deepep.forward(layer, held, rows)
        assert y.isfinite().all()
        return buffer.low_latency_combine(y.view_as(data[0]), ids, probs, handle)[0]

    got = torch.cat(world.run(job))
    # One process, each slot by itself and unweighted, weighted as combine does.
    layer = p.experts()
    options = Options()
    weights = fp8.weights(None, None, layer.quantize_weights(), options, None)
    x = ops.quantize(p.x, scale="pow2" if round_scale else "fp32")
    want, ones = torch.zeros(p.x.shape), torch.ones(40, 1)
    for slot in range(2):
        plan = ops.route(E, topk_idx=p.topk_idx[:, slot : slot + 1].contiguous())
        y, _ = fp8.forward(x, ones, plan, weights, options, None)
        want += p.probs[:, slot : slot + 1] * y.float()
    assert torch.equal(got, want.bfloat16())


def test_what_is_refused() -> None:
    data = torch.zeros(4, 256).to(torch.float8_e4m3fn)
    scales, ids, probs = torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    with pytest.raises(ValueError, match="must be FP8 data and scales; got Tensor"):
        deepep.received(data.bfloat16(), ids, probs, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"H a multiple of 128; got torch.float8_e5m2"):
        deepep.received((data.float().to(torch.float8_e5m2), scales), ids, probs, 2)
    with pytest.raises(ValueError, match=r"scales must be float32 \(4, 2\); got torch.float32 "):
        deepep.received((data, scales[:, :1]), ids, probs, 2)
    packed = torch.zeros(2, 2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"use_ue8m0=False\); got torch.int32"):
        deepep.received_low_latency((data.view(2, 2, 256), packed), torch.zeros(2))
    layer = MoEExperts(2, 256, 128, recipe=Fp8Recipe(grad_dtype="e5m2"))
    with pytest.raises(ValueError, match="e4m3 in both directions"):
        deepep.experts(layer, None, data.bfloat16(), ids, probs, num_experts=4)
    with pytest.raises(ValueError, match="must be a multiple of the layer's 2; got 3"):
        deepep.experts(MoEExperts(2, 256, 128), None, data.bfloat16(), ids, probs, num_experts=3)
    rows = deepep.received((data, scales), ids, probs, 2)
    adapted = MoEExperts(2, 256, 128)
    adapted.add_lora(8, alpha=8)
    for layer, got in ((MoEExperts(2, 256, 128, bias=True), "biases"), (adapted, "a LoRA of 8")):
        with pytest.raises(ValueError, match=rf"layer must have weights alone; got {got}"):
            deepep.forward(layer, layer.quantize_weights(), rows)


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="deep_ep is not installed")
def test_signatures_of_deep_ep_itself() -> None:
    """The arguments given here are ones its buffers take."""
    import inspect

    import deep_ep

    takes = {name: set(inspect.signature(f).parameters) for name, f in vars(deep_ep.Buffer).items()
             if name in ("dispatch", "combine", "get_dispatch_layout")}  # fmt: skip
    assert takes["dispatch"] >= {
        *("x", "handle", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank"),
        *("num_tokens_per_expert", "topk_idx", "topk_weights"),
    }
    assert takes["combine"] >= {"x", "handle", "topk_weights"}
    assert takes["get_dispatch_layout"] >= {"topk_idx", "num_experts"}
