"""The expert block as one autograd.Function, in FP8 or in bfloat16.

FP8 tensors are never edges of the autograd graph: x enters in high precision and is quantized
inside, its gradient leaves in high precision. Everything saved goes through save_for_backward, so
saved-tensor hooks see it, and a weight copy refreshed between forward and backward is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import bf16, fp8
from fp8moe_cutlass.autograd.ctx_io import load, save
from fp8moe_cutlass.autograd.no_double_backward import once_differentiable
from fp8moe_cutlass.autograd.weight_grad import WeightGrad, cast
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor


def fp8_experts(
    x: Tensor,
    probs: Tensor,
    plan: RoutingPlan,
    weights: fp8.Fp8Weights,
    recipe: Fp8Recipe,
    *,
    gate_up: WeightGrad,
    down: WeightGrad,
    keep: str = "bf16",
    observe: fp8.Observer | None = None,
) -> Tensor:
    """out [T, H] in x's dtype: fp8.forward, differentiable in x [T, H], probs [T, S] f32 and the
    two parameters of which `weights` are the quantized copies.

    keep: the pre-activation is saved in "bf16" or "fp8", or computed again ("none"). observe: is
    shown what flows, where gradients are needed.
    """
    if not needs_grad(x, probs, gate_up.weight, down.weight):
        return cast(fp8.forward(quantize(x, recipe), probs, plan, weights, recipe)[0], x.dtype)
    out: Tensor = _Fp8Experts.apply(  # type: ignore[no-untyped-call]
        x, probs, gate_up.weight, down.weight, plan, weights, recipe, gate_up, down, keep, observe
    )
    return out


def bf16_experts(
    x: Tensor,
    probs: Tensor,
    groups: bf16.Groups,
    *,
    gate_up: WeightGrad,
    down: WeightGrad,
    keep: str = "bf16",
) -> Tensor:
    """The same in bfloat16: bf16.forward. keep: "bf16" or "none"."""
    if not needs_grad(x, probs, gate_up.weight, down.weight):
        w1, w2 = gate_up.weight.bfloat16(), down.weight.bfloat16()
        return bf16.forward(x.bfloat16(), probs, groups, w1, w2)[0].to(x.dtype)
    out: Tensor = _Bf16Experts.apply(  # type: ignore[no-untyped-call]
        x, probs, gate_up.weight, down.weight, groups, gate_up, down, keep
    )
    return out


class _Fp8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        plan: RoutingPlan,
        weights: fp8.Fp8Weights,
        recipe: Fp8Recipe,
        gate_up: WeightGrad,
        down: WeightGrad,
        keep: str,
        observe: fp8.Observer | None,
    ) -> Tensor:
        x_q = quantize(x, recipe)
        if observe is not None:
            observe("x", x_q, plan, x)
        out, kept = fp8.forward(x_q, probs, plan, weights, recipe, keep=keep, observe=observe)
        save(ctx, *fp8.to_save(kept, plan, weights))
        ctx.recipe, ctx.dtype = recipe, x.dtype
        ctx.gate_up, ctx.down, ctx.observe = gate_up, down, observe
        return _returned(out, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        need_dx, need_dprobs, need_gate_up, need_down, *_ = ctx.needs_input_grad
        kept, plan, weights = fp8.from_saved(load(ctx))
        dout_q = quantize(dout, ctx.recipe, ctx.recipe.grad_dtype)
        if ctx.observe is not None:
            ctx.observe("dout", dout_q, plan, dout)
        grads = fp8.backward(
            dout_q,
            kept,
            plan,
            weights,
            ctx.recipe,
            need_dx=need_dx,
            need_dprobs=need_dprobs,
            need_gate_up=need_gate_up,
            need_down=need_down,
            observe=ctx.observe,
        )
        dx = None if grads.dx is None else cast(grads.dx, ctx.dtype)
        d_gate_up = ctx.gate_up.accept(grads.gate_up) if need_gate_up else None
        d_down = ctx.down.accept(grads.down) if need_down else None
        return dx, grads.dprobs, d_gate_up, d_down, *(None,) * 7


class _Bf16Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        groups: bf16.Groups,
        gate_up: WeightGrad,
        down: WeightGrad,
        keep: str,
    ) -> Tensor:
        x16 = x.bfloat16()
        out, z = bf16.forward(x16, probs, groups, gate_up_proj.bfloat16(), down_proj.bfloat16())
        save(ctx, x16, z if keep == "bf16" else None, probs, *groups, gate_up_proj, down_proj)
        ctx.dtype, ctx.gate_up, ctx.down = x.dtype, gate_up, down
        return _returned(out, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        need_dx, need_dprobs, need_gate_up, need_down, *_ = ctx.needs_input_grad
        x, z, probs, *groups, gate_up_proj, down_proj = load(ctx)
        grads = bf16.backward(
            dout.bfloat16(),
            x,
            z,
            probs,
            bf16.Groups(*groups),
            gate_up_proj.bfloat16(),
            down_proj.bfloat16(),
            need_dx=need_dx,
        )
        dx = None if grads.dx is None else grads.dx.to(ctx.dtype)
        dprobs = grads.dprobs if need_dprobs else None
        d_gate_up = ctx.gate_up.accept(grads.gate_up) if need_gate_up else None
        d_down = ctx.down.accept(grads.down) if need_down else None
        return dx, dprobs, d_gate_up, d_down, *(None,) * 4


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


def dense(t: Tensor) -> Tensor:
    """t as the operators read it, contiguous and from a multiple of 16 bytes: copied where it is
    not, such as a view from the middle of a flat buffer."""
    t = t.contiguous()
    if torch.compiler.is_compiling():  # dynamo knows neither address nor offset
        return t
    return t.clone() if t.storage_offset() * t.element_size() % 16 else t
