"""The sizes of one exchange, and the rows and words that are on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fp8moe_cutlass.distributed.rank_agreement import Terms


@dataclass(frozen=True)
class Sizes:
    """The rows that one dispatch moves. Its gradient moves alike; both return in mirror image."""

    terms: Terms  # this rank's
    sent: list[int] | None  # rows to each rank; None: as many to every rank
    received: list[int] | None  # rows from each rank
    rows_sent: int
    rows: int  # received
    assignments: int  # at most so many entries of topk_idx travel on the received rows
    # [ranks] i32: where this rank's rows begin in what each rank received, if they travel through
    # the ranks' memory; None: by torch.distributed.
    first: Tensor | None = None


class Announced(NamedTuple):
    """Sizes on their way."""

    message: Tensor  # i32, of who announced
    work: Any  # to wait for; None: nothing


class Told(NamedTuple):
    """Sizes that the host has read."""

    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    assignments: int  # on them
    terms: Sequence[Sequence[int]]  # each word of Terms, by rank
    differed: Sequence[int]  # exchanges in which each rank's terms were not this rank's
    of_one: int  # the most rows that a rank gets from one, if that is known
    in_all: int  # and from all


class Returning(NamedTuple):
    """Rows on their way back."""

    rows: Tensor  # [., C]: those that come or, where they are read by their owners, that lie ready
    work: Any
    source: Tensor  # as it was given, which is read until they have come
