"""Dispatch, the experts of each rank, combine: one autograd.Function around the exchange.

Forward: one all-to-all takes each token's row to every rank that has an expert of its, one brings
the rank's partial sums back in bfloat16, which are summed in rank order. Backward mirrors it: the
gradient of the output travels as x did, by the plan and the sizes the forward found; gradients of
the probs and dx come back while the weight gradients are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass.autograd.ctx_io import Saved, load, save
from fp8moe_cutlass.autograd.experts import needs_grad
from fp8moe_cutlass.autograd.no_double_backward import once_differentiable
from fp8moe_cutlass.autograd.weight_grad import Gradients, WeightGrads
from fp8moe_cutlass.distributed.exchange import Exchange, Pending, Sizes
from fp8moe_cutlass.distributed.rank_agreement import Terms, recipe_word
from fp8moe_cutlass.recipe import Fp8Recipe


class Block(Protocol):
    """What travels between the ranks, and what a rank does with it: Fp8Block or Bf16Block.

    A plan (ops.dispatch_plan) has row_of [T, ranks], the row of a token for a rank or -1, and rows.
    """

    @property
    def recipe(self) -> Fp8Recipe | None:
        """How rows are quantized."""

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        """gate_up and down of this rank's experts."""

    def ready(self, terms: Terms, trained: bool) -> Block:
        """The block with the weights it multiplies, saving what a backward on these terms reads;
        not `trained`: it saves nothing and shows nothing."""

    def spent(self) -> Block:
        """The block for a backward, to which `forward` has given what it reads."""

    def plan(self, topk_idx: Tensor, exchange: Exchange) -> tuple[Any, Tensor]:
        """topk_idx [T, S] -> the plan, and counts [ranks, 2] i32: rows and assignments a rank."""

    def pack(
        self,
        x: Tensor,
        probs: Tensor,
        topk_idx: Tensor,
        plan: Any,
        exchange: Exchange,
        sizes: Callable[[], Sizes],
    ) -> Tensor:
        """x [T, H], probs [T, S] f32 -> rows of the wire, at least sizes().rows_sent."""

    def forward(
        self, rows: Tensor, slots: int, plan: Any, exchange: Exchange, sizes: Sizes
    ) -> tuple[Tensor, tuple[Saved, ...]]:
        """Received rows -> partial sums [sizes.rows, H] bf16 and what `backward` is to be given.
        Counts what the plans dropped."""

    def pack_gradient(self, dout: Tensor, plan: Any, sizes: Sizes) -> Tensor:
        """dout [T, H] -> rows of the wire, at least sizes.rows_sent."""

    def backward(
        self,
        rows: Tensor,
        saved: list[Any],
        *,
        need_dx: bool,
        need_dprobs: bool,
        need_gate_up: bool,
        need_down: bool,
    ) -> Gradients:
        """Received rows of the gradient -> gradients, dx and dprobs a row received."""

    def combine(self, rows: Tensor, plan: Any) -> Tensor:
        """The sum [T, C] of the rows [plan.rows, C] that came back for each token; C a multiple
        of 16."""


def dispatched_experts(
    x: Tensor,
    probs: Tensor,
    topk_idx: Tensor,
    exchange: Exchange,
    block: Block,
    grads: WeightGrads,
    beside: Callable[[], None] | None = None,
) -> Tensor:
    """out [T, H] in x's dtype of x [T, H], probs [T, S] f32 and topk_idx [T, S], whose ids count
    the experts of all ranks; differentiable in x, probs and the block's parameters. Collective.

    grads: where the gradients of the parameters go. beside: is called when the dispatch has been
    queued, to queue what needs none of it.
    """
    gate_up, down = block.parameters
    trained = needs_grad(x, probs, gate_up, down)
    weights_grad = gate_up.requires_grad or down.requires_grad
    terms = Terms(
        exchange.num_experts,
        x.shape[1],
        topk_idx.shape[1],
        exchange.segment,
        recipe_word(block.recipe),
        trained and x.requires_grad,
        trained and probs.requires_grad,
        trained and weights_grad,
    )
    with torch.no_grad():
        rows, plan, sizes, block = _dispatch(x, probs, topk_idx, exchange, block, terms, trained)
    if beside is not None:
        beside()
    if not trained:
        return _forward(rows, plan, sizes, exchange, block, terms)[0].to(x.dtype)
    result: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        *(x, probs, gate_up, down),
        *(rows, plan, sizes, exchange, block, terms, grads),
    )
    return result


def _dispatch(
    x: Tensor,
    probs: Tensor,
    topk_idx: Tensor,
    exchange: Exchange,
    block: Block,
    terms: Terms,
    trained: bool,
) -> tuple[Tensor, Any, Sizes, Block]:
    """(rows received, the plan of those sent, sizes, the block that is ready for them)."""
    plan, counts = block.plan(topk_idx, exchange)
    sizes = exchange.exchange_sizes(counts, terms)
    packed = block.pack(x, probs, topk_idx, plan, exchange, sizes)
    block = block.ready(terms, trained)  # while the sizes are on their way
    return exchange.dispatch(packed, sizes()), plan, sizes(), block


def _forward(
    rows: Tensor, plan: Any, sizes: Sizes, exchange: Exchange, block: Block, terms: Terms
) -> tuple[Tensor, tuple[Saved, ...]]:
    """(out [T, H] bf16, what block.backward is to be given)."""
    partial, saved = block.forward(rows, terms.slots, plan, exchange, sizes)
    return block.combine(exchange.combine(partial, plan.rows, sizes), plan), saved


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        rows: Tensor,
        plan: Any,
        sizes: Sizes,
        exchange: Exchange,
        block: Block,
        terms: Terms,
        grads: WeightGrads,
    ) -> Tensor:
        out, saved = _forward(rows, plan, sizes, exchange, block, terms)
        save(ctx, *saved, plan)
        ctx.exchange, ctx.sizes, ctx.block, ctx.terms = exchange, sizes, block.spent(), terms
        ctx.dtype, ctx.grads = x.dtype, grads
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # What travels back is what the ranks agreed upon, whatever this call asks for.
        _, _, need_gate_up, need_down, *_ = ctx.needs_input_grad
        *saved, plan = load(ctx)
        exchange, sizes, block = ctx.exchange, ctx.sizes, ctx.block
        rows = exchange.dispatch(block.pack_gradient(dout, plan, sizes), sizes)
        made = block.backward(
            rows,
            saved,
            need_dx=ctx.terms.x_grad,
            need_dprobs=ctx.terms.probs_grad,
            need_gate_up=need_gate_up,
            need_down=need_down,
        )

        def start(gradient: Tensor | None) -> Pending | None:
            return None if gradient is None else exchange.start_back(gradient, plan.rows, sizes)

        coming_dprobs, coming_dx = start(made.dprobs), start(made.dx)
        d_gate_up, d_down = ctx.grads.accept(
            made.gate_up if need_gate_up else None, made.down if need_down else None
        )
        dx, dprobs = None, None
        if coming_dprobs is not None:
            # A slot's gradient is 0 but on the rank of its expert: their sum is that one, exactly.
            slots = ctx.terms.slots
            wide = F.pad(coming_dprobs.wait(), (0, -slots % 16))
            dprobs = block.combine(wide, plan)[:, :slots]
        if coming_dx is not None:
            dx = block.combine(coming_dx.wait(), plan).to(ctx.dtype)
        return dx, dprobs, d_gate_up, d_down, *(None,) * 7
