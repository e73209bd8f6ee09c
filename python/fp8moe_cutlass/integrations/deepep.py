"""The experts between DeepEP's dispatch and combine: no cast, forward or backward.

    out = deepep.experts(layer, buffer, x, topk_idx, topk_weights, num_experts=256)

buffer: deep_ep.Buffer (its normal kernels) or deep_ep.ElasticBuffer. layer: nn.MoEExperts of this
rank's experts alone, with an FP8 recipe. x is quantized once and dispatched in FP8; what arrives,
codes and row scales, goes as it is through `route` and `permute_pad` into the GEMMs; the partial
sums of this rank go to combine in bf16. Backward: the gradient of the output is quantized once and
dispatched by the handle; dx rows in bf16 and the gradients of the weights go to combine.

Code that calls DeepEP itself, for its events and hooks, uses the pieces: `received`,
`received_expanded` and `received_low_latency` take what its three forms of dispatch return, and
`forward` and `backward` give what combine and the backward's combine want.

DeepEP moves float8_e4m3fn with float32 scales [tokens, H / 128]: H is a multiple of 128, the recipe
e4m3 in both directions. Routing weights are applied here, before the second GEMM, as combine adds
without weights; low-latency combine applies them itself, so there they are left to it.

Written from DeepEP's public documentation: README, docs/legacy.md, the docstrings of Buffer and
ElasticBuffer and what its tests expect, as of July 2026. Tested on the CPU against a stand-in that
keeps that contract. Not run: DeepEP itself, in any mode, and this file on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass.autograd import Fp8Weights, fp8
from fp8moe_cutlass.autograd.ctx_io import load, save
from fp8moe_cutlass.autograd.experts import needs_grad, quantize
from fp8moe_cutlass.autograd.no_double_backward import once_differentiable
from fp8moe_cutlass.autograd.weight_grad import WeightGrads
from fp8moe_cutlass.integrations.deepep_rows import (
    Pair,
    Received,
    fp8_rows,
    received,
    received_expanded,
    received_low_latency,
)
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor

__all__ = [
    "Received",
    "backward",
    "experts",
    "forward",
    "received",
    "received_expanded",
    "received_low_latency",
]


def forward(
    layer: MoEExperts, weights: Fp8Weights, rows: Received, *, keep: str = "none"
) -> tuple[Tensor, fp8.Activations]:
    """This rank's partial sums [R, H] bf16, what combine takes, and what `backward` needs.

    weights: layer.quantize_weights(). keep: as of autograd.fp8.forward; "none" computes the
    pre-activation again in backward.
    """
    recipe = _recipe(layer)
    weights.wait()
    return fp8.forward(rows.x, rows.probs, rows.plan, weights, recipe, keep=keep)


def backward(
    layer: MoEExperts,
    weights: Fp8Weights,
    saved: fp8.Activations,
    plan: RoutingPlan,
    grad: Pair,
    *,
    pow2: bool = True,
) -> fp8.Gradients:
    """Gradients from what the dispatch of the quantized gradient (same handle) returned, by the
    forward's weights.

    dx [R, H] bf16 and dprobs [R, S] f32 are what the backward's combine takes as x and
    topk_weights; gate_up and down are this rank's weight gradients, still to be run.
    """
    dout = fp8_rows("backward", grad, pow2)
    weights.wait()
    return fp8.backward(dout, saved, plan, weights, _recipe(layer))


def experts(
    layer: MoEExperts,
    buffer: Any,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    weights: Fp8Weights | None = None,
    overwrite_main_grad: bool = False,
    dispatch: Mapping[str, Any] | None = None,
    combine: Mapping[str, Any] | None = None,
) -> Tensor:
    """out [T, H] in x's dtype: dispatch, this rank's experts, combine; differentiable in x,
    topk_weights and the layer's parameters. Every rank calls it, in the same order.

    x [T, H] float, topk_idx [T, S] of deep_ep.topk_idx_t (-1: none) over all num_experts,
    topk_weights [T, S] f32. dispatch, combine: further arguments of the buffer's methods (config,
    num_sms, expert_alignment, num_worst_tokens, ...); not those of events: all runs in the order of
    the current stream. weights, overwrite_main_grad: as of MoEExperts.
    """
    recipe = _recipe(layer)
    if num_experts % layer.num_experts:
        raise ValueError(
            f"[deepep.experts] num_experts must be a multiple of the layer's {layer.num_experts}; "
            f"got {num_experts}"
        )
    gate_up, down = layer.gate_up_proj, layer.down_proj
    weights, grads = layer.prepare(gate_up, down, weights, overwrite_main_grad)
    transport = _Transport(buffer, num_experts, dict(dispatch or {}), dict(combine or {}))
    probs = topk_weights.float()
    out: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        x,
        probs,
        gate_up,
        down,
        needs_grad(x, probs, gate_up, down),
        topk_idx,
        transport,
        layer,
        recipe,
        weights,
        grads,
    )
    return out


def _recipe(layer: MoEExperts) -> Fp8Recipe:
    recipe = layer.recipe
    if recipe is None or recipe.grad_dtype != "e4m3":
        raise ValueError(
            f"[deepep] the layer's recipe must be FP8, e4m3 in both directions; got {recipe}"
        )
    if layer.group is not None:
        raise ValueError(
            "[deepep] the layer must hold this rank's experts alone, DeepEP moves the tokens; got "
            "one with a group"
        )
    return recipe


@dataclass(frozen=True)
class _Transport:
    """The two generations of buffers under one pair of calls."""

    buffer: Any
    num_experts: int
    dispatch_options: dict[str, Any]
    combine_options: dict[str, Any]

    def dispatch(self, x: Fp8Tensor, topk_idx: Tensor, weights: Tensor, local: int) -> Any:
        """(Received, handle)."""
        given: dict[str, Any] = {"topk_idx": topk_idx, "topk_weights": weights}
        given |= self.dispatch_options
        if getattr(self.buffer, "get_dispatch_layout", None) is not None:
            per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
                topk_idx, self.num_experts
            )
            data, ids, probs, counts, handle, _ = self.buffer.dispatch(
                (x.data, x.scale_inv),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                **given,
            )
            return received(data, ids, probs, local, counts=counts, pow2=x.pow2), handle
        data, ids, probs, handle, _ = self.buffer.dispatch(
            (x.data, x.scale_inv), num_experts=self.num_experts, **given
        )
        counts = handle.num_recv_tokens_per_expert_list or ()
        rows = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        return received(data, ids, probs, local, counts=counts, rows=rows, pow2=x.pow2), handle

    def dispatch_again(self, x: Fp8Tensor, handle: Any) -> Pair:
        """Where the rows of the handle's dispatch went."""
        options = {k: v for k, v in self.dispatch_options.items() if k in ("config", "num_sms")}
        pair: Pair = self.buffer.dispatch((x.data, x.scale_inv), handle=handle, **options)[0]
        return pair

    def combine(self, rows: Tensor, handle: Any, weights: Tensor | None = None) -> Any:
        """(sums [T, H] bf16, sums of the weights [T, S] | None)."""
        return self.buffer.combine(rows, handle, topk_weights=weights, **self.combine_options)[:2]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        gate_up: Tensor,
        down: Tensor,
        trained: bool,
        topk_idx: Tensor,
        transport: _Transport,
        layer: MoEExperts,
        recipe: Fp8Recipe,
        weights: Fp8Weights | None,
        grads: WeightGrads,
    ) -> Tensor:
        x_q = quantize(x, recipe)
        rows, handle = transport.dispatch(x_q, topk_idx, probs, layer.num_experts)
        keep = "none" if layer.recompute == "expert" else layer.save_preactivation
        codes = layer.transposed_weights == "save"
        wanted = fp8.Kept(keep, codes, gate_up=gate_up.requires_grad) if trained else None
        weights, kept = fp8.weights_for(gate_up, down, weights, recipe, wanted)
        out, acts = fp8.forward(rows.x, rows.probs, rows.plan, weights, recipe, keep=keep)
        if kept is not None:
            save(ctx, *fp8.to_save(acts, rows.plan, weights, gate_up, down, kept))
        ctx.recipe, ctx.dtype, ctx.grads = recipe, x.dtype, grads
        ctx.transport, ctx.handle = transport, handle
        combined: Tensor = transport.combine(out, handle)[0]
        return combined.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *_, need_gate_up, need_down = ctx.needs_input_grad[:4]
        kept, plan, weights = fp8.from_saved(load(ctx))
        dout_q = quantize(dout, ctx.recipe, ctx.recipe.grad_dtype)
        pair = ctx.transport.dispatch_again(dout_q, ctx.handle)
        made = fp8.backward(
            fp8_rows("experts", pair, dout_q.pow2),
            kept,
            plan,
            weights,
            ctx.recipe,
            need_gate_up=need_gate_up,
            need_down=need_down,
        )
        dx, dprobs = ctx.transport.combine(made.dx, ctx.handle, made.dprobs)
        weight_grads = ctx.grads.accept(made.gate_up, made.down)
        return dx.to(ctx.dtype), dprobs, *weight_grads, *(None,) * 7
