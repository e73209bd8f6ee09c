"""The expert block as one autograd.Function, in FP8 or in bfloat16.

FP8 tensors are never edges of the autograd graph: x enters in high precision and is quantized
inside, its gradient leaves in high precision; so do the weights. Everything saved goes through
save_for_backward: saved-tensor hooks see it, and what is changed before backward reads it raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import bf16, fp8
from fp8moe_cutlass.autograd.ctx_io import load, save
from fp8moe_cutlass.autograd.dense import dense
from fp8moe_cutlass.autograd.no_double_backward import once_differentiable
from fp8moe_cutlass.autograd.weight_grad import WeightGrads, cast, weight_grads
from fp8moe_cutlass.autograd.weights import Fp8Weights
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor


def fp8_experts(
    x: Tensor,
    probs: Tensor,
    plan: RoutingPlan,
    gate_up: Tensor,
    down: Tensor,
    recipe: Fp8Recipe = Fp8Recipe(),  # noqa: B008 (frozen)
    *,
    weights: Fp8Weights | None = None,
    keep: str = "bf16",
    transposed_weights: str = "save",
    grads: WeightGrads | None = None,
    observe: fp8.Observer | None = None,
) -> Tensor:
    """out [T, H] in x's dtype: fp8.forward, differentiable in x [T, H], probs [T, S] f32 and two
    tensors of any origin, gate_up [E, 2I, H] and down [E, H, I].

    weights: the FP8 weights to multiply; None: the two tensors, quantized now. keep: the
    pre-activation is saved in "bf16" or "fp8", or computed again ("none"). transposed_weights: the
    codes that dgrad reads are saved ("save"), or the two tensors are, and the codes made from them
    again ("recompute"). grads: where the gradients of the two go. observe: is shown what flows,
    where gradients are needed.
    """
    if not needs_grad(x, probs, gate_up, down):
        weights, _ = fp8.weights_for(gate_up, down, weights, recipe, None)
        return cast(fp8.forward(quantize(x, recipe), probs, plan, weights, recipe)[0], x.dtype)
    kept = fp8.Kept(keep, transposed_weights == "save", x.requires_grad, gate_up.requires_grad)
    grads = grads or weight_grads(gate_up, down)
    out: Tensor = _Fp8Experts.apply(  # type: ignore[no-untyped-call]
        x, probs, gate_up, down, plan, weights, recipe, kept, grads, observe
    )
    return out


def bf16_experts(
    x: Tensor,
    probs: Tensor,
    groups: bf16.Groups,
    gate_up: Tensor,
    down: Tensor,
    *,
    keep: str = "bf16",
    grads: WeightGrads | None = None,
) -> Tensor:
    """The same in bfloat16: bf16.forward. keep: "bf16" or "none"."""
    if not needs_grad(x, probs, gate_up, down):
        w1, w2 = gate_up.bfloat16(), down.bfloat16()
        return bf16.forward(x.bfloat16(), probs, groups, w1, w2)[0].to(x.dtype)
    out: Tensor = _Bf16Experts.apply(  # type: ignore[no-untyped-call]
        x, probs, gate_up, down, groups, keep, grads or weight_grads(gate_up, down)
    )
    return out


class _Fp8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        gate_up: Tensor,
        down: Tensor,
        plan: RoutingPlan,
        weights: Fp8Weights | None,
        recipe: Fp8Recipe,
        kept: fp8.Kept,
        grads: WeightGrads,
        observe: fp8.Observer | None,
    ) -> Tensor:
        weights, kept = fp8.weights_for(gate_up, down, weights, recipe, kept)  # type: ignore[assignment]
        x_q = quantize(x, recipe)
        if observe is not None:
            observe("x", x_q, plan, x)
        out, acts = fp8.forward(x_q, probs, plan, weights, recipe, keep=kept.z, observe=observe)
        save(ctx, *fp8.to_save(acts, plan, weights, gate_up, down, kept))
        ctx.recipe, ctx.dtype, ctx.grads, ctx.observe = recipe, x.dtype, grads, observe
        return _returned(out, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        need_dx, need_dprobs, need_gate_up, need_down, *_ = ctx.needs_input_grad
        saved, plan, weights = fp8.from_saved(load(ctx))
        dout_q = quantize(dout, ctx.recipe, ctx.recipe.grad_dtype)
        if ctx.observe is not None:
            ctx.observe("dout", dout_q, plan, dout)
        made = fp8.backward(
            dout_q,
            saved,
            plan,
            weights,
            ctx.recipe,
            need_dx=need_dx,
            need_dprobs=need_dprobs,
            need_gate_up=need_gate_up,
            need_down=need_down,
            observe=ctx.observe,
        )
        dx = None if made.dx is None else cast(made.dx, ctx.dtype)
        return dx, made.dprobs, *ctx.grads.accept(made.gate_up, made.down), *(None,) * 6


class _Bf16Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        gate_up: Tensor,
        down: Tensor,
        groups: bf16.Groups,
        keep: str,
        grads: WeightGrads,
    ) -> Tensor:
        x16 = x.bfloat16()
        out, z = bf16.forward(x16, probs, groups, gate_up.bfloat16(), down.bfloat16())
        save(ctx, x16, z if keep == "bf16" else None, probs, *groups, gate_up, down)
        ctx.dtype, ctx.grads = x.dtype, grads
        return _returned(out, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        need_dx, need_dprobs, need_gate_up, need_down, *_ = ctx.needs_input_grad
        x, z, probs, *groups, gate_up, down = load(ctx)
        made = bf16.backward(
            dout.bfloat16(),
            x,
            z,
            probs,
            bf16.Groups(*groups),
            gate_up.bfloat16(),
            down.bfloat16(),
            need_dx=need_dx,
        )
        dx = None if made.dx is None else made.dx.to(ctx.dtype)
        dprobs = made.dprobs if need_dprobs else None
        weights = ctx.grads.accept(
            made.gate_up if need_gate_up else None, made.down if need_down else None
        )
        return dx, dprobs, *weights, *(None,) * 3


def _returned(out: Tensor, dtype: torch.dtype) -> Tensor:
    """out as the block returns it. torch 2.11's dynamo also returns the tensor an op has filled,
    and gives that one the gradient, unless the two are different tensors."""
    if torch.compiler.is_compiling() and out.dtype == dtype:
        return out.view(out.shape)
    return cast(out, dtype)


def needs_grad(*tensors: Tensor) -> bool:
    """Whether a backward may ask for the gradient of any of them."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def quantize(t: Tensor, recipe: Fp8Recipe, fp8_dtype: str = "e4m3") -> Fp8Tensor:
    """A standalone cast of the block: t [T, H] to row layout."""
    q: Fp8Tensor = ops.quantize(dense(t), fp8_dtype=fp8_dtype, scale=recipe.scale, eps=recipe.eps)
    return q
