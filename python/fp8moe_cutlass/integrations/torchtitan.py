"""torchtitan: the routed experts of a model in FP8, by its override API.

    python -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b \\
        --override.imports fp8moe_cutlass.integrations.torchtitan.fp8moe_layer

fp8moe_experts: each GroupedExperts becomes Fp8GroupedExperts, over the same parameters: w1_EFD and
w3_EFD, gate and up, and w2_EDF. torchtitan moves the tokens and applies their scores.
fp8moe_layer: each RoutedExperts becomes Fp8RoutedExperts, which does that too, in FP8.
Checkpoints, optimizer states included, go either way. Written against torchtitan 0.3.0.
docs/how-to/torchtitan.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8moe_cutlass.autograd import Grouped, Local, Move, Options
from fp8moe_cutlass.autograd.arguments import check_options
from fp8moe_cutlass.autograd.torch_op import Owner, give_key, run
from fp8moe_cutlass.distributed import Exchange, GroupMove
from fp8moe_cutlass.nn._validate import check_sizes
from fp8moe_cutlass.ops._torch import compiling
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.slow_path import slow_path
from fp8moe_cutlass.tensor import TILE

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import (
        AllToAllTokenDispatcher,
        LocalTokenDispatcher,
    )
except ImportError as error:
    found = [d.version for d in metadata.distributions(name="torchtitan")] or ["none"]
    raise ImportError(
        "[torchtitan] must be torchtitan 0.3.0 or newer, with its `override` and GroupedExperts; "
        f"got {found[0]} ({error})"
    ) from error


__all__ = ["Fp8GroupedExperts", "Fp8RoutedExperts", "fp8moe_experts", "fp8moe_layer"]


class Fp8GroupedExperts(GroupedExperts):
    """torchtitan's GroupedExperts, its parameters and its forward's contract, in FP8."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        preactivation: str = "save"
        recipe: Fp8Recipe = Fp8Recipe()  # noqa: RUF009 (frozen)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_sizes(config.num_experts, config.dim, config.hidden_dim, 16)
        self._options = Options(config.recipe, config.preactivation, "save")
        check_options("MoEExperts", self._options)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Rows [R, D] in the order of the local experts, and how many each has -> [R, D]."""
        return self.run(x_RD, Grouped(num_tokens_per_expert_E))

    def run(self, x: Tensor, move: Move, *routing: Tensor, group: Any = None) -> Tensor:
        """The block over these parameters: x [R, D] or [T, D] by any `move`. routing: experts of
        each token [T, K] and their scores, f32. group: the owner of a GroupMove."""
        gate, up, down = (_local(w) for w in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
        beside: Tensor | None = up
        if gate.shape[1] % TILE:
            if not compiling():
                _say_copy(gate)
            gate, beside = torch.cat([gate, up], dim=1), None
        ids, scores = routing or (None, None)
        how: Any = {"owner": group, "up": beside}
        rows = x.bfloat16().contiguous()
        return run(rows, ids, scores, gate, down, self._options, move, **how).type_as(x)


class Fp8RoutedExperts(RoutedExperts):
    """torchtitan's RoutedExperts with Fp8GroupedExperts, which take the tokens to their experts and
    back themselves. With expert parallelism tokens and their gradients travel in FP8."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._group: _Group | None = None  # with expert parallelism

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Tokens [B, L, D], the scores and ids [B, L, K] of their experts -> [B, L, D]."""
        experts, group = self.inner_experts, self._group
        move = Local(experts.num_experts) if group is None else group._move
        ids, scores = (t.flatten(0, 1).contiguous() for t in (topk_expert_ids_BLK, topk_scores_BLK))
        out: Tensor = experts.run(x_BLD.flatten(0, 1), move, ids, scores.float(), group=group)
        return out.view(x_BLD.shape)

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            experts = self.inner_experts.num_experts
            self._group = _group(mesh.get_group(), experts, mesh.device_type)


class _Group(Owner):
    """Where an operator's forward and backward find the move."""

    gate_up_proj = down_proj = None

    def __init__(self, move: Move) -> None:
        self._move = move
        give_key(self)


@functools.cache
def _group(group: Any, num_experts: int, device: str) -> _Group:
    """One for all layers, which agree on their terms once."""
    return _Group(GroupMove(Exchange(group, num_experts, device=device)))


def _local(weight: Any) -> Tensor:
    """This rank's experts: with expert parallelism a parameter is a DTensor over its ranks."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _say_copy(gate: Tensor) -> None:
    slow_path(
        "gate beside up",
        "[Fp8GroupedExperts] gate and up are copied into one tensor in each forward, because the "
        f"intermediate size is no multiple of {TILE}; got {tuple(gate.shape)}, "
        f"{4 * gate.numel() * gate.element_size() / 2**20:.1f} MiB of memory traffic",
    )


@override(target=GroupedExperts.Config, description="Routed experts in FP8 (fp8moe-cutlass).")
def fp8moe_experts(cfg: Any, *, preactivation: str = "save", **recipe: Any) -> Any:
    """For `--override.imports`: the config of Fp8GroupedExperts in the place of GroupedExperts'.

    preactivation: as of nn.MoEExperts. recipe: arguments of Fp8Recipe. NotImplementedError for
    experts of another class, such as GPT-OSS's, which have biases, and those that torchtitan has
    converted to a format of its own.
    """
    return _experts("fp8moe_experts", cfg, preactivation, recipe)


@override(target=RoutedExperts.Config, description="Routed layer in FP8 (fp8moe-cutlass).")
def fp8moe_layer(cfg: Any, *, preactivation: str = "save", **recipe: Any) -> Any:
    """For `--override.imports`: the config of Fp8RoutedExperts in the place of RoutedExperts'. The
    arguments are fp8moe_experts'.

    NotImplementedError for what fp8moe_experts refuses, and for a dispatcher with a transport of
    its own, such as DeepEP's.
    """
    _refuse_other(
        "fp8moe_layer", cfg.token_dispatcher, LocalTokenDispatcher, AllToAllTokenDispatcher
    )
    experts = _experts("fp8moe_layer", cfg.inner_experts, preactivation, recipe)
    return derive(cfg, Fp8RoutedExperts.Config, inner_experts=experts)


def _experts(op: str, cfg: Any, preactivation: str, recipe: dict[str, Any]) -> Any:
    _refuse_other(op, cfg, GroupedExperts)
    return derive(
        cfg, Fp8GroupedExperts.Config, preactivation=preactivation, recipe=Fp8Recipe(**recipe)
    )


def _refuse_other(op: str, cfg: Any, *kinds: Any) -> None:
    if type(cfg) not in [kind.Config for kind in kinds]:
        names = " or ".join(kind.__name__ for kind in kinds)
        got = type(cfg).__qualname__.removesuffix(".Config")
        raise NotImplementedError(f"[{op}] takes torchtitan's {names}; got {got}")
