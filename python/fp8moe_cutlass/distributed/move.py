"""The move of a block whose experts are shared by the ranks of a group (autograd/block.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8moe_cutlass.autograd import bf16, fp8
from fp8moe_cutlass.autograd.block import Arrived
from fp8moe_cutlass.autograd.body import Need
from fp8moe_cutlass.autograd.streams import capturing
from fp8moe_cutlass.distributed import wire
from fp8moe_cutlass.distributed.exchange import Carrier, Exchange
from fp8moe_cutlass.distributed.peers import Place
from fp8moe_cutlass.distributed.rank_agreement import Terms, recipe_word
from fp8moe_cutlass.distributed.sizes import Announced, Sizes
from fp8moe_cutlass.routing import RoutingPlan


class Route(NamedTuple):
    """The plan and the sizes by which the rows of one forward went."""

    plan: RoutingPlan  # ops.dispatch_plan's: a row per (token, rank)
    sizes: Sizes
    carrier: Carrier


class Sent(NamedTuple):
    """Tokens ready to go, and their sizes on the way."""

    packed: Tensor  # as many rows as there can be
    place: Place | None  # where they went already
    plan: RoutingPlan
    announced: Announced | None
    terms: Terms
    mark: Tensor | None  # with a rank capacity, the terms in short
    recipe: Any
    carrier: Carrier
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
        tokens = x, topk_idx, probs
        mark = exchange.mark(terms, x.device) if exchange.segment else None
        with exchange.begin(terms, x.device):
            announced = exchange.announce(counts, terms)
            carrier = exchange.carrier(terms)
            # While the sizes are on their way:
            place = carrier.place(terms)
            packed = wire.pack(*tokens, plan, recipe, exchange.num_experts, place)
        return Sent(packed, place, plan, announced, terms, mark, recipe, carrier, tokens)

    def terms(self, hidden: int, slots: int, recipe: Any, need: Need | None) -> Terms:
        """The words on which all ranks must agree."""
        x, probs, gate_up, down, lora, biases = need or (False,) * 6
        sizes = (self.exchange.num_experts, hidden, slots, self.exchange.segment)
        return Terms(*sizes, recipe_word(recipe), x, probs, gate_up or down or lora or biases)

    def receive(self, sent: Sent) -> Arrived:
        exchange, terms, recipe = self.exchange, sent.terms, sent.recipe
        packed, mine = sent.packed, exchange.local_experts
        sizes = exchange.sizes(sent.announced, terms, sent.carrier)
        carrier = exchange.carrier(terms)
        if carrier.moved_on(sent.place):
            # There was no room for all rows: once more, to where there is.
            place = carrier.place(terms)
            packed = wire.pack(*sent.tokens, sent.plan, recipe, exchange.num_experts, place)
        came, marks = carrier.dispatch(packed, sizes, sent.mark)
        rows, ids, row_probs = wire.unpack(came, terms.hidden_size, terms.slots, recipe, mine)
        if marks is not None:  # what would be misread is left out
            differ = exchange.compare(marks, terms)
            ids.view(exchange.ranks, -1).masked_fill_(differ, -1)
        body: Any = bf16 if recipe is None else fp8
        local = body.make_plan(ids, len(mine), sizes.assignments)
        if exchange.segment:
            exchange.count(body.dropped(ids, local))
        route = Route(sent.plan, sizes, carrier)
        return Arrived(rows, row_probs, local, route, carrier.into(sizes))

    def combine(self, out: Tensor, route: Route) -> Tensor:
        plan, sizes, carrier = route
        (total,) = carrier.finish_sums(carrier.start_sums([out], plan, sizes, False), plan, sizes)
        return total  # type: ignore[return-value]

    def send_grad(
        self, dout: Tensor, route: Route, recipe: Any, meanwhile: Callable[[], None]
    ) -> tuple[Any, Any]:
        exchange, (plan, sizes, carrier) = self.exchange, route
        mark = exchange.mark(sizes.terms, dout.device, True) if exchange.segment else None
        with carrier.begin():
            packed = wire.pack_grad(dout, plan, recipe, carrier.place_of_grad(sizes))
        into = carrier.into_of_grad(sizes)
        if into is not None and capturing(dout.device):
            meanwhile()
        rows, marks = carrier.dispatch_grad(packed, sizes, mark)
        if marks is not None:
            self.exchange.compare(marks, sizes.terms, backward=True)
        return wire.unpack_grad(rows, dout.shape[1], recipe), into

    def return_grads(
        self, dx: Tensor | None, dprobs: Tensor | None, route: Route, beside: bool
    ) -> Any:
        return route.carrier.start_sums([dprobs, dx], route.plan, route.sizes, beside)

    def receive_grads(self, returning: Any, route: Route) -> tuple[Tensor | None, Tensor | None]:
        # A slot's gradient is 0 but on the rank of its expert: the sum of dprobs is that one.
        dprobs, dx = route.carrier.finish_sums(returning, route.plan, route.sizes)
        return dx, dprobs

    # ---- for the operator (autograd/torch_op.py), which takes and gives tensors and numbers

    def op_sizes(self, tokens: int, hidden: int, slots: int, recipe: Any) -> list[int]:
        """Sizes of what the operator saves: of the plan by which rows go, the bytes of a row, the
        length of route_tensors' second; with a rank capacity, of the plan of what arrives."""
        exchange = self.exchange
        sizes = [*exchange.plan_sizes(tokens, slots), wire.row_bytes(hidden, slots, recipe)]
        if not exchange.segment:
            return [*sizes, 3 * exchange.ranks + 1]
        fixed = exchange.fixed(self.terms(0, slots, None, None))
        arrive = self.sizes_of(Route(None, fixed, None))  # type: ignore[arg-type]
        return [*sizes, 0, *arrive]

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
        """The plan's buffer and, without a rank capacity, the sizes."""
        sizes, buffer = route.sizes, route.plan.buffer
        if self.exchange.segment:
            return [buffer]
        begins = sizes.begins or [0] * self.exchange.ranks
        words = [*(sizes.sent or ()), *(sizes.received or ()), *begins, sizes.assignments]
        return [buffer, torch.tensor(words)]

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
        carrier = self.exchange.carrier(terms)
        if self.exchange.segment:
            return Route(plan, self.exchange.fixed(terms), carrier)
        words, ranks = tensors[1].tolist(), self.exchange.ranks
        sent, received, begins = words[:ranks], words[ranks : 2 * ranks], words[2 * ranks : -1]
        sizes = Sizes(terms, sent, received, sum(sent), sum(received), words[-1], begins)
        return Route(plan, sizes, carrier)
