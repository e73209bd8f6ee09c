"""The grouped GEMMs' choice among candidates, beside a record in which every candidate was timed.

That tiles cover D, each element once, is tests/cpp/test_schedule.cpp's to show; that all candidates
give the same bits, tests/gpu/test_grouped_gemm_gpu.py's.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8moe_cutlass import _C

RECORD = Path(__file__).parents[1] / "docs" / "benchmarks" / "gemm-candidates.json"
H100 = 132
# The record's clock resolves half a microsecond.
CLOCK_MS = 0.001


def query(row: dict[str, Any]) -> tuple[Any, ...]:
    sizes = (*(row["shape"][name] for name in "MNKE"), H100)
    wgrad = (row["accumulate"], row["columns"]) if row["op"] == "wgrad" else ()
    return (row["op"], *sizes, row["dtype"], *wgrad)


def way(choice: dict[str, Any]) -> list[Any]:
    """As the record has a candidate, all of one launch."""
    return [list(choice["tile"]), choice["dynamic"], choice["load_d"]]


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RECORD.read_text())["results"]
    return found


def chosen_ms(row: dict[str, Any]) -> float:
    choice = way(_C.explain_grouped_gemm(*query(row)))
    return float(row["candidate_ms"][row["candidates"].index(choice)])


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def test_the_record_has_every_candidate_of_many_cases() -> None:
    recorded = rows()
    for row in recorded:
        ways = [way(candidate) for candidate in _C.grouped_gemm_candidates(*query(row))]
        assert row["candidates"] == ways
        assert row["same_bits"]
    fprop = [row for row in recorded if row["op"] != "wgrad"]
    each = [row["shape"]["M"] / row["shape"]["E"] for row in recorded]
    depth = [row["shape"]["N" if row["op"] == "dgrad" else "K"] / 128 for row in fprop]
    assert len({row["model"].split(" EP")[0] for row in recorded}) >= 7
    assert min(each) < 40
    assert max(each) > 8000
    assert min(depth) == 2
    assert max(depth) >= 64
    assert {row["dtype"] for row in fprop} == {"bfloat16", "float32"}


@pytest.mark.parametrize("record", ["fit", "check"])  # constants are fitted to the first
@pytest.mark.parametrize("wgrad", [False, True], ids=["fprop and dgrad", "wgrad"])
def test_the_choice_is_near_the_fastest(wgrad: bool, record: str) -> None:
    chosen = [row for row in rows() if row["record"] == record and (row["op"] == "wgrad") == wgrad]
    over, before, far = [], [], 0
    for row in chosen:
        ms, fastest = chosen_ms(row), min(row["candidate_ms"])
        over.append(ms / fastest)
        before.append(ms / row["earlier_rule_ms"])
        far += ms > max(1.03 * fastest, fastest + CLOCK_MS)
    assert len(chosen) > 30
    assert mean(over) <= 1.011
    assert far <= 0.09 * len(chosen)
    assert max(over) < 1.15
    assert mean(before) <= 1.01  # the rule of eight predicates, with its split tiles


def test_the_recorded_models_are_as_fast_as_before() -> None:
    """fprop and dgrad of five models, balanced and ragged: the cases of benchmarks/gemm.py."""
    before = [
        chosen_ms(row) / row["earlier_rule_ms"]
        for row in rows()[:80]
        if row["op"] != "wgrad" and row["dtype"] == "bfloat16"
    ]
    assert len(before) == 40
    assert mean(before) <= 1.0
    assert max(before) <= 1.045


def tile(gemm: str, m: int, n: int, k: int, e: int) -> object:
    return _C.explain_grouped_gemm(gemm, m, n, k, e, H100)["tile"]


def test_rows_are_spread_over_the_experts() -> None:
    """Half of 256 experts have more than the mean of 128 rows, and tail tiles beside whole ones: so
    128x192 is no slower than 192x128, and faster where all have 128. Of 16 rows of tiles, tail
    tiles cost as if all experts had them."""
    assert tile("fprop", 256 * 128, 4096, 7168, 256) == (128, 192)
    assert tile("fprop", 16 * 2048, 3072, 4096, 16) == (192, 128)
    assert tile("fprop", 128 * 256, 1536, 2048, 128) == (128, 192)
    # Of equal tiles in equally many waves the one with more columns, as in the first row.
    assert tile("fprop", 32 * 1024, 4096, 7168, 32) == (128, 192)
    assert tile("dgrad", 32 * 1024, 7168, 2048, 32) == (128, 192)


def test_much_work_takes_several_launches() -> None:
    """CTAs drift apart; what they share leaves the L2."""

    def launches(gemm: str, m: int, e: int) -> object:
        return _C.explain_grouped_gemm(gemm, m, 2816, 2048, e, H100)["launches"]

    tokens = 262_144 * 6
    assert launches("fprop", tokens, 64) == launches("wgrad", tokens, 64) == 6
    assert (launches("fprop", tokens, 2), launches("fprop", tokens, 1)) == (2, 1)
    assert launches("fprop", tokens // 16, 64) == launches("wgrad", tokens // 16, 64) == 1
    assert {_C.explain_grouped_gemm(*query(row))["launches"] for row in rows()[:80]} == {1}


def sizes() -> Iterator[tuple[int, ...]]:
    return itertools.product((0, 1, 4096), (16, 4096), (16, 7168), (1, 64))


def test_the_choice_is_a_candidate_and_the_same_each_time() -> None:
    for m, n, k, e in sizes():
        for how in (("bfloat16",), ("float32",)):
            for gemm in ("fprop", "dgrad", "wgrad"):
                asked = (gemm, m, n, k, e, H100, *how)
                choice = _C.explain_grouped_gemm(*asked)
                assert _C.explain_grouped_gemm(*asked) == choice
                assert way(choice) in [way(c) for c in _C.grouped_gemm_candidates(*asked)]


def test_other_boards_choose_too() -> None:
    """The choice depends on the SMs, and never on an order of tests."""

    def tiles(sms: int) -> set[Any]:
        cases = ((m, n) for m in range(64, 4096, 320) for n in range(1024, 8192, 512))
        return {_C.explain_grouped_gemm("fprop", m, n, 4096, 1, sms)["tile"] for m, n in cases}

    assert tiles(132) == tiles(78) == {(128, 128), (128, 192), (192, 128)}


def test_a_forced_candidate_is_what_is_explained() -> None:
    asked = ("wgrad", 4096, 2048, 2048, 8, H100, "float32", True)
    try:
        for candidate in _C.grouped_gemm_candidates(*asked):
            _C.force_grouped_gemm(candidate)
            assert way(_C.explain_grouped_gemm(*asked)) == way(candidate)
        with pytest.raises(ValueError, match="forced candidate is not legal"):
            _C.explain_grouped_gemm("fprop", 4096, 2048, 2048, 8, H100)  # it loads D
    finally:
        _C.force_grouped_gemm(None)
    assert len(_C.grouped_gemm_candidates(*asked)) == 12
