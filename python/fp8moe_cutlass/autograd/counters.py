"""A layer's counters of what FP8 costs it: one tensor, which the block adds to where the codes are.

telemetry.py makes and reads them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor

NAMES = ("x", "h", "dout", "dz", "x columns", "dout columns")


class Counters(NamedTuple):
    """counts [len(NAMES), ops.quantize.COUNTS] i64, over every `every`-th row."""

    counts: Tensor
    every: int


def count(
    counters: Counters,
    name: str,
    t: Fp8Tensor,
    plan: RoutingPlan,
    columns: Fp8Tensor | None = None,
) -> None:
    """ops.count_codes into the row of `name`; nothing of `columns` with float32 scales, which have
    no shifts."""
    if columns is not None and not (t.pow2 and columns.pow2):
        return
    row = counters.counts[NAMES.index(name)]
    ops.count_codes(t, plan, row, columns=columns, stride=counters.every)
