"""Fp8Recipe: the choices of number format a layer makes once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real
from typing import Any

from fp8moe_cutlass.typing import Columns, Engine, Fp8DType, Rounding, ScaleKind, Weighting

FLOAT32_MAX = 2.0**128 - 2.0**104
WORDS = {
    "grad_dtype": ("e4m3", "e5m2"),
    "scale": ("pow2", "fp32", "amax", "approx"),
    "columns": ("block", "column"),
    "weighting": ("activation", "output"),
    "rounding": ("none", "product", "silu"),
}


@dataclass(frozen=True)
class Fp8Recipe:
    """The number formats and scales by which a layer quantizes.

    grad_dtype: format of gradients; activations and weights are in E4M3.
    scale: "pow2", power-of-two scales, which the FP8-domain transpose shifts exactly; or float32
      scales: "fp32" multiplies by largest / magnitude, "amax" divides by magnitude / largest,
      "approx" is SGLang's rule (docs/reference/numerics.md).
    eps: floor of a tile's magnitude. activation_eps: that of h in the forward; None: eps.
    columns: tiles of the operands contracted over tokens, "block" (128x128, the fast wgrad) or
      "column" (1x128 along tokens, the most accurate one).
    weighting: what the routing weight multiplies, "activation" (h, before it is quantized) or
      "output" (the rows of the down projection as they are summed, as inference engines have it).
    rounding: what is rounded to bfloat16 on the way to h: "none"; "product", silu(gate) * up;
      "silu", silu(gate) and then the product. For weighting "output" and plain SwiGLU.
    Raises ValueError for an unknown word, and for float32 scales with "block": a 128x128 block has
    one scale only if its rows' scales can be shifted onto it, and float32 scales cannot.
    """

    grad_dtype: Fp8DType = "e4m3"
    scale: ScaleKind = "pow2"
    eps: float = 1e-10
    columns: Columns = "block"
    weighting: Weighting = "activation"
    activation_eps: float | None = None
    rounding: Rounding = "none"

    def __post_init__(self) -> None:
        for name, words in WORDS.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in words:
                raise ValueError(f"[Fp8Recipe] {name} must be one of {words}; got {value!r}")
        for name, eps in (
            ("eps", self.eps),
            ("activation_eps", 0.0 if self.activation_eps is None else self.activation_eps),
        ):
            is_number = isinstance(eps, Real) and not isinstance(eps, bool)
            if not is_number or not 0.0 <= float(eps) <= FLOAT32_MAX:
                raise ValueError(f"[Fp8Recipe] {name} must be in [0, 3.4e38]; got {eps!r}")
        if self.scale != "pow2" and self.columns == "block":
            raise ValueError(
                f"[Fp8Recipe] columns must be 'column' with scale {self.scale!r}; got 'block', "
                "whose transpose shifts codes by powers of two"
            )
        if self.rounding != "none" and self.weighting != "output":
            raise ValueError(
                f"[Fp8Recipe] weighting must be 'output' with rounding {self.rounding!r}; "
                f"got {self.weighting!r}"
            )
        _ = self.word  # before a graph asks, as Activation says

    @staticmethod
    def rollout(engine: Engine) -> Fp8Recipe:
        """The recipe whose forward has the bits of an inference engine's block-FP8 experts on
        Hopper, by DeepGEMM's contiguous kernels: "sglang" (0.5.23) or "vllm" (0.33.0).
        docs/how-to/rollout.md says what is equal."""
        if engine == "vllm":
            floors: Any = {"eps": 4.48e-8, "activation_eps": 1e-10}
            return Fp8Recipe(weighting="output", rounding="silu", **floors)
        if engine == "sglang":
            return Fp8Recipe(
                scale="approx", columns="column", weighting="output", rounding="product"
            )
        raise ValueError(f"[rollout] engine must be 'sglang' or 'vllm'; got {engine!r}")

    @cached_property
    def word(self) -> str:
        """The recipe as one word without spaces; of_word reads it again."""
        return ",".join(str(getattr(self, name)) for name in _FIELDS)

    @staticmethod
    def of_word(word: str) -> Fp8Recipe:
        """The Fp8Recipe of a `word`."""
        said: dict[str, Any] = dict(zip(_FIELDS, word.split(","), strict=True))
        for name in ("eps", "activation_eps"):
            said[name] = None if said[name] == "None" else float(said[name])
        return Fp8Recipe(**said)


_FIELDS = tuple(field.name for field in fields(Fp8Recipe))
