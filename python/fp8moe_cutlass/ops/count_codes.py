"""What quantization and the FP8-domain transpose lost, counted where the codes are."""

from __future__ import annotations

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._words import FP8_TENSOR, refuse
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor
from fp8moe_cutlass.typing import Array

SHIFTS = 17
COUNTS = 4 + SHIFTS  # words: live, underflowed, moved, flushed, and the histogram of shifts

_op = operator("count_codes")


def count_codes(
    q: Fp8Tensor,
    plan: RoutingPlan,
    counts: Array,
    *,
    columns: Fp8Tensor | None = None,
    stride: int = 1,
) -> None:
    """Adds to counts [21] int64 what rows 0, stride, 2 stride, ... of q hold. q [T, C] in "row"
    layout, or [R, C] in "gemm" layout, of which rows without an assignment are left out.

    counts[0]: codes in live tiles, 1x128 tiles that hold a nonzero code. counts[1]: those of them
    that are 0. With `columns`, what permute_transpose_fp8 made of q (of which the scales alone are
    read), and counting a row once for every kept assignment: counts[2]: nonzero codes; counts[3]:
    those of them that the shift makes 0; counts[4 + k]: live tiles by their shift k (k <= 0 in 4,
    k >= 16 in 20; where each channel has its own, the largest). Shifts need power-of-two scales.
    """
    if not isinstance(q, Fp8Tensor):
        refuse("count_codes", "q", FP8_TENSOR, q)
    if columns is not None and not isinstance(columns, Fp8Tensor):
        refuse("count_codes", "columns", FP8_TENSOR, columns)
    if columns is not None and not (q.pow2 and columns.pow2):
        raise ValueError("[count_codes] columns need power-of-two scales; got pow2=False")
    _op(q, plan, columns, stride, counts)
