"""TransformerEngine's permutation from its rules alone: loops over experts and tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Rows:
    """Where the rows of a mask [T, E] go, each expert padded to a multiple of `align`."""

    token: Tensor  # [R] token of each row, -1 on padding
    expert: Tensor  # [R]
    row_of: Tensor  # [T, E] row in memory, -1 where not routed
    unpadded: Tensor  # [T, E] row counted without padding, -1 where not routed
    pad_offsets: Tensor  # [E]
    target: Tensor  # [E]

    @property
    def valid(self) -> Tensor:
        return self.token >= 0

    def gather(self, x: Tensor) -> Tensor:
        """x[token] for each row, zeros on padding; differentiable."""
        return x[self.token.clamp(min=0)] * self.valid.to(x.dtype)[:, None]

    def gather_probs(self, probs: Tensor) -> Tensor:
        return probs[self.token.clamp(min=0), self.expert] * self.valid.to(probs.dtype)

    def sum(self, y: Tensor, probs: Tensor | None = None) -> Tensor:
        """The rows of each token, weighted; differentiable."""
        weight = self.valid.to(y.dtype) if probs is None else self.gather_probs(probs)
        out = y.new_zeros(self.row_of.shape[0], y.shape[1])
        return out.index_add(0, self.token.clamp(min=0), y * weight[:, None])


def rows_of(mask: Tensor, align: int = 1) -> Rows:
    tokens, experts = mask.shape
    token: list[int] = []
    expert: list[int] = []
    row_of = torch.full((tokens, experts), -1)
    unpadded = row_of.clone()
    pads, target, count = [], [], 0
    for e in range(experts):
        pads.append(len(token) - count)
        mine = [t for t in range(tokens) if mask[t, e]]
        for t in mine:
            row_of[t, e], unpadded[t, e] = len(token), count
            token.append(t)
            count += 1
        target.append(-(-len(mine) // align) * align)
        token += [-1] * (target[-1] - len(mine))
        expert += [e] * target[-1]
    as_ids = [torch.tensor(v, dtype=torch.int64) for v in (token, expert)]
    return Rows(*as_ids, row_of, unpadded, torch.tensor(pads), torch.tensor(target))


def check_row_id_map(row_id_map: Tensor, rows: Rows) -> None:
    """Every defined cell of the map [T, 2E+1]."""
    tokens, experts = rows.row_of.shape
    assert (row_id_map.dtype, tuple(row_id_map.shape)) == (torch.int32, (tokens, 2 * experts + 1))
    for t, cells in enumerate(row_id_map.tolist()):
        ids = [e for e in range(experts) if rows.unpadded[t, e] >= 0][::-1]
        n = len(ids)
        assert cells[2 * experts] == n
        assert cells[experts : experts + n] == ids
        assert cells[:n] == [int(rows.unpadded[t, e]) for e in ids]


def random_mask(tokens: int, experts: int, share: float = 0.4) -> Tensor:
    """[T, E] bool; expert 1 is empty, token 3 is dropped, the last expert has every other token."""
    mask = torch.rand(tokens, experts) < share
    mask[:, 1] = False
    mask[3:4] = False
    mask[4:, -1] = True
    return mask
