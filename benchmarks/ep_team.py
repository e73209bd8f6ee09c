"""The ranks of ep*.py: how a group is timed, and the exchanges of a step one by one."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contender import Inputs
from fp8moe_cutlass import ops
from fp8moe_cutlass.distributed.rank_agreement import Terms, recipe_word
from fp8moe_cutlass.nn import MoEExperts
from timing import Run, Runs, Sample, back_to_back, capture, warm_up


class Team:
    """The ranks of `group`, one device each. They begin together, and the slowest one counts."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.cuda = device.type == "cuda"

    def together(self) -> None:
        """Return when all ranks are here and their devices are idle."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        dist.barrier(self.group)

    def reduce(self, values: list[float], how: Any = dist.ReduceOp.SUM) -> list[float]:
        """Element by element over the ranks."""
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, how, group=self.group)
        return [float(v) for v in found.tolist()]

    def mean(self, value: float) -> float:
        return self.reduce([value])[0] / self.size

    def measure(self, runs: Runs, count: int, rounds: int) -> dict[str, Sample]:
        """`count` calls of each run back to back, in turn with the other runs: one round to warm
        up, then `rounds`. A round's time is the slowest rank's."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(rounds + 1):
            for name, run in runs.items():
                self.together()
                taken, _ = back_to_back(run, count, self.cuda)
                if turn:
                    times[name].append(sum(taken) / count)
        samples = {}
        for name, mine in times.items():
            slowest = self.reduce(mine, dist.ReduceOp.MAX)
            samples[name] = Sample(statistics.median(slowest), slowest)
        return samples

    def replayed(self, runs: Runs, count: int, rounds: int) -> dict[str, Sample]:
        """`measure` of one call in `count` that are captured as one graph."""
        graphs: Runs = {name: self._graph(run, count) for name, run in runs.items()}
        found = self.measure(graphs, 2, rounds)
        return {n: Sample(s.ms / count, [t / count for t in s.times]) for n, s in found.items()}

    def _graph(self, run: Run, count: int) -> Run:
        def runs() -> None:
            for _ in range(count):
                run()

        warm_up(run)
        self.together()
        return capture(runs)


class Legs:
    """The exchanges of a layer's step, each by itself, with sizes that are known."""

    def __init__(self, layer: MoEExperts, inputs: Inputs) -> None:
        assert layer._exchange is not None
        self.exchange, self.topk_idx = layer._exchange, inputs.topk_idx
        self.hidden, self.slots = layer.hidden_size, inputs.topk_idx.shape[1]
        self.x, self.probs = inputs.x.detach(), inputs.probs.detach()
        terms = Terms(
            self.exchange.num_experts,
            self.hidden,
            self.slots,
            self.exchange.segment,
            recipe_word(layer.recipe),
            *(False,) * 3,
        )
        self.plan, counts = self.exchange.plan(self.topk_idx)
        with self.exchange.begin(terms, self.x.device):
            announced = self.exchange.announce(counts, terms)
        self.carrier: Any = self.exchange.carrier(terms)
        self.sizes = self.exchange.sizes(announced, terms, self.carrier)
        self.collectives: Any = self.exchange._collectives
        capacity = self.exchange.segment > 0
        self.mark = self.exchange.mark(terms, self.x.device) if capacity else None
        self.partial = torch.randn(self.sizes.rows, self.hidden, device=self.x.device).bfloat16()

    def dispatch(self) -> None:
        """Quantize and pack, send, unpack."""
        ids, experts = (self.topk_idx, self.probs), self.exchange.num_experts
        with self.carrier.begin():
            place = self.carrier.place(self.sizes.terms)
            packed = ops.quantize_pack(self.x, self.plan, *ids, num_experts=experts, **_at(place))
        rows, _ = self.carrier.dispatch(packed, self.sizes, self.mark)
        ops.unpack(rows, self.hidden, self.slots)

    def dispatch_gradient(self) -> None:
        with self.carrier.begin():
            place = self.carrier.place_of_grad(self.sizes)
            packed = ops.quantize_pack(self.x, self.plan, **_at(place))
        rows, _ = self.carrier.dispatch_grad(packed, self.sizes, self.mark)
        ops.unpack(rows, self.hidden, 0)

    def combine(self) -> None:
        """Send the partial sums back, and add them."""
        into = self.carrier.into(self.sizes)  # where the body would have written them
        rows = self.partial if into is None else into
        going = self.carrier.start_sums([rows], self.plan, self.sizes, beside=False)
        self.carrier.finish_sums(going, self.plan, self.sizes)

    def bare(self, width: int) -> Run:
        """The all-to-all alone, of rows of `width` bytes."""
        rows = torch.zeros(self.sizes.rows_sent, width, dtype=torch.uint8, device=self.x.device)
        return lambda: self.collectives.dispatch(rows, self.sizes, self.mark)

    def bare_back(self, width: int) -> Run:
        """The all-to-all alone, back."""
        rows = torch.zeros(self.sizes.rows, width, dtype=torch.uint8, device=self.x.device)
        return lambda: self.collectives.start_sums([rows], self.plan, self.sizes, False)

    def rows_to_others(self) -> int:
        """Rows this rank sends to other ranks; with a rank capacity, the fixed number, but
        for those of the terms."""
        if self.sizes.sent is None:
            return self.exchange.segment * (self.exchange.ranks - 1)
        return int(sum(self.sizes.sent) - self.sizes.sent[dist.get_rank(self.exchange.group)])


def _at(place: Any) -> dict[str, Any]:
    """Where quantize_pack is to store."""
    return {} if place is None else {"peers": place.peers, "first": place.first, "out": place.rows}


class Bf16Layer(nn.Module):
    """The layer in bf16 torch with the same exchange and parameters. On a GPU torch.compile fuses
    what it can, as in layer.py."""

    def __init__(self, layer: MoEExperts) -> None:
        super().__init__()
        sizes = layer.num_experts, layer.hidden_size, layer.intermediate_size
        options: Any = {"group": layer.group, "transport": "nccl", "device": "meta"}
        self.experts = MoEExperts(*sizes, recipe=None, **options)
        self.experts.gate_up_proj, self.experts.down_proj = layer.gate_up_proj, layer.down_proj

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor) -> Tensor:
        out: Tensor = self.experts(x, topk_idx, probs)
        return out
