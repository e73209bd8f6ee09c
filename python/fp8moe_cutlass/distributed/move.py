"""The move of a block whose experts are shared by the ranks of a group (autograd/block.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd.block import Arrived, body_of
from fp8moe_cutlass.autograd.body import Need
from fp8moe_cutlass.distributed import wire
from fp8moe_cutlass.distributed.exchange import (
    Announced,
    Exchange,
    Returning,
    Sizes,
    sizes_of_words,
)
from fp8moe_cutlass.distributed.rank_agreement import Terms, recipe_word
from fp8moe_cutlass.routing import RoutingPlan, buffer_words


class Route(NamedTuple):
    """The plan and the sizes by which the rows of one forward went."""

    plan: RoutingPlan  # ops.dispatch_plan's: a row per (token, rank)
    sizes: Sizes


class Sent(NamedTuple):
    """Tokens ready to go, and their sizes on the way."""

    packed: Tensor  # as many rows as there can be
    plan: RoutingPlan
    announced: Announced | None
    terms: Terms
    recipe: Any


class ReturningGrads(NamedTuple):
    """Gradients on their way back."""

    dx: Returning | None
    dprobs: Returning | None


@dataclass(frozen=True)
class GroupMove:
    """Tokens travel to the ranks of their experts, sums of a rank's experts come back. Every
    method is collective."""

    exchange: Exchange
    collective = True

    def send(
        self, x: Tensor, topk_idx: Tensor, probs: Tensor, recipe: Any, need: Need | None
    ) -> Sent:
        exchange = self.exchange
        terms = self.terms(x.shape[1], topk_idx.shape[1], recipe, need)
        plan, counts = exchange.plan(topk_idx)
        announced = exchange.announce(counts, terms)
        # While the sizes are on their way:
        packed = wire.pack(x, topk_idx, probs, plan, recipe, exchange.num_experts)
        return Sent(packed, plan, announced, terms, recipe)

    def terms(self, hidden: int, slots: int, recipe: Any, need: Need | None) -> Terms:
        """The words on which all ranks must agree."""
        x, probs, gate_up, down = need or (False, False, False, False)
        sizes = (self.exchange.num_experts, hidden, slots, self.exchange.segment)
        return Terms(*sizes, recipe_word(recipe), x, probs, gate_up or down)

    def receive(self, sent: Sent) -> Arrived:
        exchange, terms, recipe = self.exchange, sent.terms, sent.recipe
        sizes, mine = exchange.sizes(sent.announced, terms), exchange.local_experts
        came = exchange.dispatch(sent.packed, sizes)
        rows, ids, row_probs = wire.unpack(came, terms.hidden_size, terms.slots, recipe, mine)
        differ = exchange.compare(came, sizes)
        if differ is not None:  # what would be misread is left out
            ids.view(exchange.ranks, -1).masked_fill_(differ, -1)
        body = body_of(recipe)
        local = body.make_plan(ids, len(mine), sizes.assignments)
        exchange.count(sent.plan.status[:2], body.dropped(ids, local))
        return Arrived(rows, row_probs, local, Route(sent.plan, sizes))

    def combine(self, out: Tensor, route: Route) -> Tensor:
        rows = self.exchange.combine(out, route.plan.rows, route.sizes)
        return ops.unpermute_unpad(rows, route.plan)  # type: ignore[no-any-return]

    def send_grad(self, dout: Tensor, route: Route, recipe: Any) -> Any:
        packed = wire.pack_grad(dout, route.plan, recipe)
        rows = self.exchange.dispatch(packed, route.sizes, backward=True)
        self.exchange.compare(rows, route.sizes, backward=True)
        return wire.unpack_grad(rows, dout.shape[1], recipe)

    def return_grads(
        self, dx: Tensor | None, dprobs: Tensor | None, route: Route
    ) -> ReturningGrads:
        start, bound, sizes = self.exchange.start_back, route.plan.rows, route.sizes
        coming_dprobs = None if dprobs is None else start(dprobs, bound, sizes)
        return ReturningGrads(None if dx is None else start(dx, bound, sizes), coming_dprobs)

    def receive_grads(
        self, returning: ReturningGrads, route: Route
    ) -> tuple[Tensor | None, Tensor | None]:
        finish, dx, dprobs = self.exchange.finish_back, None, None
        if returning.dprobs is not None:
            # A slot's gradient is 0 but on the rank of its expert: their sum is that one.
            rows = finish(returning.dprobs)
            slots = rows.shape[1]
            dprobs = ops.unpermute_unpad(F.pad(rows, (0, -slots % 16)), route.plan)[:, :slots]
        if returning.dx is not None:
            dx = ops.unpermute_unpad(finish(returning.dx), route.plan)
        return dx, dprobs

    # ---- for the operator (autograd/torch_op.py), which takes and gives tensors and numbers

    def local_sizes(self, slots: int) -> list[int]:
        """The sizes of the plan of what arrives, with a rank capacity; else [-1]: the host does not
        know them."""
        if not self.exchange.segment:
            return [-1]
        fixed = self.exchange.fixed(self.terms(0, slots, None, None))
        return self.sizes_of(Route(None, fixed))  # type: ignore[arg-type]

    def sizes_of(self, route: Route) -> list[int]:
        """The sizes of the plan of what arrives."""
        sizes = route.sizes
        local = len(self.exchange.local_experts)
        return [sizes.rows, sizes.terms.slots, local, 1, sizes.assignments]

    def owned(self, saved: Any, recipe: Any) -> Any:
        """Replaces views of packed rows, among the tensors that a body has saved, by those rows."""
        return wire.owned(saved, recipe)

    def viewed(self, saved: Any, hidden: int, slots: int, recipe: Any) -> Any:
        """The reverse."""
        return wire.viewed(saved, hidden, slots, recipe)

    def route_tensors(self, route: Route) -> list[Tensor]:
        """The plan's buffer and, without a rank capacity, the sizes, on the CPU."""
        sizes = route.sizes
        if self.exchange.segment:
            return [route.plan.buffer]
        words = [*(sizes.sent or ()), *(sizes.received or ()), sizes.assignments]
        return [route.plan.buffer, torch.tensor(words)]

    def route_of(
        self,
        tensors: list[Any],
        tokens: int,
        hidden: int,
        slots: int,
        recipe: Any,
        need: Need,
    ) -> Route:
        """The route again."""
        terms = self.terms(hidden, slots, recipe, need)
        plan = RoutingPlan(tensors[0], *self.exchange.plan_sizes(tokens, slots))
        if self.exchange.segment:
            return Route(plan, self.exchange.fixed(terms))
        words, ranks = tensors[1].tolist(), self.exchange.ranks
        return Route(plan, sizes_of_words(terms, words[:ranks], words[ranks:-1], words[-1]))

    def fake(
        self, saved: Any, x: Tensor, topk_idx: Tensor, recipe: Any, rows: int
    ) -> tuple[Any, list[Tensor]]:
        """Shapes alone: what `owned` returns for what a body has saved, and route_tensors."""
        slots = topk_idx.shape[1]
        words = buffer_words(*self.exchange.plan_sizes(x.shape[0], slots))
        route = [x.new_empty(words, dtype=torch.int32)]
        if not self.exchange.segment:
            count = 2 * self.exchange.ranks + 1
            route.append(torch.empty(count, dtype=torch.int64, device="cpu"))
        width = wire.row_bytes(x.shape[1], slots, recipe)
        packed = x.new_empty(rows, width, dtype=torch.uint8)
        if saved.x is not None:
            saved = saved._replace(x=packed)
        return saved if recipe is not None else saved._replace(probs=None), route
