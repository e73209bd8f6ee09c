"""A Megatron MoE layer whose tokens travel in FP8."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor

from fp8moe_cutlass.integrations.megatron import flags
from fp8moe_cutlass.integrations.megatron.experts import Experts
from fp8moe_cutlass.nn import MoEExperts


class TokenExperts(Experts):
    """The experts of MoELayer below: tokens [T, H] with the experts they go to come in, sums
    [T, H] go out. With expert parallelism tokens travel to the ranks of their experts in FP8."""

    def __init__(
        self, num_local_experts: int, config: Any, /, *, pg_collection: Any, **options: Any
    ) -> None:
        super().__init__(
            num_local_experts,
            config,
            pg_collection=pg_collection,
            group=pg_collection.ep if pg_collection.ep.size() > 1 else None,
            **options,
        )

    def forward(  # type: ignore[override]
        self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor
    ) -> Tensor:
        weights = self.kept_weights()
        out = MoEExperts.forward(self, tokens, topk_idx, topk_weights, weights=weights)
        self.is_first_microbatch = False
        return out


class MoELayer(moe_layer.MoELayer):
    """Megatron's MoELayer with its router, all losses of it, and its shared expert; dispatch,
    experts and combine are this library's. An overlapped shared expert runs before them.

    NotImplementedError names the options of config that cannot be honoured.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        if pg_collection is None:
            pg_collection = get_default_pg_collection()
        flags.check(config, pg_collection, name, layer=True)
        if config.moe_shared_expert_overlap:
            submodules = _not_overlapped(submodules)
        super().__init__(config, submodules, layer_number, pg_collection, is_mtp_layer, name)
        self.shared_expert_overlap = False

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """(hidden_states, (experts of each token [T, k], -1 for none, and their probs))."""
        k = self.config.moe_router_topk
        # By probability: what pads an expert to its capacity is in the map with probability 0.
        chosen = probs.detach().masked_fill(~routing_map, -1.0).topk(k, dim=1)
        idx = chosen.indices.masked_fill(chosen.values < 0, -1)
        return hidden_states, (idx, probs.gather(1, chosen.indices))

    def dispatch(self, hidden_states: Tensor, probs: Any) -> Any:
        return hidden_states, probs

    def routed_experts_compute(self, hidden_states: Tensor, probs: Any) -> tuple[Tensor, None]:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        out: Tensor = self.experts(tokens, *probs)
        return out.view(hidden_states.shape), None

    def combine(self, output: Tensor) -> Tensor:
        return output

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        return output if shared_expert_output is None else output + shared_expert_output


def _not_overlapped(submodules: Any) -> Any:
    """`submodules` whose shared expert communicates itself: an overlapped one leaves that to
    Megatron's dispatcher."""

    def build(*, config: Any, **how: Any) -> Any:
        own = copy.copy(config)
        own.moe_shared_expert_overlap = False
        return submodules.shared_experts(config=own, **how)

    return dataclasses.replace(submodules, shared_experts=build)
