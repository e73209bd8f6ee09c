"""Checkpoints of FP8 experts by the keys of Megatron's own.

In megatron.core.dist_checkpointing SequentialMLP and TEGroupedMLP share their keys, one weight of
two dimensions per expert, gate and up apart: each of our parameters is a factory of those. Its
build takes the key it is given, which the transformer block and the optimizer change.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

_LINEARS = ("linear_fc1", "linear_fc2")


class Place(NamedTuple):
    """The place of a rank's experts among all."""

    rank: int  # in the expert-parallel group
    ranks: int  # of it
    replica: int  # the rank in the expert-data-parallel group


def sharded_state_dict(
    experts: Any, prefix: str, sharded_offsets: Any, metadata: Any
) -> dict[str, Any]:
    """The state of `experts` as Megatron saves and loads it. Its option singleton_local_shards, in
    metadata, puts the expert's number into the key."""
    single = bool((metadata or {}).get("singleton_local_shards", False))
    place, local = experts.place, experts.num_local_experts
    found: dict[str, Any] = {}
    for linear in _LINEARS:
        of = getattr(experts, linear)
        for e in range(local):
            at = place.rank * local + e
            shard = _Shard(at, place.ranks * local, single, tuple(sharded_offsets))
            for name, parameters in (("weight", of.weights), ("bias", of.biases)):
                for parameter in parameters[e : e + 1]:
                    found[f"{prefix}{linear}.{name}{e}"] = _factory(
                        f"{prefix}experts.{linear}.{name}",
                        parameter,
                        shard,
                        linear,
                        place.replica,
                        linear == "linear_fc1" and experts.activation.gated,
                    )
            # Theirs have one per linear, of nothing without FP8; strict loads look for it.
            found[f"{prefix}{linear}._extra_state{e}"] = make_sharded_object_for_checkpoint(
                None,
                shard.key(f"{prefix}experts.{linear}._extra_state", linear),
                shard.offsets,
                replica_id=(0, 0, place.replica),
            )
    return found


def translate(state_dict: dict[str, Any], prefix: str, experts: int) -> None:
    """Translates what load_state_dict was given: drops extra states; the weights of SequentialMLP
    (local_experts.0.linear_fc1.weight), by local expert, get our names."""
    for linear, name, e in itertools.product(_LINEARS, ("weight", "bias"), range(experts)):
        key = f"{prefix}local_experts.{e}.{linear}.{name}"
        if key in state_dict:
            state_dict[f"{prefix}{linear}.{name}{e}"] = state_dict.pop(key)
    for key in [k for k in state_dict if k.startswith(prefix) and "._extra_state" in k]:
        del state_dict[key]


class _Shard(NamedTuple):
    """The place of one expert among all."""

    expert: int
    experts: int
    single: bool
    outer: tuple[tuple[int, int, int], ...]  # offsets of the modules around

    @property
    def offsets(self) -> tuple[tuple[int, int, int], ...]:
        axis = (len(self.outer), self.expert, self.experts)
        return self.outer if self.single else (*self.outer, axis)

    def key(self, key: str, linear: str) -> str:
        """key, with the expert's number before `linear` where keys are single."""
        if not self.single:
            return key
        before, after = key.rsplit(linear, 1)
        return f"{before}{self.expert}.{linear}{after}"


def _factory(
    key: str, weight: Tensor, shard: _Shard, linear: str, replica: int, halves: bool
) -> ShardedTensorFactory:
    """Makes the factory of one expert's weight [N, K] or bias [N]; halves: [gate | up] along N,
    which Megatron saves apart. weight is the Parameter itself: the optimizer finds its states by
    it."""

    @torch.no_grad()
    def build(key: str, t: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        assert flattened_range is None
        return [
            ShardedTensor.from_rank_offsets(
                name, part, *offsets, replica_id=replica_id, prepend_axis_num=len(shard.offsets)
            )
            for name, part, offsets in _parts(shard.key(key, linear), t)
        ]

    def _parts(key: str, t: Tensor) -> list[tuple[str, Tensor, Any]]:
        if not halves:
            return [(key, t, shard.offsets)]
        gate, up = t.chunk(2)
        if shard.single:
            return [(f"{key}_w", gate, shard.offsets), (f"{key}_v", up, shard.offsets)]
        axis = len(shard.offsets)
        return [(key, t, (*shard.offsets, (axis, n, 2))) for n, t in enumerate((gate, up))]

    @torch.no_grad()
    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    return ShardedTensorFactory(key, weight, build, merge, (0, 0, replica))
