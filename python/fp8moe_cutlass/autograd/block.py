"""The expert block as one autograd.Function: in FP8 or bfloat16, over any move of its rows.

A body (fp8.py, bf16.py) multiplies; a move takes tokens to their experts and sums back to their
tokens. FP8 tensors are never edges of the autograd graph: x enters in high precision and is
quantized inside, its gradient leaves in high precision; so do the weights. Everything saved goes
through save_for_backward: saved-tensor hooks see it, and what is changed before backward reads it
raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import bf16, fp8
from fp8moe_cutlass.autograd.arguments import as_counts, check_tensor, check_weights
from fp8moe_cutlass.autograd.body import Gradients, Need, Options
from fp8moe_cutlass.autograd.counters import Counters
from fp8moe_cutlass.autograd.no_double_backward import once_differentiable
from fp8moe_cutlass.autograd.saved import load, save
from fp8moe_cutlass.autograd.streams import now_on
from fp8moe_cutlass.autograd.transforms import refuse_transforms
from fp8moe_cutlass.autograd.weight_grad import WeightGrads, cast, weight_grads
from fp8moe_cutlass.autograd.weights import Fp8Weights
from fp8moe_cutlass.ops._call import watched_once
from fp8moe_cutlass.routing import RoutingPlan


class Arrived(NamedTuple):
    """Rows at their experts, what a body's forward takes, and the way back."""

    rows: Any
    probs: Tensor | None
    plan: Any
    route: Any  # a named tuple or None; it is saved for the backward


class Move(Protocol):
    """How tokens reach the experts of this process."""

    @property
    def collective(self) -> bool:
        """Whether other ranks take part. Backward then exchanges the gradients that forward
        announced, so that every rank runs the same exchanges."""

    def dispatch(
        self, x: Tensor, topk_idx: Any, probs: Any, recipe: Any, need: Need | None
    ) -> Callable[[], Arrived]:
        """Begin to send x [T, H] with topk_idx [T, S] and probs [T, S] f32 (of grouped rows:
        None, and [R] or None); returns how to wait for what arrives."""

    def combine(self, out: Tensor, route: Any) -> Tensor:
        """The experts' rows -> [T, H]."""

    def dispatch_grad(self, dout: Tensor, route: Any, recipe: Any) -> Any:
        """dout [T, H] -> rows as the body's backward takes them."""

    def combine_grads(
        self, dx: Tensor | None, dprobs: Tensor | None, route: Any
    ) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
        """Send both back; returns how to wait for dx [T, H] and dprobs [T, S]."""


class _Here:
    """Every expert is of this process."""

    collective = False

    def combine(self, out: Tensor, route: None) -> Tensor:
        return out

    def combine_grads(
        self, dx: Tensor | None, dprobs: Tensor | None, route: None
    ) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
        return lambda: (dx, dprobs)


@dataclass(frozen=True)
class Local(_Here):
    """Nothing moves but within the body. capacity: how many assignments find a row; None: all."""

    num_experts: int
    capacity: int | None = None

    def dispatch(
        self, x: Tensor, topk_idx: Any, probs: Any, recipe: Any, need: Need | None
    ) -> Callable[[], Arrived]:
        body = body_of(recipe)
        plan = body.group(topk_idx, self.num_experts, self.capacity)
        arrived = Arrived(body.enter(x, recipe), probs, plan, None)
        return lambda: arrived

    def dispatch_grad(self, dout: Tensor, route: None, recipe: Any) -> Any:
        return body_of(recipe).enter(dout, recipe, gradient=True)


@dataclass(frozen=True)
class Grouped(_Here):
    """x [R, H] and probs [R] came grouped by expert, as `plan` of grouped_plan says: nothing moves
    at all."""

    plan: Any

    def dispatch(
        self, x: Tensor, topk_idx: None, probs: Any, recipe: Any, need: Need | None
    ) -> Callable[[], Arrived]:
        arrived = Arrived(body_of(recipe).enter(x, recipe, grouped=True), probs, self.plan, None)
        return lambda: arrived

    def dispatch_grad(self, dout: Tensor, route: None, recipe: Any) -> Any:
        return body_of(recipe).enter(dout, recipe, gradient=True, grouped=True)


def grouped_plan(
    recipe: Any, counts: Tensor | Sequence[int] | RoutingPlan, rows: Tensor
) -> RoutingPlan | bf16.Groups:
    """The plan of rows [R, H] that came grouped: counts [E] of each expert's on any device, or a
    plan of ops.plan_from_counts."""
    if isinstance(counts, RoutingPlan):
        if recipe is not None:
            return counts
        padding = counts.token_of_row < 0 if counts.align > 1 else None
        return bf16.Groups(counts.row_offsets[1:].contiguous(), padding=padding)
    check_tensor("grouped_plan", "rows", rows)
    counts = now_on(rows.device, as_counts("grouped_plan", counts).int())
    if recipe is None:
        return bf16.Groups(counts.cumsum(0, dtype=torch.int32))
    return ops.plan_from_counts(counts, capacity=rows.shape[0])


def body_of(recipe: Any) -> Any:
    """The module whose functions compute."""
    return bf16 if recipe is None else fp8


def experts(
    x: Tensor,
    topk_idx: Any,
    probs: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    options: Options = Options(),  # noqa: B008 (frozen)
    *,
    move: Move | None = None,
    weights: Fp8Weights | None = None,
    grads: WeightGrads | None = None,
    counters: Counters | None = None,
    need: Need | None = None,
) -> Tensor:
    """out [T, H] in x's dtype of x [T, H], topk_idx [T, S] and probs [T, S] f32; differentiable in
    x, probs and two tensors of any origin, gate_up [E, 2I, H] and down [E, H, I].

    move: None: gate_up and down are all experts. weights: the FP8 weights to multiply; None: the
    two tensors, quantized now. grads: where the gradients of the two go. counters: are added to,
    where gradients are needed. need: whose gradients a backward will be asked for; None: of what
    requires one.
    """
    refuse_transforms("experts", x, probs, gate_up, down)
    _check(x, topk_idx, probs, gate_up, down, options, move, weights)
    move = move or Local(gate_up.shape[0])
    needs = [t is not None and t.requires_grad for t in (x, probs, gate_up, down)]
    if not (torch.is_grad_enabled() and any(needs)):
        return _forward(x, topk_idx, probs, gate_up, down, options, move, weights, None, None)[0]
    grads = grads or weight_grads(gate_up, down)
    out: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        x,
        probs,
        gate_up,
        down,
        topk_idx,
        options,
        move,
        weights,
        grads,
        counters,
        need or Need(*needs),
    )
    return out


def _check(
    x: Any,
    topk_idx: Any,
    probs: Any,
    gate_up: Any,
    down: Any,
    options: Any,
    move: Any,
    weights: Any,
) -> None:
    """ValueError unless these can be what `experts` takes."""
    check_weights("experts", gate_up, down)
    check_tensor("experts", "x", x)
    if x.ndim != 2 or x.shape[1] != down.shape[1]:
        raise ValueError(f"[experts] x must be [T, {down.shape[1]}]; got {tuple(x.shape)}")
    for name, t in (("topk_idx", topk_idx), ("probs", probs)):
        if t is not None:
            check_tensor("experts", name, t)
    if topk_idx is not None and probs is not None and probs.shape != topk_idx.shape:
        raise ValueError(
            f"[experts] probs must have topk_idx's shape {tuple(topk_idx.shape)}; "
            f"got {tuple(probs.shape)}"
        )
    if not isinstance(options, Options):
        raise ValueError(f"[experts] options must be Options; got {type(options).__name__}")
    if not isinstance(weights, Fp8Weights | None):
        raise ValueError(f"[experts] weights must be Fp8Weights; got {type(weights).__name__}")
    if move is not None and not hasattr(move, "dispatch"):
        raise ValueError(f"[experts] move must be a Move or None; got {type(move).__name__}")


@watched_once
def _forward(
    x: Tensor,
    topk_idx: Any,
    probs: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    options: Options,
    move: Move,
    given: Fp8Weights | None,
    need: Need | None,
    counters: Counters | None,
) -> tuple[Tensor, Any, Any]:
    """out [T, H] in x's dtype, what the body saves, and the route."""
    body = body_of(options.recipe)
    arrive = move.dispatch(x, topk_idx, probs, options.recipe, need)
    weights = body.weights(gate_up, down, given, options, need)  # while ranks tell their sizes
    rows, row_probs, plan, route = arrive()
    out, saved = body.forward(rows, row_probs, plan, weights, options, need, counters)
    out = move.combine(out, route)
    if torch.compiler.is_compiling() and out.dtype == x.dtype:
        # torch 2.11's dynamo also returns the tensor an op has filled, and gives that one the
        # gradient, unless the two are different tensors.
        return out.view(out.shape), saved, route
    return cast(out, x.dtype), saved, route


@watched_once
def _backward(
    dout: Tensor,
    saved: Any,
    route: Any,
    options: Options,
    move: Move,
    grads: WeightGrads,
    counters: Counters | None,
    need: Need,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """dx, dprobs and the weights' gradients."""
    rows = move.dispatch_grad(dout, route, options.recipe)
    made: Gradients = body_of(options.recipe).backward(rows, saved, options, need, counters)
    del rows, saved
    arrive = move.combine_grads(made.dx, made.dprobs, route)
    # While both are on their way:
    weights = grads.accept(made.gate_up, made.down, made.workspace)
    return *arrive(), weights


# Private: no public function tells a backward which of its inputs' gradients this run is for, and
# autograd.grad(out, x) must not write main_grad.
_will_run: Any = getattr(torch._C, "_will_engine_execute_node", None)


def _runs(node: Any) -> tuple[bool, bool]:
    """Whether the backward that runs goes on to `node`, an input's, and whether autograd.grad was
    asked for this very leaf, so that its gradient is to be returned."""
    if node is None or _will_run is None:
        return node is not None, False
    try:
        return _will_run(node), False
    except RuntimeError as error:  # how the engine says that it was
        return True, "autograd.grad" in str(error)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor | None,
        gate_up: Tensor,
        down: Tensor,
        topk_idx: Any,
        options: Options,
        move: Move,
        weights: Fp8Weights | None,
        grads: WeightGrads,
        counters: Counters | None,
        need: Need,
    ) -> Tensor:
        out, saved, route = _forward(
            x, topk_idx, probs, gate_up, down, options, move, weights, need, counters
        )
        save(ctx, saved, route)
        ctx.options, ctx.move, ctx.grads, ctx.counters = options, move, grads, counters
        ctx.dtype, ctx.need = x.dtype, need
        ctx.at = 1 if probs is None else 2  # of gate_up among the tensors, which have edges
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        options, move, counters = ctx.options, ctx.move, ctx.counters
        need, grads = Need(*ctx.needs_input_grad[:4]), ctx.grads
        if not torch.compiler.is_compiling():
            edges = ctx.next_functions[ctx.at : ctx.at + 2]
            (gate_up, asked_gate_up), (down, asked_down) = (_runs(edge[0]) for edge in edges)
            need = need._replace(gate_up=gate_up, down=down)
            if asked_gate_up or asked_down:
                grads = grads.returning(asked_gate_up, asked_down)
        if move.collective:
            need = need._replace(x=ctx.need.x, probs=ctx.need.probs)
        dx, dprobs, weights = _backward(dout, *load(ctx), options, move, grads, counters, need)
        return None if dx is None else cast(dx, ctx.dtype), dprobs, *weights, *(None,) * 7
