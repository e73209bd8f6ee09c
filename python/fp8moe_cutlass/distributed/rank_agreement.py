"""The words on which ranks must agree, or they would misread each other's rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fp8moe_cutlass.recipe import WORDS, Fp8Recipe


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
        """Raises ValueError, naming the ranks, if the values of one of the words [len(self), ranks]
        differ."""
        for name, values in zip(self._fields, words, strict=True):
            if len(set(values)) > 1:
                holders: dict[int, list[int]] = {}
                for rank, value in zip(ranks, values, strict=True):
                    holders.setdefault(value, []).append(rank)
                what, read = _READ[name]
                got = "; ".join(
                    f"{read(v)} on rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}"
                    for v, who in holders.items()
                )
                raise ValueError(f"[MoEExperts] {what} must be equal on all ranks; got {got}")


def recipe_word(recipe: Fp8Recipe | None) -> int:
    """The word for what a recipe puts into packed rows, and makes of them."""
    if recipe is None:
        return 0
    of = recipe.scale, recipe.grad_dtype, recipe.weighting, recipe.rounding
    return _RECIPES.index(of)


def _recipe(word: int) -> str:
    found = _RECIPES[word]
    if not found:
        return "none (bfloat16)"
    scale, grad_dtype, weighting, rounding = found
    more = "" if weighting == "activation" else f", weighting {weighting}, rounding {rounding}"
    return f"{scale} scales, gradients in {grad_dtype}{more}"


def _yes(word: int) -> str:
    return str(bool(word))


_AGREED = ("scale", "grad_dtype", "weighting", "rounding")  # as recipe_word has them
_RECIPES = (None, *itertools.product(*(WORDS[name] for name in _AGREED)))
# What an error calls a word, and how it reads it.
_READ: dict[str, tuple[str, Callable[[int], str]]] = {
    "num_experts": ("num_experts", str),
    "hidden_size": ("hidden_size", str),
    "slots": ("the number of slots", str),
    "rank_capacity": ("rank_capacity", lambda rows: str(rows or None)),
    "recipe": ("recipe", _recipe),
    "x_grad": ("x.requires_grad", _yes),
    "probs_grad": ("topk_weights.requires_grad", _yes),
    "weights_grad": ("requires_grad of the weights", _yes),
}
