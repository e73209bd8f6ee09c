"""The sizes of one exchange, and the rows and words that are on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.distributed.rank_agreement import Terms
from fp8moe_cutlass.routing import RoutingPlan

SUMMED = {
    torch.bfloat16: 16,
    torch.float32: 4,
}  # unpermute_unpad takes multiples of so many columns


@dataclass(frozen=True)
class Sizes:
    """The rows that one dispatch moves. Its gradient moves alike; both return in mirror image."""

    terms: Terms  # this rank's
    sent: list[int] | None  # rows to each rank; None: as many to every rank
    received: list[int] | None  # rows from each rank
    rows_sent: int
    rows: int  # received
    assignments: int  # at most so many entries of topk_idx travel on the received rows
    # Where this rank's rows begin in what each rank received, [ranks]; None: they travel by
    # torch.distributed.
    begins: list[int] | None = None

    @cached_property
    def first(self) -> Any:
        """`begins` as an operator takes it."""
        return np.array(self.begins, np.int32)  # in a tenth of a tensor's time


class Words(NamedTuple):
    """A rank's terms, or their mark, on the device: i32."""

    once: Tensor  # [n]
    of_each: Tensor  # [ranks, n], the same to each


class Announced(NamedTuple):
    """Sizes on their way."""

    message: Tensor  # i32, of who announced
    work: Any  # to wait for before the host reads it; None: nothing


class Told(NamedTuple):
    """Sizes that the host has read."""

    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    assignments: int  # on them
    terms: Sequence[Sequence[int]]  # each word of Terms, by rank
    differed: Sequence[int]  # exchanges in which each rank's terms were not this rank's
    begins: list[int] | None  # where this rank's rows begin in what each receives, if it is told
    of_one: int  # then the most rows that a rank gets from one
    in_all: int  # and from all


class Returning(NamedTuple):
    """Rows on their way back."""

    rows: Tensor  # [., C]
    work: Any  # to wait for; None: nothing
    source: Tensor  # as it was given, which is read until they have come
    here: bool = True  # False: they lie where they are, and are read there


def sum_here(returning: Returning, plan: RoutingPlan) -> Tensor:
    """The sums [T, C] of rows that come here. On a GPU it is the current stream that waits."""
    if returning.work is not None:
        returning.work.wait()
    rows = returning.rows
    columns = rows.shape[1]
    more = -columns % SUMMED[rows.dtype]
    if more == 0:
        return ops.unpermute_unpad(rows, plan)  # type: ignore[no-any-return]
    return ops.unpermute_unpad(F.pad(rows, (0, more)), plan)[:, :columns]  # type: ignore[no-any-return]
