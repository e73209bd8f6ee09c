"""The words on which ranks must agree, or they would misread each other's rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.typing import Fp8DType, ScaleKind


class Terms(NamedTuple):
    """The words each rank tells all others, as integers."""

    num_experts: int
    hidden_size: int
    slots: int
    rank_capacity: int  # rows of a pair of ranks, 0: exact
    recipe: int  # recipe_word
    x_grad: bool  # whether backward is to bring back dx, dprobs, and to find weight gradients
    probs_grad: bool
    weights_grad: bool

    def mark(self, backward: bool) -> tuple[int, int, int, int]:
        """The same in 16 bytes, and which of a step's exchanges it is."""
        flags = self.x_grad | self.probs_grad << 1 | self.weights_grad << 2 | backward << 3
        sizes = self.num_experts << 16 | self.slots
        return self.hidden_size, self.rank_capacity, sizes, self.recipe << 4 | flags

    def check(self, words: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
        """Raises ValueError, naming the ranks, if their words [ranks, len(self)] differ."""
        if all(of_rank == words[0] for of_rank in words):
            return
        for name, values in zip(self._fields, zip(*words, strict=True), strict=True):
            holders = {v: [r for r, w in zip(ranks, values, strict=True) if w == v] for v in values}
            if len(holders) > 1:
                what, read = _READ[name]
                got = "; ".join(
                    f"{read(v)} on rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}"
                    for v, who in holders.items()
                )
                raise ValueError(f"[MoEExperts] {what} must be equal on all ranks; got {got}")


def recipe_word(recipe: Fp8Recipe | None) -> int:
    """The word for what a recipe puts on the wire."""
    return _RECIPES.index(_format(recipe))


def _format(recipe: Fp8Recipe | None) -> str:
    if recipe is None:
        return "none (bfloat16)"
    return f"{recipe.scale} scales, gradients in {recipe.grad_dtype}"


def _yes(word: int) -> str:
    return str(bool(word))


_FP8: tuple[Fp8DType, ...] = ("e4m3", "e5m2")
_SCALES: tuple[ScaleKind, ...] = ("pow2", "fp32", "amax")
_RECIPES = (
    _format(None),
    *(
        _format(Fp8Recipe(gradient, scale, columns="column"))
        for gradient, scale in itertools.product(_FP8, _SCALES)
    ),
)
# What an error calls a word, and how it reads it.
_READ: dict[str, tuple[str, Callable[[int], str]]] = {
    "num_experts": ("num_experts", str),
    "hidden_size": ("hidden_size", str),
    "slots": ("the number of slots", str),
    "rank_capacity": ("rank_capacity", lambda rows: str(rows or None)),
    "recipe": ("recipe", _RECIPES.__getitem__),
    "x_grad": ("x.requires_grad", _yes),
    "probs_grad": ("topk_weights.requires_grad", _yes),
    "weights_grad": ("requires_grad of the weights", _yes),
}
