"""RoutingPlan: where each (token, slot) assignment lands once rows are grouped by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8moe_cutlass.tensor import TILE, pad4
from fp8moe_cutlass.typing import Array

STATUS_WORDS = 8
_STATUS = (
    "assignments dropped because the capacity was reached",
    "expert ids out of range, dropped",
    "scales met by an FP8-domain transpose that are not positive powers of two",
)


@dataclass(frozen=True, eq=False, repr=False)
class RoutingPlan:
    """A routing of T tokens x S slots to E experts; built by `ops.route` or
    `ops.plan_from_counts`.

    One int32 buffer on the device (include/fp8moe/plan.h has its layout) and the sizes known on
    the host, so nothing here waits for the device but `check`. Letters: A = capacity, R = rows,
    Kcap = columns. Rows are expert-major, within an expert in token order, then slot order; each
    expert's rows start at a multiple of `align`. Rows at or past row_offsets[E] are unspecified.
    """

    buffer: Array
    tokens: int
    slots: int
    experts: int
    align: int
    capacity: int

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(tokens, slots, experts, align, capacity), as the flat ops take them after the buffer."""
        return (self.tokens, self.slots, self.experts, self.align, self.capacity)

    @property
    def rows(self) -> int:
        """R: rows of permuted operands; no routing of `capacity` assignments needs more."""
        return rows_bound(self.capacity, self.experts, self.align)

    @property
    def columns(self) -> int:
        """Kcap: columns of transposed operands, whose segments are aligned to 128."""
        return rows_bound(self.capacity, self.experts, TILE)

    @property
    def buffer_size(self) -> int:
        """Words of the buffer."""
        return buffer_words(*self.sizes)

    @property
    def device(self) -> Any:
        """The framework's device object; "cpu" for arrays that have none."""
        return getattr(self.buffer, "device", "cpu")

    @property
    def status(self) -> Array:
        """[8] counters, all zero for a clean plan: overflow, bad expert ids, bad scales."""
        return self.buffer[:STATUS_WORDS]

    @property
    def tokens_per_expert(self) -> Array:
        """[E] rows of each expert that carry an assignment."""
        return self._words(STATUS_WORDS, self.experts)

    @property
    def row_offsets(self) -> Array:
        """[E+1] first row of each expert, padding included in the differences."""
        return self._words(STATUS_WORDS + pad4(self.experts), self.experts + 1)

    @property
    def col_offsets(self) -> Array:
        """[E+1] first column of each expert in transposed operands, multiples of 128."""
        at = STATUS_WORDS + pad4(self.experts) + pad4(self.experts + 1)
        return self._words(at, self.experts + 1)

    @property
    def token_of_row(self) -> Array:
        """[R] token of each row, -1 on padding."""
        return self._words(self._token_of_row_at, self.rows)

    @property
    def slot_of_row(self) -> Array:
        """[R] slot of each row, -1 on padding."""
        return self._words(self._token_of_row_at + pad4(self.rows), self.rows)

    @property
    def row_of(self) -> Array:
        """[T, S] row of each assignment, -1 where it was dropped."""
        words = self._words(self._row_of_at, self.tokens * self.slots)
        return words.reshape(self.tokens, self.slots)

    @property
    def col_blocks(self) -> Array:
        """[Kcap / 128, 4] of each 128 columns: first row, tokens, rows with padding (at most 128),
        and the expert, -1 past the last one's columns."""
        at, count = self._row_of_at + pad4(self.tokens * self.slots), self.columns // TILE
        return self._words(at, 4 * count).reshape(count, 4)

    def check(self) -> None:
        """Waits for the device and raises ValueError if the plan dropped or met anything wrong."""
        counts = [int(n) for n in self.status.tolist()]
        found = [f"{n} {what}" for n, what in zip(counts, _STATUS, strict=False) if n]
        if found:
            raise ValueError(f"[RoutingPlan] must be clean; got {'; '.join(found)}")

    def to(self, *args: Any, **kwargs: Any) -> RoutingPlan:
        """Moved to another device (torch)."""
        return RoutingPlan(self.buffer.to(*args, **kwargs), *self.sizes)

    @property
    def _token_of_row_at(self) -> int:
        return words_before_rows(self.experts)

    @property
    def _row_of_at(self) -> int:
        return self._token_of_row_at + 2 * pad4(self.rows)

    def _words(self, at: int, count: int) -> Array:
        return self.buffer[at : at + count]

    def __repr__(self) -> str:
        return (
            f"RoutingPlan(tokens={self.tokens}, slots={self.slots}, experts={self.experts}, "
            f"align={self.align}, capacity={self.capacity}, rows={self.rows}, device={self.device})"
        )


def rows_bound(capacity: int, experts: int, align: int) -> int:
    """align * floor((A + min(E, A) (align - 1)) / align): what any A assignments fit into."""
    if type(capacity).__name__ == "SymInt":  # a size that torch.compile does not know
        from torch import sym_min

        hit: int = sym_min(experts, capacity)  # type: ignore[no-untyped-call]
    else:
        hit = experts if experts < capacity else capacity  # min() takes as long as all the rest
    return align * ((capacity + hit * (align - 1)) // align)


def words_before_rows(experts: int) -> int:
    """Words of a plan's buffer in front of its rows: status, counts, both offsets."""
    return STATUS_WORDS + pad4(experts) + 2 * pad4(experts + 1)


def buffer_words(tokens: int, slots: int, experts: int, align: int, capacity: int) -> int:
    """Words of a plan's buffer: those in front, two per row, row_of, four per 128 columns."""
    rows, columns = rows_bound(capacity, experts, align), rows_bound(capacity, experts, TILE)
    words = words_before_rows(experts) + 2 * pad4(rows) + pad4(tokens * slots)
    return words + 4 * (columns // TILE)
