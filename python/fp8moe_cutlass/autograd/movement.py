"""permute_pad and unpermute_unpad with gradients, between high-precision tensors.

FP8 tensors are never edges of the graph: an Fp8Tensor moves without a gradient, its probs with one.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd.arguments import check_plan
from fp8moe_cutlass.autograd.no_double_backward import once_differentiable
from fp8moe_cutlass.ops._torch import refuse_transforms
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import ScaleLayout

T = TypeVar("T", Tensor, Fp8Tensor)
Sizes = tuple[int, int, int, int, int]


def permute_pad(
    x: T,
    plan: RoutingPlan,
    probs: Tensor | None = None,
    *,
    scale_layout: ScaleLayout = "gemm",
    zero_unweighted: bool = False,
) -> tuple[T, Tensor | None]:
    """ops.permute_pad, differentiable in x (float32, float16, bfloat16) and probs [T, S] float32.

    The gradient of x sums over all rows of a token, also those zero_unweighted left zero.
    """
    refuse_transforms("permute_pad", x, probs)
    check_plan("permute_pad", plan)
    if isinstance(x, Fp8Tensor) and (x.data.requires_grad or x.scale_inv.requires_grad):
        raise ValueError("[permute_pad] an Fp8Tensor has no gradient; got requires_grad=True")
    y, scale_inv, row_probs = _PermutePad.apply(  # type: ignore[no-untyped-call]
        x, probs, plan.buffer, plan.sizes, scale_layout, zero_unweighted
    )
    if isinstance(x, Fp8Tensor):
        y = Fp8Tensor(y, scale_inv, scale_layout, x.pow2, x.fp8_dtype)
    return y, row_probs


def unpermute_unpad(y: Tensor, plan: RoutingPlan, probs: Tensor | None = None) -> Tensor:
    """ops.unpermute_unpad, differentiable in y and probs [T, S] float32."""
    if isinstance(y, Fp8Tensor):
        raise ValueError("[unpermute_unpad] sums high-precision rows; dequantize the Fp8Tensor")
    refuse_transforms("unpermute_unpad", y, probs)
    check_plan("unpermute_unpad", plan)
    out: Tensor = _UnpermuteUnpad.apply(  # type: ignore[no-untyped-call]
        y, probs, plan.buffer, plan.sizes
    )
    return out


class _PermutePad(torch.autograd.Function):
    """y, row_probs, and between them the scales of an FP8 y, which has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        probs: Tensor | None,
        buffer: Tensor,
        sizes: Sizes,
        scale_layout: ScaleLayout,
        zero: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(buffer)
        ctx.sizes = sizes
        plan = RoutingPlan(buffer, *sizes)
        y, row_probs = ops.permute_pad(
            x, plan, probs, scale_layout=scale_layout, zero_unweighted=zero
        )
        if not isinstance(y, Fp8Tensor):
            return y, None, row_probs
        ctx.mark_non_differentiable(y.data, y.scale_inv)
        return y.data, y.scale_inv, row_probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, _scales: None, row_dprobs: Tensor | None
    ) -> tuple[Any, ...]:
        plan = RoutingPlan(*ctx.saved_tensors, *ctx.sizes)
        dx = dprobs = None
        if row_dprobs is not None:
            row_dprobs = row_dprobs.contiguous()
        if dy is not None:
            dx, dprobs = ops.permute_pad_backward(dy.contiguous(), plan, row_dprobs)
        elif row_dprobs is not None:  # rows of no width: the probs alone
            nothing = torch.empty(plan.rows, 0, dtype=torch.float32, device=plan.device)
            dprobs = ops.permute_pad_backward(nothing, plan, row_dprobs)[1]
        return dx, dprobs, None, None, None, None


class _UnpermuteUnpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, probs: Tensor | None, buffer: Tensor, sizes: Sizes) -> Tensor:
        ctx.save_for_backward(buffer, *([] if probs is None else [y, probs]))
        ctx.sizes = sizes
        out: Tensor = ops.unpermute_unpad(y, RoutingPlan(buffer, *sizes), probs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        buffer, *operands = ctx.saved_tensors
        plan = RoutingPlan(buffer, *ctx.sizes)
        dy, dprobs = ops.unpermute_unpad_backward(dout.contiguous(), plan, *operands)
        return dy, dprobs, None, None
