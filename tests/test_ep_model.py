"""The model of expert parallelism: expected ranks against counting, time against sums by hand, its
constants found again; and docs/scale-out.md shows what the records and the model say."""

from __future__ import annotations

import itertools
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from fp8moe_cutlass.bench import ep_fit, ep_page
from fp8moe_cutlass.bench import ep_model as model
from fp8moe_cutlass.bench.ep_report import ALONE, LAYER
from fp8moe_cutlass.bench.report import fill

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("experts", "slots", "parts"), [(8, 3, 4), (6, 2, 3), (8, 8, 2), (5, 1, 5)]
)
def test_distinct_ranks_by_counting_every_choice(experts: int, slots: int, parts: int) -> None:
    each = experts // parts
    choices = list(itertools.combinations(range(experts), slots))
    mean = sum(len({e // each for e in c}) for c in choices) / len(choices)
    assert model.distinct(experts, slots, parts) == pytest.approx(mean)


def test_zipf_by_hand() -> None:
    """Every expert of two is chosen: both ranks get all. One of 64: the first rank gets most."""
    assert model.zipf(2, 2, 2) == model.Skew(ranks=2.0, rows=1.0, load=1.0)
    skew = model.zipf(64, 1, 8)
    weights = [1 / (e + 1) for e in range(64)]
    assert skew.ranks == 1.0
    assert skew.rows == skew.load == pytest.approx(8 * sum(weights[:8]) / sum(weights), rel=0.05)


V3 = model.Layer("V3", 4096, 8, 256, 7168, ms=10.0, wgrad_ms=3.0, bf16_ms=16.0)


def test_one_rank_exchanges_nothing() -> None:
    step = model.step(V3, 1)
    assert (step.exchange, step.rest, step.total, step.efficiency) == (0.0, 0.0, 10.0, 1.0)


def test_a_node_by_hand() -> None:
    """8 ranks: 7/8 of the distinct ranks are others."""
    links = model.Links(
        nvlink_gb_s=100.0,
        collective_us=3.0,
        peer_us=1.0,
        host_us=20.0,
        gaps_us=50.0,
        copy_gb_s=1000.0,
    )
    d = model.distinct(256, 8, 8)
    sizes = (7168 + 224 + 64, 2 * 7168, 7168 + 224, 2 * 7168 + 32)
    times = [0.01 + 4096 * d * 7 / 8 * size / 1e8 for size in sizes]
    step = model.step(V3, 8, links)
    assert step.exchange == pytest.approx(sum(times))
    # Written once more for each rank but one: packed rows and sums; and those sums read and summed.
    written = (d - 1) * sum(sizes) + (d + 1) * (sizes[1] + sizes[3])
    assert step.rest == pytest.approx(4096 * written / 1e9 + 0.03 + 0.05)
    assert step.total == pytest.approx(10.0 + step.exchange + step.rest)
    hidden = model.step(V3, 8, links, hide=True).total
    assert hidden == pytest.approx(step.total - min(times[3], 3.0))
    fixed = model.step(V3, 8, links, spare=1.25)
    assert fixed.exchange == pytest.approx(sum(0.01 + 1.25 * (t - 0.01) for t in times), rel=1e-4)
    assert fixed.rest == pytest.approx(step.rest - 0.03)
    bf16 = model.step(V3, 8, links, fp8=False)
    assert (bf16.compute, bf16.rest) == (16.0, 0.0)


def test_hierarchy_sends_less_over_the_network() -> None:
    links = model.Links()
    for ranks in (16, 64, 256):
        flat, tiered = model.flat(V3, ranks, links), model.hierarchical(V3, ranks, links)
        assert tiered.network < flat.network
        assert tiered.far < flat.far
        assert model.step(V3, ranks, tiered=True).exchange < model.step(V3, ranks).exchange
    assert model.hierarchical(V3, 8, links) == model.flat(V3, 8, links)


def test_the_fit_finds_the_constants_of_a_record() -> None:
    """Rows made by the model of known constants: 2, 4 and 8 ranks, two hidden sizes."""
    known = model.Links(
        nvlink_gb_s=250.0,
        collective_us=20.0,
        peer_us=5.0,
        host_us=90.0,
        gaps_us=300.0,
        copy_gb_s=4000.0,
    )
    rows: list[dict[str, Any]] = []
    for ranks, hidden in itertools.product((2, 4, 8), (2048, 7168)):
        shape = {"W": ranks, "T": 4096, "S": 8, "E": 32 * ranks, "H": hidden, "I": 1024}
        layer = model.Layer("V3", 4096, 8, 32 * ranks, hidden, ms=10.0)
        flat = model.flat(layer, ranks, known)
        common = {"model": "V3", "shape": shape, "variant": ep_fit.EXACT}
        common["rows_sent"] = 4096 * flat.nvlink

        def exchange(size: int, layer: Any = layer, flat: Any = flat, ranks: int = ranks) -> float:
            return model.exchange_ms(layer, flat, size, known, ranks)

        fp8, bf16 = exchange(model.wire(layer).dispatch), exchange(2 * hidden)
        step = model.step(layer, ranks, known)
        rows += [
            common | {"op": "dispatch", "limit_ms": fp8, "peers": {ALONE: bf16}},
            common | {"op": "combine", "limit_ms": bf16, "peers": {}},
            common | {"op": "plan and sizes", "ms": model.sizes_ms(flat, known)},
            common
            | {"op": LAYER, "ms": step.total, "alone_ms": 10.0, "exchange_ms": step.exchange},
        ]
        slower = dict(rows[-4]) | {"variant": "zipf, exact", "limit_ms": 99.0}
        rows.append(slower)  # is not fitted to
    found = ep_fit.fit({"environment": {"copy_tb_s": 4.0}, "results": rows})
    assert astuple(found) == pytest.approx(astuple(replace(known, node=found.node)))
    balanced = [r for r in rows if r["op"] == LAYER]
    assert [ep_fit.modelled(r, found) for r in balanced] == pytest.approx(
        [r["ms"] for r in balanced]
    )
    skewed = ep_fit.modelled(balanced[0] | {"variant": "zipf, exact"}, found)
    load = model.zipf(64, 8, 2).load
    assert skewed == pytest.approx(balanced[0]["ms"] + 10.0 * (load - 1.0))


def test_a_record_without_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="a forward\\+backward row of V3; got none"):
        ep_fit.measured({"results": []}, {"results": []}, "V3", "V3", 256)


def test_the_documents_show_what_the_records_say() -> None:
    for page, text in ep_page.pages(ROOT).items():
        assert page.read_text() == text, page


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="must have the marker '<!-- layer: written by"):
        fill("# A page", "ep_page", {"layer": "| a |"})
    begun = "<!-- layer: written by bench.ep_page -->"
    with pytest.raises(ValueError, match="must have the marker '<!-- end of layer -->'; got none"):
        fill(begun, "ep_page", {"layer": "| a |"})
