"""The move of a block whose experts are shared by the ranks of a group (autograd/block.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd.block import Arrived, body_of
from fp8moe_cutlass.autograd.body import Need
from fp8moe_cutlass.distributed import wire
from fp8moe_cutlass.distributed.exchange import Exchange, Sizes
from fp8moe_cutlass.distributed.rank_agreement import Terms, recipe_word
from fp8moe_cutlass.routing import RoutingPlan


class Route(NamedTuple):
    """How the rows of one forward went."""

    plan: RoutingPlan  # ops.dispatch_plan's: a row per (token, rank)
    sizes: Sizes


@dataclass(frozen=True)
class GroupMove:
    """Tokens travel to the ranks of their experts, sums of a rank's experts come back. Every
    method is collective."""

    exchange: Exchange
    collective = True

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, probs: Tensor, recipe: Any, need: Need | None
    ) -> Callable[[], Arrived]:
        exchange = self.exchange
        hidden, slots = x.shape[1], topk_idx.shape[1]
        wanted = need or Need(False, False, False, False)
        terms = Terms(
            exchange.num_experts,
            hidden,
            slots,
            exchange.segment,
            recipe_word(recipe),
            wanted.x,
            wanted.probs,
            wanted.gate_up or wanted.down,
        )
        plan, counts = exchange.plan(topk_idx)
        learn = exchange.start_sizes(counts, terms)
        # Into as many rows as there can be: the sizes are on their way meanwhile.
        packed = wire.pack(x, topk_idx, probs, plan, recipe, exchange.num_experts)

        def arrive() -> Arrived:
            sizes, mine = learn(), exchange.local_experts
            came = exchange.dispatch(packed, sizes)
            rows, ids, row_probs = wire.unpack(came, hidden, slots, recipe, mine)
            differ = exchange.compare(came, sizes)
            if differ is not None:  # what would be misread is left out
                ids.view(exchange.ranks, -1).masked_fill_(differ, -1)
            body = body_of(recipe)
            local = body.group(ids, len(mine), sizes.assignments)
            exchange.count(plan.status[:2], body.dropped(ids, local))
            return Arrived(rows, row_probs, local, Route(plan, sizes))

        return arrive

    def combine(self, out: Tensor, route: Route) -> Tensor:
        return _sums(self.exchange.combine(out, route.plan.rows, route.sizes), route.plan)

    def dispatch_grad(self, dout: Tensor, route: Route, recipe: Any) -> Any:
        packed = wire.pack_grad(dout, route.plan, recipe)
        rows = self.exchange.dispatch(packed, route.sizes, backward=True)
        self.exchange.compare(rows, route.sizes, backward=True)
        return wire.unpack_grad(rows, dout.shape[1], recipe)

    def combine_grads(
        self, dx: Tensor | None, dprobs: Tensor | None, route: Route
    ) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
        start, plan, sizes = self.exchange.start_back, route.plan, route.sizes
        coming_dprobs = None if dprobs is None else start(dprobs, plan.rows, sizes)
        coming_dx = None if dx is None else start(dx, plan.rows, sizes)

        def arrive() -> tuple[Tensor | None, Tensor | None]:
            dprobs = None
            if coming_dprobs is not None:
                # A slot's gradient is 0 but on the rank of its expert: their sum is that one.
                rows = coming_dprobs()
                slots = rows.shape[1]
                dprobs = _sums(F.pad(rows, (0, -slots % 16)), plan)[:, :slots]
            return None if coming_dx is None else _sums(coming_dx(), plan), dprobs

        return arrive


def _sums(rows: Tensor, plan: RoutingPlan) -> Tensor:
    """The sum of each token's rows [plan.rows, C] that came back; C a multiple of 16."""
    out: Tensor = ops.unpermute_unpad(rows, plan)
    return out
