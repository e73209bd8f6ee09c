"""The weight gradients of the FP8 block, still to be computed, and counts of what FP8 loses."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd.body import COUNTED, Counters
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor


class Wgrad(NamedTuple):
    """The gradient of one weight, still to be computed: over the rows of each expert, dz^T x of
    gate_up or dy^T h of down."""

    of: str  # "x" or "dout": what `rows` are
    rows: Fp8Tensor
    columns: Fp8Tensor  # of dz or h, transposed
    plan: RoutingPlan
    recipe: Fp8Recipe
    counters: Counters | None = None
    turned: Fp8Tensor | None = None  # the rows, transposed, if that is done

    def apart(self, delayed: bool) -> Wgrad:
        """The same without reading the rows where they are: transposed or, for long, copied."""
        if delayed:
            return self._replace(rows=self.rows.clone())
        turned = turn(self.of, self.rows, self.plan, self.recipe, self.counters)
        return self._replace(turned=turned)

    def scaled(self, by: float) -> Wgrad:
        """`by` times this gradient, by an operand's scales: exact where `by` is a power of two."""
        c = self.columns
        scale_inv, pow2 = c.scale_inv * by, c.pow2 and math.frexp(by)[0] == 0.5
        return self._replace(
            columns=Fp8Tensor(c.data, scale_inv, c.scale_layout, pow2, c.fp8_dtype, check=False)
        )

    def run(
        self,
        out: Tensor | None,
        accumulate: bool,
        dtype: str,
        workspace: Tensor | None = None,
        *,
        turned: bool = False,
    ) -> Tensor:
        """dW [E, N, K], written (accumulate: added) to `out`; None: to a new tensor of `dtype`,
        "float32" or "bfloat16". workspace: the backward's, in its stream's order. turned: a new one
        lies as [E, K, N], of gradients in E4M3."""
        left, right = self._operands()
        if turned and left.fp8_dtype == right.fp8_dtype == "e4m3":
            dw = ops.grouped_gemm_wgrad(
                right, left, self.plan, out_dtype=dtype, workspace=workspace
            )
            return dw.mT  # type: ignore[no-any-return]
        dw = ops.grouped_gemm_wgrad(
            left,
            right,
            self.plan,
            out=out,
            accumulate=accumulate,
            out_dtype=dtype,
            workspace=workspace,
        )
        return dw  # type: ignore[no-any-return]

    def halves(self, dtype: str, workspace: Tensor | None) -> list[Tensor]:
        """dW of the upper and of the lower half of N, each a tensor of its own; N a multiple of
        256. Otherwise as `run`."""
        left, right = self._operands()
        n, layout = left.shape[0] // 2, left.scale_layout
        if layout == "gemm":
            left = left.to_layout("row")
        return [
            ops.grouped_gemm_wgrad(
                half if layout == "block" else half.to_layout(layout),
                right,
                self.plan,
                out_dtype=dtype,
                workspace=workspace,
            )
            for half in (left[:n], left[n:])
        ]

    def _operands(self) -> tuple[Fp8Tensor, Fp8Tensor]:
        turned = self.turned
        if turned is None:
            turned = turn(self.of, self.rows, self.plan, self.recipe, self.counters)
        return (self.columns, turned) if self.of == "x" else (turned, self.columns)


def turn(
    of: str, rows: Fp8Tensor, plan: RoutingPlan, recipe: Fp8Recipe, counters: Counters | None
) -> Fp8Tensor:
    """A Wgrad's rows, transposed. Only power-of-two scales can be shifted in FP8; float32 scales
    are dequantized and quantized again, a second rounding."""
    shift, grouped = recipe.scale == "pow2", rows.scale_layout == "gemm"
    if shift and not grouped:
        made: Any = ops.permute_transpose_fp8(rows, plan, columns=recipe.columns)
    else:
        made = ops.transpose_fp8(
            rows if grouped else ops.permute_pad(rows, plan)[0],
            plan,
            columns=recipe.columns,
            requantize=not shift,
            scale=recipe.scale,
            eps=recipe.eps,
        )
    if counters is not None:
        count(counters, f"{of} columns", rows, plan, made)
    return made  # type: ignore[no-any-return]


def count(
    counters: Counters,
    name: str,
    t: Fp8Tensor,
    plan: RoutingPlan,
    columns: Fp8Tensor | None = None,
) -> None:
    """Adds to the counters of `name`; nothing for columns with float32 scales, which have no
    shifts."""
    if columns is None or (t.pow2 and columns.pow2):
        row = counters.counts[COUNTED.index(name)]
        ops.count_codes(t, plan, row, columns=columns, stride=counters.every)
