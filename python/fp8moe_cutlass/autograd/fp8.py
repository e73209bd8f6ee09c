"""The expert block in FP8, forward and backward, as plain functions over FP8 tensors.

Two standalone casts exist, both outside this file: x before `forward`, the gradient of the output
before `backward`. Everything between stays in FP8 or is quantized by the SwiGLU kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd.ctx_io import Saved
from fp8moe_cutlass.autograd.weight_grad import Gradients as Gradients
from fp8moe_cutlass.autograd.weight_grad import Wgrad
from fp8moe_cutlass.autograd.weights import (
    Fp8Weights,
    of_one_forward,
    quantize_weight,
    transpose,
)
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor

# (name, value, plan, what it was made from): is shown what flows through the block, and may look at
# it in place, on the device (telemetry.py).
Observer = Callable[[str, Any, RoutingPlan, Any], None]


class Activations(NamedTuple):
    """What the backward reads of the forward."""

    x: Any  # Fp8Tensor [T, H], row layout, unpermuted; saved None where nothing reads it
    row_probs: Tensor  # [R] f32
    z: Tensor | Fp8Tensor | None  # [R, 2I]; None: it is computed again from x


class BackwardWeights(NamedTuple):
    """What the backward reads of the weights: codes as fprop has them or the parameter they are
    made from again, and the transposes; None where the other will do, or nothing reads it."""

    gate_up: Fp8Tensor | Tensor | None
    down: Fp8Tensor | Tensor | None
    gate_up_t: Fp8Tensor | None
    down_t: Fp8Tensor | None


class Kept(NamedTuple):
    """What a forward keeps, for a backward that will be asked for so much."""

    z: str = "bf16"  # or "fp8", or "none": computed again
    codes: bool = True  # False: the parameters, and codes are made from them again
    dx: bool = True
    gate_up: bool = True  # its gradient


def weights_for(
    gate_up: Tensor, down: Tensor, weights: Fp8Weights | None, recipe: Fp8Recipe, kept: Kept | None
) -> tuple[Fp8Weights, Kept | None]:
    """The weights a forward multiplies, those given or quantized now, and what it keeps. kept None:
    there is no backward."""
    if weights is not None:
        if not torch.compiler.is_compiling():  # dynamo traces no event
            weights.wait()
        return weights, kept and kept._replace(codes=True)
    codes = kept is not None and kept.codes
    dx = kept is not None and kept.dx
    return of_one_forward(gate_up, down, recipe, gate_up_t=codes and dx, down_t=codes), kept


def to_save(
    activations: Activations,
    plan: RoutingPlan,
    weights: Fp8Weights,
    gate_up: Tensor,
    down: Tensor,
    kept: Kept,
) -> tuple[Saved, ...]:
    """What `backward` reads of a forward, as ctx_io.save takes it; `from_saved` is the way back."""
    again = activations.z is None
    x = activations.x if again or kept.gate_up else None
    gate_up_t = weights.gate_up_t if kept.dx else None
    needs_gate_up = again or (kept.dx and gate_up_t is None)
    rows = (weights.gate_up, weights.down) if kept.codes else (gate_up, down)
    return (
        *(x, activations.row_probs, activations.z, plan),
        *(rows[0] if needs_gate_up else None, rows[1] if weights.down_t is None else None),
        *(gate_up_t, weights.down_t),
    )


def from_saved(items: Sequence[Any]) -> tuple[Activations, RoutingPlan, BackwardWeights]:
    """What ctx_io.load returns of `to_save`."""
    return Activations(*items[:3]), items[3], BackwardWeights(*items[4:])


def forward(
    x: Fp8Tensor,
    probs: Tensor,
    plan: RoutingPlan,
    weights: Fp8Weights,
    recipe: Fp8Recipe,
    *,
    keep: str = "none",
    observe: Observer | None = None,
) -> tuple[Tensor, Activations]:
    """out[t] = sum over slots of down_e (silu(gate) * up * prob), [gate | up] = gate_up_e x[t].

    x [T, H] in row layout, probs [T, S] f32 -> out [T, H] bf16 and what `backward` needs.
    keep: the pre-activation z is kept in "bf16", in "fp8", or not ("none").
    """
    rows, row_probs = ops.permute_pad(x, plan, probs=probs)
    assert row_probs is not None
    z = ops.grouped_gemm(rows, weights.gate_up, plan)
    h, kept = _activate(z, plan, row_probs, recipe, keep)
    y = ops.grouped_gemm(h, weights.down, plan)
    if observe is not None:
        observe("z", z, plan, x)
        observe("h", h, plan, (z, row_probs))
        observe("y", y, plan, h)
    return ops.unpermute_unpad(y, plan), Activations(x, row_probs, kept)


def backward(
    dout: Fp8Tensor,
    saved: Activations,
    plan: RoutingPlan,
    weights: Fp8Weights | BackwardWeights,
    recipe: Fp8Recipe,
    *,
    need_dx: bool = True,
    need_dprobs: bool = True,
    need_gate_up: bool = True,
    need_down: bool = True,
    observe: Observer | None = None,
) -> Gradients:
    """The gradients of `forward`, given the quantized gradient of its output, dout [T, H]."""
    gate_up, down, gate_up_t, down_t = (getattr(weights, name) for name in BackwardWeights._fields)
    dy, _ = ops.permute_pad(dout, plan)
    dh = ops.grouped_gemm(dy, transpose(down, recipe, dout) if down_t is None else down_t, plan)
    x, z = saved.x, saved.z
    if z is None:
        if isinstance(gate_up, Tensor):
            gate_up, gate_up_t = quantize_weight(gate_up, recipe, transposed=need_dx, dout=dout)
        z = ops.grouped_gemm(ops.permute_pad(x, plan)[0], gate_up, plan)
    elif isinstance(z, Fp8Tensor):
        z = ops.dequantize(z)

    made: Any = ops.act_quantize_backward(
        dh,
        z,
        plan,
        probs=saved.row_probs,
        columns=recipe.columns if need_gate_up or need_down else None,
        fp8_dtype=recipe.grad_dtype,
        scale=recipe.scale,
        eps=recipe.eps,
    )
    dz, *columns, row_dprobs = made
    if observe is not None:
        observe("dh", dh, plan, dout)
        observe("dz", dz, plan, (dh, z, saved.row_probs))
    del dy, dh, z, made

    def gate_up_wgrad(out: Tensor | None, accumulate: bool, dtype: str) -> Tensor:
        dz_columns, x_columns = columns[0], _columns(x, plan, recipe)
        if observe is not None:
            observe("x columns", x_columns, plan, x)
        dw: Tensor = ops.grouped_gemm_wgrad(
            dz_columns, x_columns, plan, out=out, accumulate=accumulate, out_dtype=dtype
        )
        return dw

    def down_wgrad(out: Tensor | None, accumulate: bool, dtype: str) -> Tensor:
        dy_columns, h_columns = _columns(dout, plan, recipe), columns[1]
        if observe is not None:
            observe("dout columns", dy_columns, plan, dout)
        dw: Tensor = ops.grouped_gemm_wgrad(
            dy_columns, h_columns, plan, out=out, accumulate=accumulate, out_dtype=dtype
        )
        return dw

    dx, dprobs = None, None
    if need_dx:
        gate_up_t = transpose(gate_up, recipe, dout) if gate_up_t is None else gate_up_t
        dx_rows = ops.grouped_gemm(dz, gate_up_t, plan)
        if observe is not None:
            observe("dx rows", dx_rows, plan, dz)
        dx, dprobs = ops.permute_pad_backward(
            dx_rows, plan, dprobs=row_dprobs if need_dprobs else None
        )
    elif need_dprobs:
        dprobs = _gather_dprobs(row_dprobs, plan)
    return Gradients(
        dx,
        dprobs,
        Wgrad(gate_up_wgrad, (columns[0], x, plan)) if need_gate_up else None,
        Wgrad(down_wgrad, (columns[1], dout, plan)) if need_down else None,
    )


def _activate(
    z: Tensor, plan: RoutingPlan, row_probs: Tensor, recipe: Fp8Recipe, keep: str
) -> tuple[Fp8Tensor, Tensor | Fp8Tensor | None]:
    """h = Q(silu(gate) * up * prob), and z in the form that is kept."""
    made: Any = ops.act_quantize(
        z,
        plan,
        probs=row_probs,
        save_z=keep == "fp8",
        scale=recipe.scale,
        eps=recipe.eps,
    )
    return made if keep == "fp8" else (made, z if keep == "bf16" else None)


def _columns(t: Fp8Tensor, plan: RoutingPlan, recipe: Fp8Recipe) -> Fp8Tensor:
    """The rows of `t` as a wgrad operand. Only power-of-two scales can be shifted in FP8; float32
    scales are dequantized and quantized again, a second rounding."""
    if recipe.scale == "pow2":
        return ops.permute_transpose_fp8(t, plan, columns=recipe.columns)
    rows, _ = ops.permute_pad(t, plan)
    return ops.transpose_fp8(
        rows, plan, columns=recipe.columns, requantize=True, scale=recipe.scale, eps=recipe.eps
    )


def _gather_dprobs(row_dprobs: Tensor, plan: RoutingPlan) -> Tensor:
    """dprobs[t, s] = row_dprobs[row_of[t, s]], 0 where the slot was dropped."""
    row_of = plan.row_of.long()
    if row_dprobs.numel() == 0:
        return row_dprobs.new_zeros(row_of.shape)
    return row_dprobs[row_of.clamp(min=0)].masked_fill(row_of < 0, 0.0)
