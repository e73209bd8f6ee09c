"""MoE: a router, experts and an optional shared expert; takes the place of a transformer's MLP."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe_cutlass.autograd import Fp8Weights
from fp8moe_cutlass.autograd.arguments import check_tensor
from fp8moe_cutlass.nn._validate import (
    check_bool,
    check_device,
    check_dtype,
    check_leading,
    check_size,
    check_tokens,
)
from fp8moe_cutlass.nn.expert_block import in_shape
from fp8moe_cutlass.nn.experts import MoEExperts
from fp8moe_cutlass.nn.losses import Routing
from fp8moe_cutlass.nn.router import Router


class SharedExpert(nn.Module):
    """down (silu(gate x) * up x), the dense expert that every token passes.

    output_gate: each token's output times sigmoid(w x), w [1, H] learned (Qwen2-MoE, Qwen3-Next).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        output_gate: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            check_size("SharedExpert", name, size)
        check_bool("SharedExpert", "output_gate", output_gate)
        check_dtype("SharedExpert", dtype)
        check_device("SharedExpert", device)
        factory: Any = {"bias": False, "dtype": dtype, "device": device}
        self.hidden_size = hidden_size
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, **factory)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **factory)
        self.output_gate = nn.Linear(hidden_size, 1, **factory) if output_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        check_tensor("SharedExpert", "x", x)
        if not x.ndim or x.shape[-1] != self.hidden_size or not x.dtype.is_floating_point:
            raise ValueError(
                f"[SharedExpert] x must be [..., {self.hidden_size}] floating point; "
                f"got {tuple(x.shape)}, {x.dtype}"
            )
        x = x if torch.is_autocast_enabled(x.device.type) else x.to(self.gate_up_proj.weight.dtype)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out if self.output_gate is None else out * self.output_gate(x).sigmoid()


class MoE(nn.Module):
    """x [..., H] -> [..., H]: each token through the experts that the router chooses, weighted,
    plus the shared expert (any module from [T, H] to [T, H]) if there is one.

    A forward writes nothing on the module: losses that balance the load enter the gradients by
    `router.coefficients`, or are a caller's own, of what `moe(x, return_routing=True)` returns.

    Experts shared out by a group leave the router and the shared expert replicated: their gradients
    are of this rank's tokens and want averaging over the ranks. The router's losses and loads are
    of all ranks if the router has a group itself (Router(group=)), else of this rank's tokens.
    """

    def __init__(
        self, router: Router, experts: MoEExperts, shared_expert: nn.Module | None = None
    ) -> None:
        super().__init__()
        for name, given, kind, other in (
            ("router", router, "a Router", MoEExperts),
            ("experts", experts, "MoEExperts", Router),
        ):
            sizes = hasattr(given, "num_experts") and hasattr(given, "hidden_size")
            if isinstance(given, other) or not isinstance(given, nn.Module) or not sizes:
                raise ValueError(f"[MoE] {name} must be {kind}; got {type(given).__name__}")
        for name in ("hidden_size", "num_experts"):
            a, b = getattr(router, name), getattr(experts, name)
            if a != b:
                raise ValueError(f"[MoE] {name} must be that of the experts, {b}; got {a}")
        if not isinstance(shared_expert, nn.Module | None):
            raise ValueError(
                f"[MoE] shared_expert must be a module or None; got {type(shared_expert).__name__}"
            )
        width = getattr(shared_expert, "hidden_size", experts.hidden_size)
        if width != experts.hidden_size:
            raise ValueError(
                f"[MoE] shared_expert must have hidden_size {experts.hidden_size}; got {width}"
            )
        self.router = router
        self.experts = experts
        self.shared_expert = shared_expert

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        topk_idx: Tensor | None = None,
        padding: Tensor | None = None,
        route_padding: bool = True,
        return_routing: Literal[False] = False,
        weights: Fp8Weights | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        topk_idx: Tensor | None = None,
        padding: Tensor | None = None,
        route_padding: bool = True,
        return_routing: Literal[True],
        weights: Fp8Weights | None = None,
    ) -> tuple[Tensor, Routing]: ...

    def forward(
        self,
        x: Tensor,
        *,
        topk_idx: Tensor | None = None,
        padding: Tensor | None = None,
        route_padding: bool = True,
        return_routing: bool = False,
        weights: Fp8Weights | None = None,
    ) -> Tensor | tuple[Tensor, Routing]:
        """x [..., H] float -> [..., H] in x's dtype (under autocast: in the autocast dtype), or
        with return_routing (that, the Routing of the T tokens of x).

        topk_idx [..., top_k] and padding [...] bool, True for padding (attention_mask == 0), with
        x's leading sizes: as of Router.
        route_padding: False sends no row of padding to the experts, or to other ranks. Its output
        is the shared expert's, or zero, and nobody may read it.
        All of x's sizes but the last two count its sequences. weights: as of MoEExperts.
        """
        # Shapes that the reshapes would hide; the router and the experts check the rest.
        check_tokens("MoE", "x", x, self.experts.hidden_size, least=1)
        if topk_idx is not None:
            check_leading("MoE", "topk_idx", topk_idx, x, "top_k")
        if padding is not None:
            check_leading("MoE", "padding", padding, x)
        if route_padding is not True:
            check_bool("MoE", "route_padding", route_padding)
            if padding is None:
                raise ValueError(
                    "[MoE] padding (bool, True for padding) must be given with "
                    "route_padding=False; got None"
                )
        if return_routing is not False:
            check_bool("MoE", "return_routing", return_routing)
        tokens = x.reshape(-1, x.shape[-1])
        routing: Routing = self.router(
            tokens,
            topk_idx=None if topk_idx is None else topk_idx.reshape(-1, topk_idx.shape[-1]),
            padding=None if padding is None else padding.reshape(-1),
            sequences=max(math.prod(x.shape[:-2]), 1),
        )
        idx = routing.topk_idx
        if routing.padding is not None and not route_padding:
            idx = idx.masked_fill(routing.padding[:, None], -1)
        out: Tensor = self.experts(tokens, idx, routing.topk_weights, weights=weights)
        if self.shared_expert is not None:
            out = out + self.shared_expert(tokens).to(out.dtype)
        out = in_shape(out, x.shape)
        return (out, routing) if return_routing else out
