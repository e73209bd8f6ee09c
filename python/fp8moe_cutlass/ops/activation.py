"""h = Q(act(z) * prob) of z = [gate | up], and back."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

from fp8moe_cutlass import _C
from fp8moe_cutlass.activation import SWIGLU, Activation
from fp8moe_cutlass.arrays import dtype_name
from fp8moe_cutlass.ops._words import (
    FORMATS,
    ROUNDINGS,
    column_layout,
    flag,
    given_fp8,
    is_pow2,
    parts,
    refuse,
)
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import LAYOUTS, Fp8Tensor
from fp8moe_cutlass.typing import Array, Columns, DType, Rounding, ScaleKind, ScaleLayout


class ActQuantized(NamedTuple):
    """The activation and, with save_z, the pre-activation in FP8."""

    h: Fp8Tensor  # [R, I]
    z: Fp8Tensor  # of z's shape, row layout


class ActGradients(NamedTuple):
    """The gradients of z and probs, and operands of the weight gradients."""

    dz: Fp8Tensor  # of z's shape
    dz_columns: Fp8Tensor | None  # [2I, Kcap] (without a gate [I, Kcap]), with columns
    h_columns: Fp8Tensor | None  # [I, Kcap], with columns
    dprobs: Array | None  # [R] float32, with probs


@overload
def act_quantize(
    z: Array,
    plan: RoutingPlan | None = None,
    probs: Array | None = None,
    *,
    activation: Activation = SWIGLU,
    rounding: Rounding = "none",
    save_z: Literal[False] = False,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    scale_layout: ScaleLayout = "gemm",
    out: Fp8Tensor | None = None,
) -> Fp8Tensor: ...


@overload
def act_quantize(
    z: Array,
    plan: RoutingPlan | None = None,
    probs: Array | None = None,
    *,
    activation: Activation = SWIGLU,
    rounding: Rounding = "none",
    save_z: Literal[True],
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    scale_layout: ScaleLayout = "gemm",
    out: tuple[Fp8Tensor, Fp8Tensor] | None = None,
) -> ActQuantized: ...


def act_quantize(
    z: Array,
    plan: RoutingPlan | None = None,
    probs: Array | None = None,
    *,
    activation: Activation = SWIGLU,
    rounding: Rounding = "none",
    save_z: bool = False,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    scale_layout: ScaleLayout = "gemm",
    out: Any = None,
) -> Any:
    """Quantizes h = act(z) (* prob) of z [R, 2I] (float32, float16 or bfloat16) to E4M3.

    plan: whose rows these are (None: R ordinary rows). probs [R] float32. activation: what h is of
    z; silu(gate) * up. Of one without a gate z is [R, I].
    rounding: of a plain SwiGLU in float32 ("none"), silu * up rounded to bfloat16 ("product"), or
    silu first ("silu"), before probs.
    Returns h [R, I]; with save_z also Q(z) in row layout, to be kept for the backward in z's place
    and dequantized there.
    """
    if type(save_z) is not bool:
        flag("act_quantize", "save_z", save_z)
    if not isinstance(scale_layout, str) or scale_layout not in LAYOUTS:
        refuse("act_quantize", "scale_layout", "'row', 'gemm' or 'block'", scale_layout)
    h: Any = scale_layout
    z_q: Any = "row" if save_z else None
    if out is not None:
        op, pow2 = "act_quantize", is_pow2("act_quantize", scale)
        given = (out,) if isinstance(out, Fp8Tensor) else out
        given = parts(op, given, *(("h", "z") if save_z else ("h",)))
        h = given_fp8(op, given[0], scale_layout, "e4m3", pow2)
        z_q = given_fp8(op, given[-1], "row", "e4m3", pow2) if save_z else None
    if not isinstance(rounding, str) or rounding not in ROUNDINGS:
        refuse("act_quantize", "rounding", "'none', 'product' or 'silu'", rounding)
    how = (activation, ROUNDINGS[rounding])
    h, z_q = _C.act_quantize(z, plan, probs, *how, h, z_q, scale, eps)
    return h if z_q is None else ActQuantized(h, z_q)


def act_quantize_backward(
    dh: Array,
    z: Array,
    plan: RoutingPlan | None = None,
    probs: Array | None = None,
    *,
    activation: Activation = SWIGLU,
    columns: Columns | None = None,
    fp8_dtype: DType = "e4m3",
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    scale_layout: ScaleLayout = "gemm",
    out: tuple[Fp8Tensor | Array | None, ...] | None = None,
    workspace: Array | None = None,
) -> ActGradients:
    """The gradient of act_quantize at dh [R, I], with z and activation as given forward.

    dz, of z's shape, in `fp8_dtype`; with probs also dprobs [R] float32. columns also returns dz
    transposed [2I, Kcap] and h, recomputed, transposed [I, Kcap] in E4M3. out: as what
    is returned. workspace: of ops.zero_workspace, used with probs and columns on CUDA; None:
    allocated.
    """
    op = "act_quantize_backward"
    layout: Any = None
    if columns is not None:
        layout = column_layout(op, columns)
    if layout is not None and plan is None:
        raise ValueError(f"[{op}] columns are per expert and need a plan; got None")
    if not isinstance(fp8_dtype, str) or fp8_dtype not in FORMATS:
        fp8_dtype = dtype_name("act_quantize_backward", "fp8_dtype", fp8_dtype, *FORMATS)
    if not isinstance(scale_layout, str) or scale_layout not in LAYOUTS:
        refuse("act_quantize_backward", "scale_layout", "'row', 'gemm' or 'block'", scale_layout)
    dz: Any = (scale_layout, fp8_dtype)
    dz_columns: Any = None if layout is None else (layout, fp8_dtype)
    h_columns: Any = layout
    dprobs: Any = None if probs is None else True
    if out is not None:
        pow2 = is_pow2(op, scale)
        out = parts(op, out, "dz", "dz_columns", "h_columns", "dprobs")
        dz = given_fp8(op, out[0], scale_layout, fp8_dtype, pow2)
        if layout is not None:
            dz_columns = given_fp8(op, out[1], layout, fp8_dtype, pow2)
            h_columns = given_fp8(op, out[2], layout, "e4m3", pow2)
        dprobs = dprobs if out[3] is None else out[3]
    asked = (dz, dprobs, dz_columns, h_columns)
    dz, dprobs, dz_columns, h_columns = _C.act_quantize_backward(
        dh, z, plan, probs, activation, *asked, scale, eps, workspace
    )
    return ActGradients(dz, dz_columns, h_columns, dprobs)
