"""The model of expert parallelism: expected ranks against counting, time against
sums by hand; and docs/scale-out.md shows what the model prints."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from fp8moe_cutlass.bench import ep_model as model

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
    assert model.zipf(2, 2, 2) == (2.0, 1.0)
    ranks, fullest = model.zipf(64, 1, 8)
    weights = [1 / (e + 1) for e in range(64)]
    assert ranks == 1.0
    assert fullest == pytest.approx(8 * sum(weights[:8]) / sum(weights), rel=0.05)


V3 = model.Layer("V3", 4096, 8, 256, 7168, ms=10.0, wgrad_ms=3.0, bf16_ms=16.0)


def test_one_rank_exchanges_nothing() -> None:
    step = model.step(V3, 1)
    assert (step.exchange, step.exposed, step.total, step.efficiency) == (0.0, 0.0, 10.0, 1.0)


def test_a_node_by_hand() -> None:
    """8 ranks: 7/8 of the distinct ranks are others; dx is hidden behind the weight gradients."""
    links = model.Links(nvlink_gb_s=100.0, collective_us=10.0, host_us=20.0)
    rows = 4096 * model.distinct(256, 8, 8) * 7 / 8
    sizes = (7168 + 224 + 64, 2 * 7168, 7168 + 224, 2 * 7168 + 32)
    times = [0.01 + rows * size / 1e8 for size in sizes]
    step = model.step(V3, 8, links)
    assert step.exchange == pytest.approx(sum(times) + 0.03)
    assert step.exposed == pytest.approx(sum(times[:3]) + 0.03 + max(times[3] - 3.0, 0.0))
    fixed = model.step(V3, 8, links, spare=1.25).exchange
    assert fixed == pytest.approx(sum(0.01 + 1.25 * (t - 0.01) for t in times), rel=1e-4)


def test_hierarchy_sends_less_over_the_network() -> None:
    links = model.Links()
    for ranks in (16, 64, 256):
        flat, tiered = model.flat(V3, ranks, links), model.hierarchical(V3, ranks, links)
        assert tiered.network < flat.network
        assert tiered.peers < flat.peers
        assert model.step(V3, ranks, tiered=True).exchange < model.step(V3, ranks).exchange
    assert model.hierarchical(V3, 8, links) == model.flat(V3, 8, links)


def test_a_record_without_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="a forward\\+backward row of V3; got none"):
        model.measured({"results": []}, "V3", 256)


def test_the_document_shows_what_the_model_prints() -> None:
    record = json.loads((ROOT / "docs/benchmarks/2026-11-21-h200-layer.json").read_text())
    document = (ROOT / "docs/scale-out.md").read_text()
    for table in model.tables(record):
        assert table in document
