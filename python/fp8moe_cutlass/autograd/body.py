"""The values that the block and its two bodies, fp8.py and bf16.py, pass to each other.

Both have the functions enter, make_plan, grouped_plan, dropped, weights, forward and backward, the
type Saved, and of its tensors SAVED_TENSORS and ROWS_APART.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fp8moe_cutlass.activation import SWIGLU, Activation
from fp8moe_cutlass.recipe import Fp8Recipe

COUNTED = ("x", "h", "dout", "dz", "x columns", "dout columns")


class Options(NamedTuple):
    """The options of a block; nn.MoEExperts describes them."""

    recipe: Any = Fp8Recipe()  # None: bfloat16
    preactivation: str = "save"  # "save_fp8", "recompute"
    transposed_weights: str = "save"  # "recompute"
    activation: Activation = SWIGLU


class Need(NamedTuple):
    """Whose gradients a backward may be asked for."""

    x: bool = True
    probs: bool = True
    gate_up: bool = True
    down: bool = True
    lora: bool = False
    biases: bool = False


class Biases(NamedTuple):
    """The biases of both projections: z gets gate_up[e], and a row of the output its weight times
    down[e]."""

    gate_up: Tensor  # [E, 2I], in the order of gate_up's rows
    down: Tensor  # [E, H]


class Lora(NamedTuple):
    """Low-rank terms of both projections: W x becomes W x + scaling B A x, per expert."""

    factors: tuple[Tensor, ...]  # A of gate_up [E, r, H], its B [E, 2I, r], [E, r, I], [E, H, r]
    scaling: float


class Counters(NamedTuple):
    """A layer's counters of what FP8 costs it; telemetry.py makes and reads them.

    counts [len(COUNTED), ops.quantize.COUNTS] i64, over every `every`-th row.
    """

    counts: Tensor
    every: int


class ForwardWeights(NamedTuple):
    """Both weights as a forward multiplies them, and what its backward makes its own from."""

    multiplied: Any  # Fp8Weights, or two bf16 tensors
    source: tuple[Any, Any]  # codes, or the parameters


class Gradients(NamedTuple):
    """Gradients of one backward; None: not asked for."""

    dx: Tensor | None  # bf16, as x came: [T, H], or [R, H] grouped
    dprobs: Tensor | None  # f32, as the probs came
    gate_up: Any  # fp8_wgrad.Wgrad or bf16.Wgrad, still to be run
    down: Any
    workspace: Tensor | None = None  # that both may share, in the order of the backward's stream
    lora: list[Tensor | None] = []  # noqa: RUF012 (never changed): of a Lora's factors
    biases: tuple[Tensor | None, Tensor | None] = (None, None)


def by_slot(row_dprobs: Tensor, row_of: Tensor) -> Tensor:
    """dprobs[t, s] = row_dprobs[row_of[t, s]], 0 where the slot was dropped."""
    if row_dprobs.numel() == 0:
        return row_dprobs.new_zeros(row_of.shape)
    return row_dprobs[row_of.clamp(min=0)].masked_fill(row_of < 0, 0.0)
