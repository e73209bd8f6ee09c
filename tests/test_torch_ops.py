"""torch.ops.fp8moe: schemas, fakes, and torch.compile(fullgraph=True) bit-equal to eager."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from flat_calls import EXPERTS, OPS, WIDTH, Problem, bits, flat_calls, outputs, problem
from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops
from fp8moe_cutlass.ops import _call
from fp8moe_cutlass.ops._outputs import empty, given_fp8, new_fp8

# test_schema cannot run on FP8 CPU tensors: torch has no FP8 arithmetic to compare them with.
OPCHECKS = (
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)

# Each public function over a whole problem; defined() leaves out what is unspecified.
FUNCTIONS: dict[str, Callable[[Problem], Any]] = {
    "quantize": lambda p: ops.quantize(p.x),
    "quantize_gemm_e5m2_fp32": lambda p: ops.quantize(
        p.x, scale_layout="gemm", fp8_dtype="e5m2", scale="fp32"
    ),
    "quantize_dtype": lambda p: ops.quantize(p.x, fp8_dtype=torch.float8_e4m3fn),
    "quantize_weight": lambda p: ops.quantize_weight(p.w),
    "dequantize": lambda p: ops.dequantize(p.w8, dtype=torch.float32),
    "route": lambda p: ops.route(EXPERTS, topk_idx=p.topk_idx, align=16),
    "route_map": lambda p: ops.route(
        EXPERTS,
        routing_map=torch.zeros(48, EXPERTS, dtype=torch.bool).scatter(1, p.topk_idx, True),
        capacity=96,
    ),
    "router_topk": lambda p: ops.router_topk(
        p.x[:, :EXPERTS].float().contiguous(), 2, padding=p.topk_idx[:, 0] == 1, sequences=2
    ),
    "router_topk_replay": lambda p: ops.router_topk(
        p.x[:, :EXPERTS].float().contiguous(), 2, given_idx=p.topk_idx, score="sigmoid"
    ),
    "router_topk_backward": lambda p: ops.router_topk_backward(
        p.probs, None, p.x[:, :EXPERTS].float().contiguous(), p.topk_idx, p.probs
    ),
    "plan_from_counts": lambda p: RoutingPlan.from_counts(
        p.plan.tokens_per_expert, p.plan.capacity, align=32
    ),
    "plan_from_row_id_map": lambda p: ops.plan_from_row_id_map(
        torch.arange(12, dtype=torch.int32), rows=16, slots=2
    ),
    "plan_views": lambda p: (p.plan.row_of, p.plan.token_of_row, p.plan.col_offsets),
    "permute_pad": lambda p: ops.permute_pad(p.x, p.plan, p.probs),
    "permute_pad_fp8": lambda p: ops.permute_pad(p.x8, p.plan),
    "permute_pad_backward": lambda p: ops.permute_pad_backward(p.rows, p.plan, p.row_probs),
    "unpermute_unpad": lambda p: ops.unpermute_unpad(p.rows, p.plan, p.probs),
    "unpermute_unpad_backward": lambda p: ops.unpermute_unpad_backward(
        p.x, p.plan, p.rows, p.probs
    ),
    "dispatch_plan": lambda p: ops.dispatch_plan(p.topk_idx, 6, 3, segment=20),
    "quantize_pack": lambda p: ops.quantize_pack(
        p.x, p.dispatch, p.topk_idx, p.probs, num_experts=6, out=torch.zeros_like(p.packed)
    ),
    "quantize_pack_gradient": lambda p: ops.quantize_pack(
        p.x, p.dispatch, fp8_dtype="e5m2", scale="fp32", out=torch.zeros_like(p.packed[:, :272])
    ),
    "unpack": lambda p: ops.unpack(p.packed, WIDTH, 2),
    "permute_pad_strided": lambda p: ops.permute_pad(
        ops.unpack(p.packed[:48], WIDTH, 2)[0], p.plan
    ),
    "transpose_fp8": lambda p: ops.transpose_fp8(p.rows8, p.plan),
    "permute_transpose_fp8": lambda p: ops.permute_transpose_fp8(p.x8, p.plan, columns="column"),
    "act_quantize": lambda p: ops.act_quantize(p.rows, p.plan, p.row_probs, save_z=True),
    "act_quantize_backward": lambda p: ops.act_quantize_backward(
        p.rows[:, : WIDTH // 2].contiguous(),
        p.rows,
        p.plan,
        p.row_probs,
        limit=2.0,
        columns="column",
        fp8_dtype="e5m2",
    ),
    "grouped_gemm": lambda p: ops.grouped_gemm(p.rows8, p.w8, p.plan),
    "grouped_gemm_wgrad": lambda p: ops.grouped_gemm_wgrad(p.columns8, p.columns8, p.plan),
    "to_layout": lambda p: p.x8.to_layout("gemm").to_layout("row"),
}


def defined(result: Any, plan: RoutingPlan) -> list[Any]:
    """The leaves of a result that have a defined value, as bytes, with what describes them."""
    if isinstance(result, tuple):
        return [leaf for part in result for leaf in defined(part, plan)]
    if isinstance(result, RoutingPlan):
        end = int(result.row_offsets[-1])
        parts = (result.status, result.tokens_per_expert, result.row_offsets, result.col_offsets)
        rows = (result.token_of_row[:end], result.slot_of_row[:end], result.row_of)
        return [result.sizes, *map(bits, parts + rows)]
    if not isinstance(result, Fp8Tensor):
        return [None if result is None else bits(result)]
    data, scale = result.data, result.scale_inv
    words = (result.shape, result.scale_layout, result.pow2, result.fp8_dtype)
    if data.shape[-1] == plan.columns:
        end = int(plan.col_offsets[-1])
        data = data[:, :end]
        scale = scale[:, : end // 128] if result.scale_layout == "block" else scale[: end // 128]
    return [words, bits(data), bits(scale)]


def assert_same(got: Any, want: Any, plan: RoutingPlan) -> None:
    left, right = defined(got, plan), defined(want, plan)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        else:
            assert a == b


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str) -> None:
    op = getattr(torch.ops.fp8moe, name).default
    torch.library.opcheck(op, tuple(flat_calls()[name].values()), test_utils=OPCHECKS)


@pytest.mark.parametrize("name", OPS)
def test_schema_names_what_is_written(name: str) -> None:
    """What the schema calls an output changes; what it calls an input does not."""
    call = flat_calls()[name]
    before = {k: bits(v).clone() for k, v in call.items() if isinstance(v, torch.Tensor)}
    getattr(torch.ops.fp8moe, name)(**call)
    changed = {k for k, v in before.items() if not torch.equal(v, bits(call[k]))}
    # A transpose may write the plan's status word, and does not where all scales are well.
    assert changed == set(outputs(name)) - ({"plan"} if "transpose" in name else set())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compile_fullgraph(name: str) -> None:
    p, function = problem(), FUNCTIONS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(compiled(p), function(p), p.plan)


def chain(x: torch.Tensor, topk_idx: torch.Tensor, probs: torch.Tensor, p: Problem) -> Any:
    """The forward path of a layer in one graph."""
    plan = ops.route(EXPERTS, topk_idx=topk_idx)
    a, row_probs = ops.permute_pad(ops.quantize(x), plan, probs)
    h = ops.act_quantize(ops.grouped_gemm(a, p.w8, plan), plan, row_probs)
    assert isinstance(h, Fp8Tensor)
    down = Fp8Tensor(
        p.w8.data[:, :, : WIDTH // 2].contiguous(),
        p.w8.scale_inv[:, :, :1].contiguous(),
        "block",
    )
    return ops.unpermute_unpad(ops.grouped_gemm(h, down, plan), plan), plan


def test_inductor_chain() -> None:
    p = problem()
    torch._dynamo.reset()
    got = torch.compile(chain, fullgraph=True)(p.x, p.topk_idx, p.probs, p)
    assert_same(got, chain(p.x, p.topk_idx, p.probs, p), p.plan)


def test_dynamic_tokens_compile_once() -> None:
    """The number of tokens is symbolic: no recompilation for a new one."""
    p = problem()
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(chain, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (48, 40, 13):
        args = (p.x[:tokens].clone(), p.topk_idx[:tokens].clone(), p.probs[:tokens].clone(), p)
        assert_same(compiled(*args), chain(*args), p.plan)
    assert counter.frame_count == 1


def test_make_fx_records_the_op() -> None:
    """Tracers that are not dynamo see the op, not the extension."""
    p = problem()
    graph = make_fx(lambda x: ops.quantize(x).data)(p.x)
    assert "fp8moe.quantize" in graph.code
    torch.testing.assert_close(bits(graph(p.x)), bits(ops.quantize(p.x).data), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_records_the_op() -> None:
    def round_trip(x: torch.Tensor) -> torch.Tensor:
        return ops.dequantize(ops.quantize(x), dtype="float32")

    traced = torch.jit.trace(round_trip, (torch.randn(4, 128),))
    x = torch.randn(8, 128)
    assert torch.equal(traced(x), round_trip(x))


def test_dispatch_mode_sees_the_op() -> None:
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    p = problem()
    with Spy():
        ops.quantize(p.x)
    assert seen == ["aten.empty.memory_format"] * 2 + ["fp8moe.quantize.default"]


def test_flops_are_counted() -> None:
    p = problem()
    with FlopCounterMode(display=False) as counter:
        ops.grouped_gemm(p.rows8, p.w8, p.plan)
    assert counter.get_total_flops() == 2 * p.plan.capacity * WIDTH * WIDTH
    with FlopCounterMode(display=False) as counter:
        ops.grouped_gemm_wgrad(p.columns8, p.columns8, p.plan)
    assert counter.get_total_flops() == 2 * p.plan.capacity * WIDTH * WIDTH


AGAIN = """
import importlib, sys, torch
from fp8moe_cutlass import ops
from fp8moe_cutlass.ops import _call, _torch_op
for module in (_torch_op, _call, ops):
    importlib.reload(module)
x = torch.randn(4, 128)
ops.quantize(x)
for name in [name for name in sys.modules if name.startswith("fp8moe_cutlass")]:
    del sys.modules[name]
from fp8moe_cutlass import ops
with torch.profiler.profile():
    q = ops.quantize(x)
print(q.data.dtype)
"""


def test_imported_again() -> None:
    """By importlib.reload, or anew: torch's operators are of the process."""
    done = subprocess.run(
        [sys.executable, "-c", AGAIN], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "torch.float8_e4m3fn", done.stderr


def test_private_symbols_of_torch() -> None:
    """The four that ops/ reads are there, or calls would be slower than they need be."""
    assert _call.KNOWN
    assert torch.ops.fp8moe.quantize.default in torch.utils.checkpoint.SAC_IGNORED_OPS


WITHOUT = """
import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad, profiler
from torch.utils._python_dispatch import TorchDispatchMode
del {symbol}
from fp8moe_cutlass import ops

class Spy(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {{}}))

seen, x = [], torch.randn(4, 128)
want = ops.quantize(x).dequantize("float32")
with Spy():
    q = ops.quantize(x)
    version = q.data._version
    ops.quantize(x, out=q)
assert seen.count("fp8moe.quantize.default") == 2, seen
assert q.data._version == version + 1
assert torch.equal(q.dequantize("float32"), want)
try:
    ops.quantize(x.requires_grad_())
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "symbol",
    [
        "torch._C._len_torch_dispatch_stack",
        "profiler._is_profiler_enabled",
        "torch.utils.checkpoint.SAC_IGNORED_OPS",
    ],
)
def test_a_torch_without_one_of_them(symbol: str) -> None:
    """Every call is then watched, and right."""
    code = WITHOUT.format(symbol=symbol)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "[quantize] x must not require grad" in done.stdout, done.stderr


@pytest.mark.parametrize("shape", [(5,), (0,), (3, 4), (3, 0), (0, 4), (2, 3, 4), (2, 0, 4)])
def test_outputs_are_what_torch_allocates(shape: tuple[int, ...]) -> None:
    def properties(t: torch.Tensor) -> tuple[Any, ...]:
        return t.dtype, t.device, t.shape, t.stride(), t.requires_grad, t.is_inference()

    like = torch.zeros(2, dtype=torch.float16, requires_grad=True)
    for mode in (True, False):
        with torch.inference_mode(mode):
            for name, dtype in (("e4m3", torch.float8_e4m3fn), (None, torch.float16)):
                want = torch.empty(shape, dtype=dtype)
                assert properties(empty("", like, shape, name)) == properties(want)
    by_numpy = tuple(np.int64(size) for size in shape)
    assert properties(empty("", like, by_numpy)) == properties(want)
    with pytest.raises(RuntimeError, match="negative dimension"):
        empty("", like, (-1, *shape[1:]))


def test_outputs_are_filled_where_torch_fills() -> None:
    """Deterministic algorithms fill what is allocated, so that nobody reads what was there."""
    torch.use_deterministic_algorithms(True)
    try:
        assert empty("", torch.zeros(1), (16, 16)).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_given_output_is_what_the_arguments_ask_for() -> None:
    asked = ("row", "e4m3", True)
    out = new_fp8("", torch.empty(1), (4, 128), *asked)
    assert given_fp8("", out, *asked) is out
    for i, other in enumerate(("gemm", "e5m2", False)):
        with pytest.raises(ValueError, match="out must have"):
            given_fp8("", out, *asked[:i], other, *asked[i + 1 :])
    with pytest.raises(ValueError, match="an Fp8Tensor for each output; got None"):
        given_fp8("", None, *asked)


def saved_and_loaded(it: Any) -> Any:
    file = io.BytesIO()
    torch.save(it, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_copies_of_what_an_op_has_taken_are_their_own(copied: Callable[[Any], Any]) -> None:
    plan, swapped = (
        ops.plan_from_counts(torch.tensor(counts, dtype=torch.int32), capacity=4)
        for counts in ([1, 3], [3, 1])
    )
    q = ops.quantize(torch.randn(4, 256))
    first, want = ops.transpose_fp8(q, plan), ops.transpose_fp8(q, swapped)
    other, other_plan = copied(q), copied(plan)
    other.data.copy_(q.data.flip(0))
    other_plan.buffer.copy_(swapped.buffer)
    assert torch.equal(ops.dequantize(other), ops.dequantize(Fp8Tensor(other.data, q.scale_inv)))
    assert torch.equal(bits(ops.transpose_fp8(q, other_plan).data), bits(want.data))
    assert torch.equal(bits(ops.transpose_fp8(q, plan).data), bits(first.data))
    assert not torch.equal(bits(first.data), bits(want.data))


def test_numpy_while_torch_watches() -> None:
    """torch's op takes tensors only: other frameworks' arrays pass it by."""
    x = np.ones((4, 128), np.float32)
    with torch.profiler.profile():
        assert ops.quantize(x).data.shape == (4, 128)


def in_other_arrays(q: Fp8Tensor, kind: str) -> Fp8Tensor:
    """The same codes and scales, of a subclass, as torch's uint8 or as NumPy's."""
    rest = (q.scale_layout, q.pow2)
    if kind == "subclass":
        return type("Named", (Fp8Tensor,), {})(q.data, q.scale_inv, *rest)
    codes, scale = q.data.view(torch.uint8), q.scale_inv
    if kind == "numpy":
        codes, scale = codes.numpy(), scale.numpy()
    return Fp8Tensor(codes, scale, *rest, fp8_dtype="e4m3")


def zeros_like(q: Fp8Tensor) -> Fp8Tensor:
    data, scale = torch.zeros_like(q.data), torch.zeros_like(q.scale_inv)
    return Fp8Tensor(data, scale, q.scale_layout)


@pytest.mark.parametrize("kind", ["subclass", "uint8", "numpy"])
def test_what_an_eager_call_takes_apart_in_python(kind: str) -> None:
    """SideStream torch's tensors: inputs and given outputs."""
    p = problem()
    x8, rows8 = in_other_arrays(p.x8, kind), in_other_arrays(p.rows8, kind)
    assert torch.equal(ops.dequantize(x8, out=torch.empty_like(p.x)), ops.dequantize(p.x8))
    q, y = (in_other_arrays(zeros_like(t), kind) for t in (p.x8, p.rows8))
    ops.quantize(p.x, out=q)
    ops.permute_pad(x8, p.plan, out=(y, None))
    for made, expected in ((q, p.x8), (y, p.rows8)):
        codes, scale = (torch.as_tensor(array) for array in (made.data, made.scale_inv))
        assert torch.equal(bits(codes), bits(expected.data))
        assert torch.equal(scale, expected.scale_inv)
    d = ops.grouped_gemm(rows8, p.w8, p.plan, out=torch.empty_like(p.rows))
    assert torch.equal(d, ops.grouped_gemm(p.rows8, p.w8, p.plan))


@pytest.mark.parametrize("name", OPS)
def test_runs_twice_alike(name: str) -> None:
    op = getattr(torch.ops.fp8moe, name)
    first, second = flat_calls()[name], flat_calls()[name]
    op(**first)
    op(**second)
    for key in outputs(name):
        assert torch.equal(bits(first[key]), bits(second[key]))


def test_inputs_are_untouched_by_functions() -> None:
    p = problem()
    tensors = {k: v for k, v in vars(p).items() if isinstance(v, torch.Tensor)}
    before = tree_map(torch.clone, tensors)
    for function in FUNCTIONS.values():
        function(p)
    assert all(torch.equal(bits(before[k]), bits(v)) for k, v in tensors.items())


def test_a_backward_never_reads_what_an_op_has_overwritten() -> None:
    """Filling out= counts up the versions of its tensors, as torch's in-place operations do."""
    x = torch.randn(4, 128)
    out = ops.dequantize(ops.quantize(x), dtype="float32")
    weight = torch.ones(4, 128, requires_grad=True)
    loss = (weight * out).sum()  # saves out
    ops.dequantize(ops.quantize(2 * x), dtype="float32", out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    q = ops.quantize(x)
    before = q.data._version, q.scale_inv._version
    ops.quantize(x, out=q)
    assert (q.data._version, q.scale_inv._version) == (before[0] + 1, before[1] + 1)
    with torch.inference_mode():  # whose tensors have no versions
        ops.quantize(x, out=ops.quantize(x))


def test_a_tangent_is_refused() -> None:
    """The ops have no forward-mode differentiation, and would lose it in silence."""
    x = torch.randn(4, 128)
    with forward_ad.dual_level():
        assert ops.quantize(x).shape == x.shape
        with pytest.raises(ValueError, match=r"\[quantize\] x must not have a tangent"):
            ops.quantize(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: ops.quantize(p.x[0]), r"\[quantize\] x must have 2 dimensions"),
        (lambda p: ops.quantize_weight(p.w[0]), r"\[quantize_weight\] w must have 3 dimensions"),
        (lambda p: ops.act_quantize(p.x[0]), r"\[act_quantize\] z must have 2"),
        (lambda p: ops.act_quantize_backward(p.x[0], p.x), "_backward\\] dh must have 2"),
        (lambda p: ops.permute_pad(p.x[0], p.plan), r"\[permute_pad\] x must have 2"),
        (lambda p: ops.permute_pad_backward(p.x[0], p.plan), "_backward\\] dy must have 2"),
        (lambda p: ops.unpermute_unpad(p.x[0], p.plan), r"\[unpermute_unpad\] y must have 2"),
        (lambda p: ops.unpermute_unpad_backward(p.x[0], p.plan), "_backward\\] dout must have 2"),
        (lambda p: ops.permute_pad(p.w8, p.plan), r"\[permute_pad\] x must have 2"),
        (
            lambda p: ops.transpose_fp8(p.w8, p.plan),
            r"\[transpose_fp8\] q must have 2",
        ),
        (lambda p: ops.permute_transpose_fp8(p.w8, p.plan), r"_fp8\] q must have 2"),
        (lambda p: ops.quantize_pack(p.x[0], p.plan), r"\[quantize_pack\] x must have 2"),
        (
            lambda p: ops.quantize_pack(p.x, p.plan, p.topk_idx[:, 0], p.probs, num_experts=4),
            r"\[quantize_pack\] topk_idx must have 2",
        ),
    ],
)
def test_a_missing_dimension_is_named(call: Callable[[Problem], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(problem())
