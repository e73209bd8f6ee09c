"""clip_grad_norm_ by the norm of a model that no rank holds whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe_cutlass.distributed.shards import is_sharded, whole
from fp8moe_cutlass.nn.experts import layers


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_, with its arguments, for parameters of any kind at once: plain
    tensors, which every rank holds; the shares of layers made with group=, plain or split by
    fully_shard over other ranks; and DTensors of any meshes. Returns the norm of the whole model's
    gradient, a plain tensor, the same on every rank. Collective where there are shares or DTensors:
    all ranks must have the same gradients.

    Plain tensors that every rank holds must have their gradients of the whole batch already.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm_type, groups = float(norm_type), _groups_of_shares()
    kinds: dict[Any, list[Tensor]] = {}
    for n, p in enumerate(given):
        if p.grad is not None:
            # torch's norm of type 0 counts the tensors that are not 0: each is a kind of its own.
            kind = (getattr(p, "device_mesh", None), groups.get(p), n if norm_type == 0 else None)
            kinds.setdefault(kind, []).append(p)
    if all(mesh is None and group is None for mesh, group, _ in kinds):
        return nn.utils.clip_grad_norm_(
            given or parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
    norms = []
    for (_, group, _), of_a_kind in kinds.items():
        grads: Any = [p.grad for p in of_a_kind]
        norm: Any = nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
        norm = whole(norm)
        norms.append(norm if group is None else _over(group, norm, norm_type))
    total = nn.utils.get_total_norm(norms, norm_type, error_if_nonfinite, foreach)
    for of_a_kind in kinds.values():
        nn.utils.clip_grads_with_norm_(of_a_kind, max_norm, total, foreach)
    return total


def _groups_of_shares() -> dict[Tensor, dist.ProcessGroup]:
    """The group of each parameter of which every rank of a group holds a share: a plain one, or one
    that fully_shard has split over other ranks. A DTensor of shard_experts' is the whole."""
    return {
        p: m.group
        for m in layers
        if m.group is not None
        for p in m.parameters()
        if m._average is None or not is_sharded(p)
    }


def _over(group: dist.ProcessGroup, norm: Tensor, norm_type: float) -> Tensor:
    """The norm of what the ranks of a group hold, of which each one's norm is given."""
    each = norm.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(each, norm.view(1), group=group)
    of_all: Tensor = torch.linalg.vector_norm(each, norm_type)
    return of_all
