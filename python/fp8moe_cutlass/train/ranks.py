"""One run by one process, or by the ranks of torch.distributed: what differs.

Every rank holds the whole model but the experts, of which it holds its share; it gets its part of
each batch, and a loss that is its share of the batch's mean. So gradients of what is replicated are
summed over the ranks, and those of the experts, which have seen all tokens, are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe_cutlass.nn import MoEExperts, clip_grad_norm_

State = dict[str, Any]


class Alone:
    """One process: the parts are wholes."""

    group: Any = None
    size = 1
    rank = 0

    def part(self, windows: Tensor) -> Tensor:
        """This rank's part of the batch [B, ...]; may be empty."""
        return windows

    def total(self, value: Tensor) -> Tensor:
        """The sum of the ranks' values, on every rank."""
        return value

    def any(self, *flags: bool) -> list[bool]:
        """Of each flag, whether a rank has it: what all ranks do or none."""
        return list(flags)

    def clip(self, model: nn.Module, limit: float) -> None:
        """Complete the gradients, and scale them to a norm of at most `limit`."""
        clip_grad_norm_(model.parameters(), limit)

    def whole(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Both state_dicts, as one process has them. Collective."""
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
        """The inverse of `whole`, for any number of ranks."""
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class Ranks(Alone):
    """The processes of `group` (None: all), which share every MoEExperts of the model."""

    def __init__(self, group: Any = None) -> None:
        self.group = group or dist.group.WORLD
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)

    def part(self, windows: Tensor) -> Tensor:
        return windows.tensor_split(self.size)[self.rank]

    def total(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value

    def any(self, *flags: bool) -> list[bool]:
        # On the CPU, which the group must serve too: no rank waits for its GPU.
        found = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in found.tolist()]

    def clip(self, model: nn.Module, limit: float) -> None:
        shared = experts_of(model)
        replicated = [p for p in model.parameters() if p not in shared]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in replicated]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=self.group)
        summed = torch.split(flat, [p.numel() for p in replicated])
        for p, g in zip(replicated, summed, strict=True):
            p.grad = g.view_as(p)
        super().clip(model, limit)

    def whole(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
        return self._map(model, optimizer, super().whole(model, optimizer), self._join)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
        super().load(model, optimizer, self._map(model, optimizer, state, self._share))

    def _join(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts)

    def _share(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.size)[self.rank].clone()

    def _map(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: State,
        change: Callable[[Tensor], Tensor],
    ) -> State:
        """The state with every tensor of the experts, [E, ...], changed."""
        shared = experts_of(model)
        names = {name for name, p in model.named_parameters() if p in shared}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = dict(state["optimizer"]["state"])
        for index, p in enumerate(parameters):
            if p in shared and index in moments:
                moments[index] = {
                    k: change(v) if v.ndim == p.ndim else v for k, v in moments[index].items()
                }
        return {
            "model": {k: change(v) if k in names else v for k, v in state["model"].items()},
            "optimizer": {**state["optimizer"], "state": moments},
        }


def experts_of(model: nn.Module) -> set[nn.Parameter]:
    """The parameters the ranks share out: those of every MoEExperts."""
    layers = [m for m in model.modules() if isinstance(m, MoEExperts)]
    return {p for layer in layers for p in layer.parameters()}
