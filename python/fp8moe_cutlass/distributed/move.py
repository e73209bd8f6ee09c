"""The move of a block whose experts are shared by the ranks of a group (autograd/block.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8moe_cutlass.autograd.block import Arrived, body_of
from fp8moe_cutlass.autograd.body import Need
from fp8moe_cutlass.distributed import wire
from fp8moe_cutlass.distributed.exchange import Exchange
from fp8moe_cutlass.distributed.peers import Place
from fp8moe_cutlass.distributed.rank_agreement import Terms, recipe_word
from fp8moe_cutlass.distributed.sizes import Announced, Sizes, sizes_of_words
from fp8moe_cutlass.distributed.through_peers import ThroughPeers
from fp8moe_cutlass.routing import RoutingPlan, buffer_words


class Route(NamedTuple):
    """The plan and the sizes by which the rows of one forward went."""

    plan: RoutingPlan  # ops.dispatch_plan's: a row per (token, rank)
    sizes: Sizes


class Sent(NamedTuple):
    """Tokens ready to go, and their sizes on the way."""

    packed: Tensor  # as many rows as there can be
    place: Place | None  # where they went already
    plan: RoutingPlan
    announced: Announced | None
    terms: Terms
    recipe: Any
    tokens: tuple[Tensor, Tensor, Tensor]  # x, topk_idx, probs


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
        place, tokens = exchange.carrier(terms).place(terms, terms.slots), (x, topk_idx, probs)
        # While the sizes are on their way:
        packed = wire.pack(*tokens, plan, recipe, exchange.num_experts, place)
        return Sent(packed, place, plan, announced, terms, recipe, tokens)

    def terms(self, hidden: int, slots: int, recipe: Any, need: Need | None) -> Terms:
        """The words on which all ranks must agree."""
        x, probs, gate_up, down = need or (False, False, False, False)
        sizes = (self.exchange.num_experts, hidden, slots, self.exchange.segment)
        return Terms(*sizes, recipe_word(recipe), x, probs, gate_up or down)

    def receive(self, sent: Sent) -> Arrived:
        exchange, terms, recipe = self.exchange, sent.terms, sent.recipe
        sizes, mine = exchange.sizes(sent.announced, terms), exchange.local_experts
        packed, place = sent.packed, exchange.carrier(terms).place(terms, terms.slots)
        if place is not None and (sent.place is None or place.peers is not sent.place.peers):
            # There was not room for all rows: once more, to where there is.
            packed = wire.pack(*sent.tokens, sent.plan, recipe, exchange.num_experts, place)
        came = exchange.dispatch(packed, sizes)
        rows, ids, row_probs = wire.unpack(came, terms.hidden_size, terms.slots, recipe, mine)
        differ = exchange.compare(came, sizes, sent.announced)
        if differ is not None:  # what would be misread is left out
            ids.view(exchange.ranks, -1).masked_fill_(differ, -1)
        body = body_of(recipe)
        local = body.make_plan(ids, len(mine), sizes.assignments)
        exchange.count(sent.plan.status[:2], body.dropped(ids, local))
        return Arrived(rows, row_probs, local, Route(sent.plan, sizes))

    def into(self, route: Route) -> Tensor | None:
        place: Tensor | None = self._carrier(route).into(route.sizes)
        return place

    def combine(self, out: Tensor, route: Route) -> Tensor:
        (total,) = self._finish(self._start([out], route, beside=False), route)
        assert total is not None
        return total

    def send_grad(self, dout: Tensor, route: Route, recipe: Any) -> Any:
        exchange, (plan, sizes) = self.exchange, route
        announced = exchange.announce_grad(sizes)
        packed = wire.pack_grad(dout, plan, recipe, self._carrier(route).place(sizes.terms, 0))
        rows = exchange.dispatch(packed, sizes, backward=True)
        exchange.compare(rows, sizes, announced, backward=True)
        return wire.unpack_grad(rows, dout.shape[1], recipe)

    def return_grads(self, dx: Tensor | None, dprobs: Tensor | None, route: Route) -> Any:
        return self._start([dprobs, dx], route, beside=True)

    def receive_grads(self, returning: Any, route: Route) -> tuple[Tensor | None, Tensor | None]:
        # A slot's gradient is 0 but on the rank of its expert: the sum of dprobs is that one.
        dprobs, dx = self._finish(returning, route)
        return dx, dprobs

    def _carrier(self, route: Route) -> Any:
        return self.exchange.carrier(route.sizes.terms)

    def _start(self, parts: list[Tensor | None], route: Route, beside: bool) -> Any:
        return self._carrier(route).start_sums(parts, *route, beside)

    def _finish(self, returning: Any, route: Route) -> list[Tensor | None]:
        found: list[Tensor | None] = self._carrier(route).finish_sums(returning, *route)
        return found

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
        """The plan's buffer, sizes.first and, without a rank capacity, the other sizes."""
        sizes, buffer = route.sizes, route.plan.buffer
        first = buffer.new_empty(self.exchange.ranks) if sizes.first is None else sizes.first
        if self.exchange.segment:
            return [buffer, first]
        words = [*(sizes.sent or ()), *(sizes.received or ()), sizes.assignments]
        return [buffer, first, torch.tensor(words)]

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
        by_peers = isinstance(self.exchange.carrier(terms), ThroughPeers)
        first = tensors[1] if by_peers else None
        if self.exchange.segment:
            return Route(plan, replace(self.exchange.fixed(terms), first=first))
        words, ranks = tensors[2].tolist(), self.exchange.ranks
        sizes = sizes_of_words(terms, words[:ranks], words[ranks:-1], words[-1])
        return Route(plan, replace(sizes, first=first))

    def fake(
        self, saved: Any, x: Tensor, topk_idx: Tensor, recipe: Any, rows: int
    ) -> tuple[Any, list[Tensor]]:
        """Shapes alone: what `owned` returns for what a body has saved, and route_tensors."""
        slots = topk_idx.shape[1]
        words = buffer_words(*self.exchange.plan_sizes(x.shape[0], slots))
        route = [x.new_empty(n, dtype=torch.int32) for n in (words, self.exchange.ranks)]
        if not self.exchange.segment:
            count = 2 * self.exchange.ranks + 1
            route.append(torch.empty(count, dtype=torch.int64, device="cpu"))
        width = wire.row_bytes(x.shape[1], slots, recipe)
        packed = x.new_empty(rows, width, dtype=torch.uint8)
        if saved.x is not None:
            saved = saved._replace(x=packed)
        return saved if recipe is not None else saved._replace(probs=None), route
