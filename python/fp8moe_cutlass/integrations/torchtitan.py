"""torchtitan: the routed experts of a model in FP8, by its override API.

    python -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b \\
        --override.imports fp8moe_cutlass.integrations.torchtitan.fp8moe_experts

Each GroupedExperts becomes Fp8GroupedExperts, over the same parameters: w1_EFD and w3_EFD, gate and
up, and w2_EDF. Checkpoints, optimizer states included, go either way. torchtitan moves the tokens
and applies their scores. Written against torchtitan 0.3.0. docs/how-to/torchtitan.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8moe_cutlass.autograd import Local, Options
from fp8moe_cutlass.autograd.weights import of_halves
from fp8moe_cutlass.nn._validate import check_options, check_sizes
from fp8moe_cutlass.nn.expert_block import ExpertBlock
from fp8moe_cutlass.ops._torch import compiling
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.slow_path import slow_path
from fp8moe_cutlass.tensor import TILE

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import GroupedExperts
except ImportError as error:
    found = [d.version for d in metadata.distributions(name="torchtitan")] or ["none"]
    raise ImportError(
        "[torchtitan] must be torchtitan 0.3.0 or newer, with its `override` and GroupedExperts; "
        f"got {found[0]} ({error})"
    ) from error


class Fp8GroupedExperts(GroupedExperts):
    """torchtitan's GroupedExperts, its parameters and its forward's contract, in FP8."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        preactivation: str = "save"
        recipe: Fp8Recipe = Fp8Recipe()  # noqa: RUF009 (frozen)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_sizes(config.num_experts, config.dim, config.hidden_dim, 16)
        check_options(config.recipe, config.preactivation, "save", torch.bfloat16)
        self._options = Options(config.recipe, config.preactivation, "save")

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Rows [R, D] in the order of the local experts, and how many each has -> [R, D]."""
        gate, up, down = (_local(w) for w in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
        weights = None
        if compiling() or gate.shape[1] % TILE:
            if not compiling():
                _say_copy(gate)
            gate_up = torch.cat([gate, up], dim=1)
        else:
            trains = torch.is_grad_enabled() and (x_RD.requires_grad or gate.requires_grad)
            weights = of_halves(gate, up, down, self._options.recipe, transposed=trains)
            halves: list[Tensor] = []
            gate_up = _Both.apply(gate, up, halves)  # type: ignore[no-untyped-call]
            gate_up.halves = halves
        block = _Block(gate_up, down, self._options)
        rows = block.forward_rows(x_RD.bfloat16(), num_tokens_per_expert_E, weights=weights)
        return rows.type_as(x_RD)


class _Block(ExpertBlock):
    """Over the tensors of one forward."""

    def __init__(self, gate_up: Tensor, down: Tensor, options: Options) -> None:
        self.gate_up_proj, self.down_proj, self._options = gate_up, down, options
        self._move = Local(gate_up.shape[0])


class _Both(torch.autograd.Function):
    """Gate and up [E, F, D] as one tensor [E, 2F, D] to autograd, of one element in memory. Their
    gradients come in `halves`, past autograd, each in memory of its own; but as one tensor where
    something watches, such as selective activation checkpointing, and the block is an operator."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, halves: list[Tensor]) -> Tensor:
        ctx.halves = halves
        ctx.set_materialize_grads(False)
        experts, width, hidden = gate.shape
        return gate.new_empty(()).expand(experts, 2 * width, hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is not None:
            return *grad.chunk(2, dim=1), None
        gate, up = ctx.halves or (None, None)  # None: weights that are frozen now
        ctx.halves.clear()
        return gate, up, None


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
    if type(cfg) is not GroupedExperts.Config:
        raise NotImplementedError(
            "[fp8moe_experts] takes torchtitan's GroupedExperts; got "
            f"{type(cfg).__qualname__.removesuffix('.Config')}"
        )
    return derive(
        cfg, Fp8GroupedExperts.Config, preactivation=preactivation, recipe=Fp8Recipe(**recipe)
    )
