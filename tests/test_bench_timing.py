"""How bench takes its times, as far as a machine without a GPU goes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from fp8moe_cutlass.bench.timing import balanced_orders


@pytest.mark.parametrize("count", range(1, 9))
def test_each_call_follows_every_other_equally_often(count: int) -> None:
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert len(pairs) == count * (count - 1)
    assert len(set(pairs.values())) <= 1
