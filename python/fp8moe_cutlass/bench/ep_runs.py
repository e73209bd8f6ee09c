"""How bench --ep times a group of ranks: they begin together, and the slowest one counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe_cutlass import ops
from fp8moe_cutlass.distributed import Bf16Block, Fp8Block
from fp8moe_cutlass.distributed.exchange import Sizes
from fp8moe_cutlass.distributed.terms import Terms, recipe_word
from fp8moe_cutlass.nn import MoEExperts

from .layer_runs import Inputs, Runs
from .timing import Sample, event


class Team:
    """The ranks of `group`, on one device each."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.cuda = device.type == "cuda"

    def together(self) -> None:
        """All ranks are here, and their devices idle."""
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
        """Milliseconds of each run: `count` back to back, `rounds` times in turn with the others
        after one to warm up; of a round, the slowest rank's."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(rounds + 1):
            for name, run in runs.items():
                self.together()
                taken = self._time(run, count)
                if turn:
                    times[name].append(taken / count)
        samples = {}
        for name, mine in times.items():
            slowest = self.reduce(mine, dist.ReduceOp.MAX)
            samples[name] = Sample(statistics.median(slowest), slowest)
        return samples

    def _time(self, run: Callable[[], object], count: int) -> float:
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(count):
                run()
            return 1e3 * (time.perf_counter() - start)
        before, after = event(), event()
        before.record()
        for _ in range(count):
            run()
        after.record()
        torch.cuda.synchronize(self.device)
        return float(before.elapsed_time(after))


class Legs:
    """The exchanges of a layer's step by themselves: calls for each, and what they send.

    Sizes are known, as they are in a backward; `sizes_again` finds them out as a forward does.
    """

    def __init__(self, layer: MoEExperts, inputs: Inputs) -> None:
        exchange = layer._exchange
        assert exchange is not None
        assert layer.recipe is not None
        self.exchange, self.inputs, self.layer = exchange, inputs, layer
        self.hidden, self.slots = layer.hidden_size, inputs.topk_idx.shape[1]
        self.probs = inputs.probs.detach()
        self.x = inputs.x.detach()
        self.block = Fp8Block(layer.fp8_weights(), layer.recipe)
        self.bf16_block = Bf16Block(layer.gate_up_proj, layer.down_proj)
        self.terms = Terms(
            exchange.num_experts,
            self.hidden,
            self.slots,
            exchange.segment,
            recipe_word(layer.recipe),
            *(False,) * 3,
        )
        self.plan, self.sizes = self.sizes_again()
        self.packed = self.pack()
        self.got = exchange.dispatch(self.packed, self.sizes)
        rows = torch.randn(self.sizes.rows, self.hidden, device=self.x.device)
        self.partial = rows.bfloat16()
        self.bf16_plan, _ = self.bf16_block.plan(inputs.topk_idx, exchange)

    def sizes_again(self) -> tuple[Any, Sizes]:
        """The plan, and in exact mode the exchange of the sizes, read by the host."""
        plan, counts = self.block.plan(self.inputs.topk_idx, self.exchange)
        return plan, self.exchange.announce(counts, self.terms)()

    def pack(self) -> Tensor:
        packed: Tensor = ops.quantize_pack(
            self.x,
            self.plan,
            self.inputs.topk_idx,
            self.probs,
            num_experts=self.exchange.num_experts,
        )
        return packed

    def dispatch(self) -> None:
        """Quantize and pack, send, unpack."""
        rows = self.exchange.dispatch(self.pack(), self.sizes)
        ops.unpack(rows, self.hidden, self.slots)

    def dispatch_gradient(self) -> None:
        packed = ops.quantize_pack(self.x, self.plan)
        ops.unpack(self.exchange.dispatch(packed, self.sizes), self.hidden, 0)

    def dispatch_bf16(self) -> None:
        """The same in bfloat16: gather the rows, send."""
        plan, exchange, topk_idx = self.bf16_plan, self.exchange, self.inputs.topk_idx
        packed = self.bf16_block.pack(
            self.x, self.probs, topk_idx, plan, exchange, lambda: self.sizes
        )
        exchange.dispatch(packed, self.sizes)

    def combine(self) -> None:
        """Send the partial sums back, and add them."""
        back = self.exchange.give_back(self.partial, self.plan.rows, self.sizes)
        ops.unpermute_unpad(back, self.plan)

    def bare(self, width: int) -> Callable[[], object]:
        """The all-to-all alone, of rows of `width` bytes."""
        rows = torch.zeros(self.sizes.rows_sent, width, dtype=torch.uint8, device=self.x.device)
        return lambda: self.exchange.dispatch(rows, self.sizes)

    def bare_back(self, width: int) -> Callable[[], object]:
        """The all-to-all alone, back."""
        rows = torch.zeros(self.sizes.rows, width, dtype=torch.uint8, device=self.x.device)
        return lambda: self.exchange.give_back(rows, self.plan.rows, self.sizes)

    def rows_to_others(self) -> int:
        """Rows this rank sends to other ranks; with a capacity, the fixed number."""
        if self.sizes.sent is None:
            return self.exchange.segment * (self.exchange.ranks - 1)
        return sum(self.sizes.sent) - self.sizes.sent[self.exchange._rank]

    def copies_to_others(self) -> int:
        """The same if a token travelled once for each of its experts."""
        ids = self.inputs.topk_idx
        mine = self.exchange.local_experts
        return int(((ids >= 0) & ((ids < mine.start) | (ids >= mine.stop))).sum())


class Bf16Peer(nn.Module):
    """The layer in bfloat16 torch with the same exchange, over the same parameters."""

    def __init__(self, layer: MoEExperts, capacity: Any) -> None:
        super().__init__()
        e, h, i = layer.num_experts, layer.hidden_size, layer.intermediate_size
        self.experts = MoEExperts(
            e, h, i, recipe=None, group=layer.group, capacity=capacity, device="meta"
        )
        self.experts.gate_up_proj, self.experts.down_proj = layer.gate_up_proj, layer.down_proj

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor) -> Tensor:
        out: Tensor = self.experts(x, topk_idx, probs)
        return out
