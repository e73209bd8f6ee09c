"""MoE: router, experts and an optional shared expert; a drop-in for a transformer's MLP."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe_cutlass.autograd import Fp8Weights
from fp8moe_cutlass.nn.experts import MoEExperts
from fp8moe_cutlass.nn.router import Router
from fp8moe_cutlass.nn.rule import RoutingRule
from fp8moe_cutlass.recipe import Fp8Recipe


class SharedExpert(nn.Module):
    """down (silu(gate x) * up x), the dense expert every token passes."""

    def __init__(self, hidden_size: int, intermediate_size: int, **factory: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        x = x if torch.is_autocast_enabled(x.device.type) else x.to(self.gate_up_proj.weight.dtype)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class MoE(nn.Module):
    """x [..., H] -> [..., H]: each token through its top_k of num_experts experts, weighted.

    rule is Router's; expert options (recipe, preactivation, transposed_weights, delay_wgrad,
    group, capacity, bias, activation) are MoEExperts'.
    shared_intermediate_size adds a dense expert of that width in `dtype`. The gate is float32.

    After a forward, `aux_loss` holds the router's balancing loss (differentiable, unscaled) and
    `tokens_per_expert` [E] the load. Add a multiple of aux_loss to the training loss, or assign
    `router.coefficients`, with which backward adds the router's losses by itself; x's leading sizes
    are its sequences. Under torch.utils.checkpoint aux_loss takes use_reentrant=False: the
    reentrant kind runs the forward without a graph, and the loss is a constant.

    With a group the router and the shared expert are replicated: their gradients are of this rank's
    tokens and want averaging over the ranks; aux_loss and tokens_per_expert are of this rank's
    tokens too.
    """

    aux_loss: Tensor
    tokens_per_expert: Tensor

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        rule: RoutingRule = RoutingRule(),  # noqa: B008 (frozen)
        *,
        shared_intermediate_size: int | None = None,
        recipe: Fp8Recipe | None = Fp8Recipe(),  # noqa: B008 (frozen)
        preactivation: str = "save",
        transposed_weights: str = "save",
        delay_wgrad: bool = False,
        group: dist.ProcessGroup | None = None,
        capacity: int | tuple[int, int] | None = None,
        bias: bool = False,
        activation: str = "swiglu",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.router = Router(hidden_size, num_experts, top_k, rule, device=device)
        self.experts = MoEExperts(
            num_experts,
            hidden_size,
            intermediate_size,
            recipe=recipe,
            preactivation=preactivation,
            transposed_weights=transposed_weights,
            delay_wgrad=delay_wgrad,
            group=group,
            capacity=capacity,
            bias=bias,
            activation=activation,
            dtype=dtype,
            device=device,
        )
        self.shared_expert = (
            SharedExpert(hidden_size, shared_intermediate_size, dtype=dtype, device=device)
            if shared_intermediate_size
            else None
        )

    def forward(
        self, x: Tensor, *, weights: Fp8Weights | None = None, overwrite_main_grad: bool = False
    ) -> Tensor:
        """x [..., H] float -> [..., H] in x's dtype (under autocast: in the autocast dtype).
        weights, overwrite_main_grad: as of MoEExperts."""
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.router(tokens, sequences=max(math.prod(x.shape[:-2]), 1))
        self.aux_loss = self.router.balancing_loss(routing)
        self.tokens_per_expert = routing.tokens_per_expert
        out: Tensor = self.experts(
            *(tokens, routing.topk_idx, routing.topk_weights),
            weights=weights,
            overwrite_main_grad=overwrite_main_grad,
        )
        if self.shared_expert is not None:
            out = out + self.shared_expert(tokens).to(out.dtype)
        return out.view(x.shape)

    def quantize_weights(self) -> Fp8Weights:
        """MoEExperts.quantize_weights."""
        return self.experts.quantize_weights()

    def backward_dw(self) -> None:
        """MoEExperts.backward_dw."""
        self.experts.backward_dw()

    def check(self) -> None:
        """MoEExperts.check."""
        self.experts.check()

    def __getstate__(self) -> dict[str, Any]:
        # aux_loss hangs on a graph, which neither deepcopy nor pickle can follow.
        return {
            k: v for k, v in self.__dict__.items() if k not in ("aux_loss", "tokens_per_expert")
        }
