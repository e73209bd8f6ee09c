"""What ops.py times of each operator: a generator that builds random inputs and yields Work.

Work is data: the call, the bytes it must move, the arithmetic it must do, and the inputs by name,
from which a reference builds the same work in another library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass import Fp8Tensor, RoutingPlan, ops
from fp8moe_cutlass.typing import Columns
from shapes import Shape


@dataclass(frozen=True)
class Work:
    """One timed call. bytes: read plus written, each once; flops: 0 where memory is the bound."""

    variant: str
    run: Callable[[], object]
    bytes: int
    flops: int = 0
    mnk: tuple[int, int, int] | None = None  # the dense GEMM of the same arithmetic
    inputs: dict[str, Any] = field(default_factory=dict)


Case = Callable[[Shape, torch.device], Iterator[Work]]
CASES: dict[str, tuple[str, Case]] = {}  # by operator: the kind of its shapes, and what it runs


def case(kind: str) -> Callable[[Case], Case]:
    """Register the decorated generator for the operator of its name. kind: see shapes.py."""

    def register(function: Case) -> Case:
        CASES[function.__name__] = kind, function
        return function

    return register


def size_of(*things: Any) -> int:
    """Bytes of tensors, Fp8Tensors (scales included) and nested tuples of them; None is none."""
    total = 0
    for thing in things:
        if isinstance(thing, Fp8Tensor):
            total += size_of(thing.data, thing.scale_inv)
        elif isinstance(thing, Tensor):
            total += thing.numel() * thing.element_size()
        elif isinstance(thing, tuple):
            total += size_of(*thing)
    return total


def written(plan: RoutingPlan, *things: Any) -> int:
    """size_of, without the rows and columns that this routing leaves unwritten: a plan has room for
    any routing of its capacity. Reads two counts from the device."""
    rows, columns = int(plan.row_offsets[-1]), int(plan.col_offsets[-1])
    total = 0
    for thing in things:
        data = thing.data if isinstance(thing, Fp8Tensor) else thing
        if isinstance(thing, tuple):
            total += written(plan, *thing)
        elif isinstance(data, Tensor) and data.shape[0] == plan.rows:
            total += size_of(thing) * rows // plan.rows
        elif isinstance(thing, Fp8Tensor) and data.shape[-1] == plan.columns:
            total += size_of(thing) * columns // plan.columns
        else:
            total += size_of(thing)
    return total


def into(op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Callable[[], object], Any]:
    """A call of `op` into outputs made beforehand, and those outputs."""
    out = op(*args, **kwargs)
    return (lambda: op(*args, **kwargs, out=out)), out


def normal(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).bfloat16()


def top_k(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random distinct experts [T, S], and probs [T, S]."""
    probs, experts = torch.rand(shape["T"], shape["E"], device=device).topk(shape["S"], dim=-1)
    return experts, probs


def routing(shape: Shape, device: torch.device) -> tuple[Tensor, RoutingPlan, Tensor]:
    """Random experts, their plan, and probs."""
    experts, probs = top_k(shape, device)
    return experts, ops.route(shape["E"], topk_idx=experts, align=shape["align"]), probs


def dispatch(shape: Shape, device: torch.device) -> tuple[Tensor, RoutingPlan, Tensor]:
    """Random experts, their dispatch plan to W ranks, and probs."""
    experts, probs = top_k(shape, device)
    return experts, ops.dispatch_plan(experts, shape["E"], shape["W"])[0], probs


def transposed(x: Tensor, plan: RoutingPlan, columns: Columns) -> Fp8Tensor:
    """x [R, C] as an operand of wgrad, by the way the layer takes."""
    q = ops.quantize(x, scale_layout="gemm")
    t: Fp8Tensor = ops.transpose_fp8(q, plan, columns=columns)
    return t


def ragged(rows: int, experts: int, device: torch.device) -> RoutingPlan:
    """A plan of `rows` rows that arrive grouped, in groups as a random routing makes them."""
    experts_of_rows = torch.randint(experts, (rows,))
    counts = torch.bincount(experts_of_rows, minlength=experts).to(device, torch.int32)
    return ops.plan_from_counts(counts, capacity=rows)


@case("matrix")
def quantize(shape: Shape, device: torch.device) -> Iterator[Work]:
    x = normal(shape["M"], shape["K"], device=device)
    for layout in ("row", "gemm"):
        run, q = into(ops.quantize, x, scale_layout=layout)
        yield Work(layout, run, size_of(x, q), inputs={"x": x})


@case("weight")
def quantize_weight(shape: Shape, device: torch.device) -> Iterator[Work]:
    w = normal(shape["E"], shape["N"], shape["K"], device=device)
    run, out = into(ops.quantize_weight, w)
    yield Work("for fprop and dgrad", run, size_of(w, out))
    run, one = into(ops.quantize_weight, w, transposed=False)
    yield Work("for fprop", run, size_of(w, one))


@case("weight")
def turn_weight(shape: Shape, device: torch.device) -> Iterator[Work]:
    w = normal(shape["E"], shape["N"], shape["K"], device=device)
    q = ops.quantize_weight(w, transposed=False)
    run, q_t = into(ops.turn_weight, q)
    yield Work("block", run, size_of(q, q_t))


@case("matrix")
def dequantize(shape: Shape, device: torch.device) -> Iterator[Work]:
    q = ops.quantize(normal(shape["M"], shape["K"], device=device))
    run, x = into(ops.dequantize, q)
    yield Work("row", run, size_of(q, x))


@case("routing")
def route(shape: Shape, device: torch.device) -> Iterator[Work]:
    experts, plan, _ = routing(shape, device)
    run = lambda: ops.route(shape["E"], topk_idx=experts, out=plan)  # noqa: E731
    yield Work("top-k", run, size_of(experts, plan.buffer))


@case("routing")
def router_topk(shape: Shape, device: torch.device) -> Iterator[Work]:
    logits = torch.randn(shape["T"], shape["E"], device=device)
    rules: dict[str, dict[str, Any]] = {
        "softmax": {},
        "sigmoid, groups": {
            "score": "sigmoid",
            "num_groups": 4,
            "topk_groups": 2,
            "best_per_group": 1,
        },
    }
    for variant, rule in rules.items():
        run, out = into(ops.router_topk, logits, shape["S"], **rule)
        yield Work(variant, run, size_of(logits, out))


@case("routing")
def router_topk_backward(shape: Shape, device: torch.device) -> Iterator[Work]:
    logits = torch.randn(shape["T"], shape["E"], device=device)
    routed = ops.router_topk(logits, shape["S"])
    dweights = torch.randn_like(routed.topk_weights)
    run, dlogits = into(ops.router_topk_backward, dweights, None, *routed[:3])
    read = size_of(dweights, routed.scores, routed.topk_idx)
    yield Work("softmax", run, read + size_of(dlogits))


@case("permute")
def permute_pad(shape: Shape, device: torch.device) -> Iterator[Work]:
    _, plan, probs = routing(shape, device)
    x = normal(shape["T"], shape["H"], device=device)
    for variant, source in (("bf16", x), ("fp8", ops.quantize(x))):
        run, out = into(ops.permute_pad, source, plan, probs=probs)
        moved = size_of(source, plan.row_of, probs) + written(plan, out)
        yield Work(variant, run, moved, inputs={"x": source, "plan": plan})


@case("permute")
def permute_pad_backward(shape: Shape, device: torch.device) -> Iterator[Work]:
    _, plan, probs = routing(shape, device)
    dy = normal(plan.rows, shape["H"], device=device)
    dprobs = torch.rand(plan.rows, device=device)
    run, out = into(ops.permute_pad_backward, dy, plan, dprobs=dprobs)
    rows = probs.numel() * shape["H"] * 2  # of dy, without padding
    moved = rows + size_of(out, plan.row_of) + written(plan, dprobs)
    yield Work("bf16", run, moved)


@case("permute")
def unpermute_unpad(shape: Shape, device: torch.device) -> Iterator[Work]:
    _, plan, probs = routing(shape, device)
    y = normal(plan.rows, shape["H"], device=device)
    rows = probs.numel() * shape["H"] * 2
    for variant, weights in (("bf16", None), ("bf16, probs", probs)):
        run, out = into(ops.unpermute_unpad, y, plan, probs=weights)
        inputs = {"y": y, "plan": plan, "probs": weights, "T": shape["T"]}
        yield Work(variant, run, rows + size_of(out, weights, plan.row_of), inputs=inputs)


@case("permute")
def unpermute_unpad_backward(shape: Shape, device: torch.device) -> Iterator[Work]:
    _, plan, probs = routing(shape, device)
    dout = normal(shape["T"], shape["H"], device=device)
    y = normal(plan.rows, shape["H"], device=device)
    run, out = into(ops.unpermute_unpad_backward, dout, plan)
    moved = size_of(dout, plan.row_of) + written(plan, out)
    yield Work("bf16", run, moved)
    run, out = into(ops.unpermute_unpad_backward, dout, plan, y=y, probs=probs)
    rows = probs.numel() * shape["H"] * 2
    moved = rows + size_of(dout, probs, plan.row_of) + written(plan, out)
    yield Work("bf16, probs", run, moved)


@case("ranks")
def dispatch_plan(shape: Shape, device: torch.device) -> Iterator[Work]:
    experts, *_ = dispatch(shape, device)
    run, out = into(ops.dispatch_plan, experts, shape["E"], shape["W"])
    yield Work("exact", run, size_of(experts, out[0].buffer, out[1]))


@case("ranks")
def quantize_pack(shape: Shape, device: torch.device) -> Iterator[Work]:
    experts, plan, probs = dispatch(shape, device)
    x = normal(shape["T"], shape["H"], device=device)
    rows = int(plan.row_offsets[-1])
    for variant, ids in (("ids and probs", (experts, probs)), ("gradient", ())):
        run, packed = into(ops.quantize_pack, x, plan, *ids, num_experts=shape["E"])
        moved = size_of(x, *ids, plan.row_of) + rows * packed.shape[1]
        yield Work(variant, run, moved)


@case("ranks")
def unpack(shape: Shape, device: torch.device) -> Iterator[Work]:
    experts, plan, probs = dispatch(shape, device)
    x = normal(shape["T"], shape["H"], device=device)
    packed = ops.quantize_pack(x, plan, experts, probs, num_experts=shape["E"])
    out = ops.unpack(packed, shape["H"], shape["S"])[1:]
    run = lambda: ops.unpack(packed, shape["H"], shape["S"], out=out)  # noqa: E731
    yield Work("ids and probs", run, 2 * size_of(out))


@case("rows")
def transpose_fp8(shape: Shape, device: torch.device) -> Iterator[Work]:
    plan = ragged(shape["R"], shape["E"], device)
    q = ops.quantize(normal(shape["R"], shape["C"], device=device), scale_layout="gemm")
    for columns in ("block", "column"):
        run, out = into(ops.transpose_fp8, q, plan, columns=columns)
        yield Work(columns, run, written(plan, q, out))


@case("layer")
def permute_transpose_fp8(shape: Shape, device: torch.device) -> Iterator[Work]:
    _, plan, _ = routing(shape, device)
    x = normal(shape["T"], shape["H"], device=device)
    q_row, q_gemm = ops.quantize(x), ops.quantize(x, scale_layout="gemm")
    for q, named in ((q_row, ""), (q_gemm, ", scales of x in gemm layout")):
        for columns in ("block", "column"):
            run, out = into(ops.permute_transpose_fp8, q, plan, columns=columns)
            moved = size_of(q, plan.row_of) + written(plan, out)
            yield Work(columns + named, run, moved)


@case("layer")
def count_codes(shape: Shape, device: torch.device) -> Iterator[Work]:
    _, plan, _ = routing(shape, device)
    q = ops.quantize(normal(shape["T"], shape["H"], device=device))
    columns = ops.permute_transpose_fp8(q, plan)
    counts = torch.zeros(21, dtype=torch.int64, device=device)
    for stride in (1, 8):
        run = lambda s=stride: ops.count_codes(q, plan, counts, columns=columns, stride=s)  # noqa: E731
        moved = size_of(q, plan.row_of) // stride + size_of(columns.scale_inv, counts)
        yield Work(f"every row in {stride}", run, moved)


@case("activation")
def act_quantize(shape: Shape, device: torch.device) -> Iterator[Work]:
    plan = ragged(shape["R"], shape["E"], device)
    z = normal(shape["R"], 2 * shape["C"], device=device)
    probs = torch.rand(shape["R"], device=device)
    run, out = into(ops.act_quantize, z, plan, probs=probs)
    yield Work("rows", run, size_of(z, probs) + written(plan, out), inputs={"z": z, "probs": probs})


@case("activation")
def act_quantize_backward(shape: Shape, device: torch.device) -> Iterator[Work]:
    plan = ragged(shape["R"], shape["E"], device)
    z = normal(shape["R"], 2 * shape["C"], device=device)
    dh = normal(shape["R"], shape["C"], device=device)
    probs = torch.rand(shape["R"], device=device)
    workspace = ops.zero_workspace(dh)
    for columns in (None, "block", "column"):
        given = {"columns": columns, "workspace": workspace}
        run, out = into(ops.act_quantize_backward, dh, z, plan, probs, **given)
        variant = "dz" if columns is None else f"dz, dz and h columns={columns}"
        moved = size_of(dh, z, probs) + written(plan, out)
        yield Work(variant, run, moved)


@case("gemm")
def grouped_gemm(shape: Shape, device: torch.device) -> Iterator[Work]:
    m, n, k, e = (shape[name] for name in "MNKE")
    x, w = normal(m, k, device=device), normal(e, n, k, device=device)
    a, (wq, _) = ops.quantize(x, scale_layout="gemm"), ops.quantize_weight(w)
    even = torch.full((e,), m // e, dtype=torch.int32, device=device)
    balanced = ops.plan_from_counts(even, capacity=m)
    plans = {"balanced": balanced, "ragged": ragged(m, e, device)}
    for variant, plan in plans.items():
        run, d = into(ops.grouped_gemm, a, wq, plan)
        inputs = {"x": x, "w": w, "plan": plan}
        yield Work(variant, run, size_of(a, wq, d), 2 * m * n * k, (m, n, k), inputs)


@case("wgrad")
def grouped_gemm_wgrad(shape: Shape, device: torch.device) -> Iterator[Work]:
    m, n, k, e = (shape[name] for name in "MNKE")
    dy, x = normal(m, n, device=device), normal(m, k, device=device)
    plan = ragged(m, e, device)
    sides: tuple[Columns, ...] = ("block", "column")
    for columns in sides:
        dy_t, x_t = (transposed(t, plan, columns) for t in (dy, x))
        workspace = ops.zero_workspace(dy)
        run, dw = into(ops.grouped_gemm_wgrad, dy_t, x_t, plan, workspace=workspace)
        inputs = {"dy": dy, "x": x, "plan": plan, "columns": columns}
        yield Work(columns, run, size_of(dy_t, x_t, dw), 2 * m * n * k, (n, k, m), inputs)


def low_rank(
    shape: Shape, device: torch.device
) -> tuple[Fp8Tensor, RoutingPlan, dict[str, Tensor]]:
    """Rows [R, C] in FP8, their plan, and factors of rank 16 by their layout."""
    r, c, e = (shape[name] for name in "RCE")
    rows = ops.quantize(normal(r, c, device=device), scale_layout="gemm")
    sizes = {"rank first": (e, 16, c), "rank last": (e, c, 16)}
    factors = {name: normal(*size, device=device) for name, size in sizes.items()}
    return rows, ragged(r, e, device), factors


@case("rows")
def lora_project(shape: Shape, device: torch.device) -> Iterator[Work]:
    rows, plan, factors = low_rank(shape, device)
    for name, factor in factors.items():
        run, out = into(ops.lora_project, rows, factor, plan, rank_first=name == "rank first")
        yield Work(f"{name}, r 16", run, size_of(rows, factor, out))


@case("rows")
def lora_wgrad(shape: Shape, device: torch.device) -> Iterator[Work]:
    rows, plan, _ = low_rank(shape, device)
    u = normal(shape["R"], 16, device=device)
    for name in ("rank first", "rank last"):
        run, out = into(ops.lora_wgrad, u, rows, plan, rank_first=name == "rank first")
        yield Work(f"{name}, r 16", run, size_of(u, rows, out))


@case("weight")
def quantize_lora(shape: Shape, device: torch.device) -> Iterator[Work]:
    for name, size in (("rank first", (16, shape["N"])), ("rank last", (shape["N"], 16))):
        factor = normal(shape["E"], *size, device=device)
        run, w2 = into(ops.quantize_lora, factor, rank_first=name == "rank first")
        yield Work(f"{name}, r 16", run, size_of(factor, w2))
