"""keep_together: Megatron's buffers never separate the experts of a projection."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class _Together:
    """Parameters of one projection, as Megatron's layout asks for sizes: as one."""

    shared_embedding = False

    def __init__(self, first: Any) -> None:
        self.members, self.data = [first], self

    def nelement(self) -> int:
        return sum(p.data.nelement() for p in self.members)


def keep_together() -> None:
    """From now on Megatron's distributed optimizer ends no bucket between the experts of a
    projection, as if they were one parameter, so that no padding comes between them. Call it before
    models are wrapped in DistributedDataParallel. Other parameters lie where they did.

    Where buckets end between experts (small ones, a data-parallel size with a factor 3,
    pad_buckets_for_high_nccl_busbw), weights and gradients are copied without it.
    """
    own: Any = DistributedOptimizer._compute_per_buffer_param_layout
    if hasattr(own, "keeps_together"):
        return

    def layout(params: list[Any], *args: Any, **kwargs: Any) -> Any:
        units: list[Any] = []
        for p in params:
            stack, last = getattr(p, "expert_stack", None), units[-1] if units else None
            if stack is None:
                units.append(p)
            elif isinstance(last, _Together) and last.members[0].expert_stack is stack:
                last.members.append(p)
            else:
                units.append(_Together(p))
        found = own(units, *args, **kwargs)
        places = {}
        for unit, (start, end, bucket) in found.param_index_map.items():
            if not isinstance(unit, _Together):
                places[unit] = (start, end, bucket)
                continue
            for p in reversed(unit.members):  # they come from the last expert to the first
                places[p] = (start, start + p.data.nelement(), bucket)
                start += p.data.nelement()
        found.param_index_map = places
        return found

    layout.keeps_together = True  # type: ignore[attr-defined]
    DistributedOptimizer._compute_per_buffer_param_layout = staticmethod(layout)
