"""Activation: what stands between the two projections of an expert."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

from fp8moe_cutlass import _C

KINDS = _C.activations()  # of each kind: has a gate, a limit, alpha and offset


@dataclass(frozen=True)
class Activation:
    """h of z = x gate_up^T, [gate | up] of I columns each, or z [R, I] where there is no gate.

    kind: "swiglu": (up + offset) * gate * sigmoid(alpha * gate), of gate and up within the limit.
      "swiglu_limit_after": silu(gate) * up, of silu(gate) and up within the limit.
      "gelu_tanh": gelu(gate) * up, by the tanh formula.
      "relu2": relu(z)^2, without a gate.
    limit: of the two swiglu kinds, positive: gate, or silu(gate), is at most limit, up lies within
      [-limit, limit], and what is beyond has no gradient. None: there is none.
    alpha, offset: of "swiglu", alpha within [1, 4].
    interleaved: gate and up take turns in z: gate 0, up 0, gate 1, up 1, ...
    Raises ValueError for an unknown kind, and for a number that the kind does not have.
    """

    kind: str = "swiglu"
    alpha: float = 1.0
    offset: float = 0.0
    limit: float | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ValueError(f"[Activation] kind must be one of {[*KINDS]}; got {self.kind!r}")
        _, limited, scaled = KINDS[self.kind]
        for name in ("alpha", "offset", "limit"):
            value: Any = getattr(self, name)
            if value is None and name == "limit":
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"[Activation] {name} must be a number; got {value!r}")
            object.__setattr__(self, name, float(value))
        if type(self.interleaved) is not bool:
            raise ValueError(
                f"[Activation] interleaved must be True or False; got {self.interleaved!r}"
            )
        if self.limit == math.inf:
            object.__setattr__(self, "limit", None)
        if self.limit is not None and not self.limit > 0.0:
            raise ValueError(
                f"[Activation] limit must be positive, None for none; got {self.limit}"
            )
        if not scaled and (self.alpha, self.offset) != (1.0, 0.0):
            raise ValueError(
                f"[Activation] alpha and offset must be 1.0 and 0.0 of {self.kind!r}; "
                f"got {self.alpha} and {self.offset}"
            )
        if not 1.0 <= self.alpha <= 4.0 or not math.isfinite(self.offset):
            raise ValueError(
                "[Activation] alpha must lie in [1, 4] and offset be finite; "
                f"got {self.alpha} and {self.offset}"
            )
        if not limited and self.limit is not None:
            raise ValueError(f"[Activation] limit must be None of {self.kind!r}; got {self.limit}")
        if self.interleaved and not self.gated:
            raise ValueError(
                f"[Activation] interleaved must be False of {self.kind!r}, which has no gate; "
                "got True"
            )
        # Before a graph asks: where two activations differ in a number, torch.compile takes it for
        # a symbol, which it cannot write into a string.
        _ = self.word

    @property
    def gated(self) -> bool:
        """Whether z has a gate: 2I columns, not I."""
        return KINDS[self.kind][0]

    @property
    def parts(self) -> int:
        """Columns of z over those of h: 2, or 1 without a gate."""
        return 2 if self.gated else 1

    @cached_property
    def word(self) -> str:
        """The activation as one word without spaces; of_word reads it again."""
        return f"{self.kind},{self.alpha},{self.offset},{self.limit},{self.interleaved}"

    @staticmethod
    def of_word(word: str) -> Activation:
        """The Activation of a `word`."""
        kind, alpha, offset, limit, interleaved = word.split(",")
        most = None if limit == "None" else float(limit)
        return Activation(kind, float(alpha), float(offset), most, interleaved == "True")


SWIGLU = Activation()
