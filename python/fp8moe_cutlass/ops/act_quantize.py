"""h = Q(silu(gate) * up * prob) of z = [gate | up], and back."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import empty, given_fp8, new_fp8
from fp8moe_cutlass.ops._words import column_layout, flag, is_pow2, parts, refuse, shape_of
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array, Columns, DType, ScaleKind, ScaleLayout

_op = operator("act_quantize")
_backward = operator("act_quantize_backward")


class ActQuantized(NamedTuple):
    """What act_quantize returns with save_z."""

    h: Fp8Tensor  # [R, I]
    z: Fp8Tensor  # [R, 2I], row layout


class ActGradients(NamedTuple):
    """What act_quantize_backward returns."""

    dz: Fp8Tensor  # [R, 2I]
    dz_columns: Fp8Tensor | None  # [2I, Kcap], with columns
    h_columns: Fp8Tensor | None  # [I, Kcap], with columns
    dprobs: Array | None  # [R] float32, with probs


@overload
def act_quantize(
    z: Array,
    plan: RoutingPlan | None = None,
    probs: Array | None = None,
    *,
    limit: float | None = None,
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
    limit: float | None = None,
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
    limit: float | None = None,
    save_z: bool = False,
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    scale_layout: ScaleLayout = "gemm",
    out: Any = None,
) -> Any:
    """Quantizes h = silu(gate) * up (* prob) of z [R, 2I] (float32, float16 or bfloat16) to E4M3.

    plan: whose rows these are (None: R ordinary rows). probs [R] float32. limit c > 0: gate at
    most c, up within [-c, c]; None: neither.
    Returns h [R, I]; with save_z also Q(z) [R, 2I] in row layout, to be kept for the backward in
    z's place and dequantized there.
    """
    fresh = out is None
    op = "act_quantize"
    pow2 = is_pow2(op, scale)
    flag(op, "save_z", save_z)
    z_q = None
    if out is None:
        r, width = shape_of(op, "z", z, 2)
        h = new_fp8(op, z, (r, width // 2), scale_layout, "e4m3", pow2)
        if save_z:
            z_q = new_fp8(op, z, (r, width), "row", "e4m3", pow2)
    else:
        names = ("h", "z") if save_z else ("h",)
        given = parts(op, (out,) if isinstance(out, Fp8Tensor) else out, *names)
        h = given_fp8(op, given[0], scale_layout, "e4m3", pow2)
        if save_z:
            z_q = given_fp8(op, given[-1], "row", "e4m3", pow2)
    _op(z, plan, probs, math.inf if limit is None else limit, h, z_q, scale, eps, fresh=fresh)
    return h if z_q is None else ActQuantized(h, z_q)


def act_quantize_backward(
    dh: Array,
    z: Array,
    plan: RoutingPlan | None = None,
    probs: Array | None = None,
    *,
    limit: float | None = None,
    columns: Columns | None = None,
    fp8_dtype: DType = "e4m3",
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    scale_layout: ScaleLayout = "gemm",
    out: tuple[Fp8Tensor | Array | None, ...] | None = None,
    workspace: Array | None = None,
) -> ActGradients:
    """The gradient of act_quantize at dh [R, I], with z [R, 2I] as given forward.

    dz [R, 2I] = Q([dgate | dup]) in `fp8_dtype`; with probs also dprobs [R] float32. columns also
    returns dz transposed [2I, Kcap] and h, recomputed, transposed [I, Kcap] in E4M3. out: as what
    is returned. workspace: of ops.zero_workspace, used with probs and columns on CUDA; None:
    allocated.
    """
    if plan is not None and out is None and not isinstance(plan, RoutingPlan):
        refuse("act_quantize_backward", "plan", "a RoutingPlan", plan)
    fresh = out is None
    op = "act_quantize_backward"
    pow2 = is_pow2(op, scale)
    layout = None if columns is None else column_layout(op, columns)
    dz_columns = h_columns = dprobs = None
    if out is None:
        r, i = shape_of(op, "dh", dh, 2)
        dz = new_fp8(op, dh, (r, 2 * i), scale_layout, fp8_dtype, pow2)
        if layout:
            if plan is None:
                raise ValueError(f"[{op}] columns are per expert and need a plan; got None")
            kcap = plan.columns
            dz_columns = new_fp8(op, dh, (2 * i, kcap), layout, fp8_dtype, pow2)
            h_columns = new_fp8(op, dh, (i, kcap), layout, "e4m3", pow2)
    else:
        out = parts(op, out, "dz", "dz_columns", "h_columns", "dprobs")
        dprobs = out[3]
        dz = given_fp8(op, out[0], scale_layout, fp8_dtype, pow2)
        if layout:
            dz_columns = given_fp8(op, out[1], layout, fp8_dtype, pow2)
            h_columns = given_fp8(op, out[2], layout, "e4m3", pow2)
    if probs is not None and dprobs is None:
        dprobs = empty(op, probs, (dh.shape[0],), "float32")
    bound = math.inf if limit is None else limit
    made = dz, dprobs, dz_columns, h_columns
    _backward(dh, z, plan, probs, bound, *made, scale, eps, workspace, fresh=fresh)
    return ActGradients(dz, dz_columns, h_columns, dprobs)
