"""The expert block, forward and backward, as plain functions over any body and any move.

A body (fp8.py, bf16.py) multiplies; a move takes tokens to their experts and sums back to their
tokens. torch_op.py makes the two functions differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fp8moe_cutlass.autograd import bf16, fp8
from fp8moe_cutlass.autograd.body import Biases, Counters, Gradients, Lora, Need, Options
from fp8moe_cutlass.autograd.weight_grad import WeightGrads
from fp8moe_cutlass.autograd.weights import Fp8Weights
from fp8moe_cutlass.routing import RoutingPlan


class Arrived(NamedTuple):
    """Rows at their experts, as a body's forward takes them, and the way back."""

    rows: Any
    probs: Tensor | None
    plan: Any
    route: Any  # of the move that sent them
    into: Tensor | None = None  # where the body writes what goes back, bf16; None: anywhere


class Move(Protocol):
    """Takes tokens to the experts of this process and back. A `send` returns a value of the move's
    own, which its `receive` takes."""

    @property
    def collective(self) -> bool:
        """Whether other ranks take part. Backward then exchanges the gradients that forward
        announced, so that every rank runs the same exchanges."""

    def send(self, x: Tensor, topk_idx: Any, probs: Any, recipe: Any, need: Need | None) -> Any:
        """Begin to send x [T, H] with topk_idx [T, S] and probs [T, S] f32 (of grouped rows:
        None, and [R] or None)."""

    def receive(self, sent: Any) -> Arrived:
        """Wait for what arrives."""

    def combine(self, out: Tensor, route: Any) -> Tensor:
        """The experts' rows -> [T, H]."""

    def send_grad(
        self, dout: Tensor, route: Any, recipe: Any, meanwhile: Callable[[], None]
    ) -> tuple[Any, Any]:
        """dout [T, H] -> rows as the body's backward takes them, and where it writes dx, bf16, and
        dprobs or None (None: anywhere; else rows are to be read until return_grads). meanwhile:
        queues what may run beside, of rows in FP8."""

    def return_grads(
        self, dx: Tensor | None, dprobs: Tensor | None, route: Any, beside: bool
    ) -> Any:
        """Begin to send both back; beside: while weight gradients are computed."""

    def receive_grads(self, returning: Any, route: Any) -> tuple[Tensor | None, Tensor | None]:
        """Wait for dx [T, H] and dprobs [T, S]."""


class _Here:
    """Every expert is of this process: what is sent has arrived."""

    collective = False

    def receive(self, sent: Arrived) -> Arrived:
        return sent

    def combine(self, out: Tensor, route: None) -> Tensor:
        return out

    def return_grads(self, dx: Any, dprobs: Any, route: None, beside: bool) -> Any:
        return dx, dprobs

    def receive_grads(self, returning: Any, route: None) -> Any:
        return returning


@dataclass(frozen=True)
class Local(_Here):
    """Nothing moves but within the body. max_assignments of topk_idx get a row; None: all."""

    num_experts: int
    max_assignments: int | None = None

    def send(self, x: Tensor, topk_idx: Any, probs: Any, recipe: Any, need: Need | None) -> Arrived:
        body = bf16 if recipe is None else fp8
        plan = body.make_plan(topk_idx, self.num_experts, self.max_assignments)
        if self.max_assignments is not None and x.device.type == "cpu":
            beyond = int(body.dropped(topk_idx, plan))
            if beyond:
                raise ValueError(
                    f"[experts] a mask must hold at most {self.max_assignments}; "
                    f"got {self.max_assignments + beyond}"
                )
        return Arrived(body.enter(x, recipe), probs, plan, None)

    def send_grad(self, dout: Tensor, route: None, recipe: Any, meanwhile: Any) -> tuple[Any, None]:
        body = bf16 if recipe is None else fp8
        return body.enter(dout, recipe, gradient=True), None


@dataclass(frozen=True)
class Grouped(_Here):
    """x [R, H] and probs [R] came grouped by expert: nothing moves at all.

    counts: rows of each expert [E], on any device; or a plan of ops.plan_from_counts.
    """

    counts: Tensor | Sequence[int] | RoutingPlan

    def send(
        self, x: Tensor, topk_idx: None, probs: Any, recipe: Any, need: Need | None
    ) -> Arrived:
        body = bf16 if recipe is None else fp8
        _check_counts(self.counts, x.shape[0])
        plan = body.grouped_plan(self.counts, x)
        return Arrived(body.enter(x, recipe, grouped=True), probs, plan, None)

    def send_grad(self, dout: Tensor, route: None, recipe: Any, meanwhile: Any) -> tuple[Any, None]:
        body = bf16 if recipe is None else fp8
        return body.enter(dout, recipe, gradient=True, grouped=True), None


def _check_counts(counts: Any, rows: int) -> None:
    """Checks the counts that the host knows."""
    if isinstance(counts, RoutingPlan) or (isinstance(counts, Tensor) and counts.is_cuda):
        return
    numbers = counts.tolist() if isinstance(counts, Tensor) else counts
    if min(numbers) < 0 or sum(numbers) > rows:
        raise ValueError(
            f"[experts] counts must be at least 0 and their sum at most the {rows} rows; got "
            f"{numbers}"
        )


def body_of(recipe: Any) -> Any:
    """The module whose functions compute."""
    return bf16 if recipe is None else fp8


def forward(
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
    lora: Lora | None = None,
    biases: Biases | None = None,
    up: Tensor | None = None,
) -> tuple[Tensor, Any, Any]:
    """out [T, H] in x's dtype, what the body saves, and the route. The arguments are
    torch_op.run's."""
    body = bf16 if options.recipe is None else fp8
    sent = move.send(x, topk_idx, probs, options.recipe, need)
    beside = () if up is None else (up,)
    # While ranks tell their sizes:
    weights = body.weights(gate_up, down, given, options, need, *beside)
    rows, row_probs, plan, route, into = move.receive(sent)
    more = {} if lora is None else {"lora": lora}  # which bf16 has not
    out, saved = body.forward(
        *(rows, row_probs, plan, weights, options, need, counters, into), biases=biases, **more
    )
    out = move.combine(out, route)
    return out if out.dtype == x.dtype else out.to(x.dtype), saved, route


def backward(
    dout: Tensor,
    saved: Any,
    route: Any,
    options: Options,
    move: Move,
    grads: WeightGrads,
    counters: Counters | None,
    need: Need,
    scaling: float = 0.0,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """dx in dout's dtype, dprobs and the gradients of gate_up, down and up and of the two biases,
    then those of a Lora's factors where its `scaling` is not 0."""
    body = bf16 if options.recipe is None else fp8
    more: dict[str, Any] = {"scaling": scaling} if scaling else {}

    def meanwhile() -> None:
        if grads.pending is None and need.gate_up:
            more["x_turned"] = fp8.turn_x(saved, options, counters)

    rows, into = move.send_grad(dout, route, options.recipe, meanwhile)
    made: Gradients = body.backward(rows, saved, options, need, counters, into, **more)
    rows = saved = None
    if into is not None and made.down is not None:
        made = made._replace(down=made.down.apart(grads.pending is not None))
    beside = grads.pending is None and not (made.gate_up is None and made.down is None)
    returning = move.return_grads(made.dx, made.dprobs, route, beside)
    # While both are on their way:
    weights = grads.accept(made.gate_up, made.down, made.workspace, made.biases)
    if scaling:
        weights += made.lora or [None] * 4
    dx, dprobs = move.receive_grads(returning, route)
    if dx is not None and dx.dtype != dout.dtype:
        dx = dx.to(dout.dtype)
    return dx, dprobs, weights
