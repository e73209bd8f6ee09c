"""Experts whose weight gradients are made in ways that the library has no option for.

quality.py trains with them, to say what each choice is worth. All is as in MoEExperts but for the
operands of the weight gradients. From public operators alone, and eager: compiled layers break
their graph here.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass import Fp8Recipe, Fp8Tensor, RoutingPlan, ops
from fp8moe_cutlass.nn import MoEExperts

Wgrad = Literal["bf16", "double"]


class OtherWgrad(MoEExperts):
    """Experts in FP8 whose weight gradients contract other operands.

    wgrad "bf16": the rows in FP8, dequantized to bfloat16, and a GEMM in bfloat16: how others
      hedge.
    wgrad "double": the rows in FP8, dequantized, transposed and quantized again by 1x128 tiles
      along tokens, as flows do that cast between the operators. The second rounding is one only
      with float32 scales: by powers of two a code's mantissa stays as it is.
    """

    def __init__(self, *sizes: int, wgrad: Wgrad, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.wgrad = wgrad
        if self.recipe is None:
            raise ValueError("[OtherWgrad] recipe must be an Fp8Recipe; got None")
        if wgrad == "double" and self.recipe.columns != "column":
            raise ValueError("[OtherWgrad] wgrad 'double' needs columns 'column'; got 'block'")

    @torch.compiler.disable
    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, **options: Any) -> Tensor:
        """x [T, H], topk_idx [T, S], topk_weights [T, S] f32 -> [T, H] bf16."""
        out: Tensor
        x = x.bfloat16()
        if not torch.is_grad_enabled():
            out = super().forward(x, topk_idx, topk_weights, **options)
        else:
            given = x, topk_weights, self.gate_up_proj, self.down_proj, topk_idx
            out = _Experts.apply(*given, self.recipe, self.wgrad)  # type: ignore[no-untyped-call]
        return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        gate_up: Tensor,
        down: Tensor,
        topk_idx: Tensor,
        recipe: Fp8Recipe,
        wgrad: Wgrad,
    ) -> Tensor:
        how: Any = {"scale": recipe.scale, "eps": recipe.eps}
        plan: RoutingPlan = ops.route(gate_up.shape[0], topk_idx=topk_idx.contiguous())
        x_q = ops.quantize(x.contiguous(), **how)
        w1, w1_t = ops.quantize_weight(gate_up, **how)
        w2, w2_t = ops.quantize_weight(down, **how)
        rows, row_probs = ops.permute_pad(x_q, plan, probs.contiguous())
        z = ops.grouped_gemm(rows, w1, plan)
        h: Any = ops.act_quantize(z, plan, probs=row_probs, **how)
        out: Tensor = ops.unpermute_unpad(ops.grouped_gemm(h, w2, plan), plan)
        # Fp8Tensors and a plan are no tensors to save; nobody changes them in place.
        ctx.saved = plan, x_q, z, h, row_probs, w1_t, w2_t
        ctx.how, ctx.recipe, ctx.wgrad = how, recipe, wgrad
        ctx.dtypes = x.dtype, gate_up.dtype, down.dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        plan, x_q, z, h, row_probs, w1_t, w2_t = ctx.saved
        recipe, how = ctx.recipe, ctx.how
        dout_q = ops.quantize(dout.contiguous(), fp8_dtype=recipe.grad_dtype, **how)
        dy = ops.permute_pad(dout_q, plan)[0]
        dh = ops.grouped_gemm(dy, w2_t, plan)
        made: Any = ops.act_quantize_backward(
            dh, z, plan, row_probs, fp8_dtype=recipe.grad_dtype, **how
        )
        dx_rows = ops.grouped_gemm(made.dz, w1_t, plan)
        dx, dprobs = ops.permute_pad_backward(dx_rows, plan, made.dprobs)
        rows = ops.permute_pad(x_q, plan)[0]
        of: Any = _in_bf16 if ctx.wgrad == "bf16" else _quantized_twice
        grads = of(made.dz, rows, plan, how), of(dy, h, plan, how)
        _, *dtypes = ctx.dtypes
        weights = [grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
        return dx, dprobs, *weights, None, None, None


def _in_bf16(left: Fp8Tensor, right: Fp8Tensor, plan: RoutingPlan, how: Any) -> Tensor:
    """dW [E, N, K] = left^T right of each expert's rows, left [R, N] and right [R, K]."""
    a: Any = ops.dequantize(left)
    b: Any = ops.dequantize(right)
    ends: Any = plan.row_offsets[1:]
    if a.device.type == "cpu":
        return F.grouped_mm(a.float().t(), b.float(), offs=ends.contiguous())
    return F.grouped_mm(a.t(), b, offs=ends.contiguous())


def _quantized_twice(left: Fp8Tensor, right: Fp8Tensor, plan: RoutingPlan, how: Any) -> Tensor:
    a, b = (
        ops.transpose_fp8(rows, plan, columns="column", requantize=True, **how)
        for rows in (left, right)
    )
    made: Tensor = ops.grouped_gemm_wgrad(a, b, plan)
    return made
