"""examples/language_model.py at its tiny size, and what plot.py and table.py make of its record."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

import plot
import table

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_it_trains_both_and_compares(
    device: torch.device,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("language_model")
    given = ["--size", "tiny", "--device", device.type, "--out", str(tmp_path)]
    example.main(example.parse(given))

    record = json.loads((tmp_path / "loss.json").read_text())
    fp8, bf16 = record["runs"]
    assert (fp8["variant"], bf16["variant"]) == ("fp8", "bf16")
    for run in (fp8, bf16):
        assert len(run["loss"]) == 20
        assert [step for step, _ in run["heldout"]] == list(range(2, 21, 2))
        assert run["heldout"][-1][1] < 0.8 * run["heldout"][0][1]
    # The same weights and batches: the first losses differ by FP8's rounding; but they do differ.
    assert fp8["loss"][0] != bf16["loss"][0]
    assert fp8["loss"][0] == pytest.approx(bf16["loss"][0], rel=0.01)
    printed = capsys.readouterr().out
    assert f"FP8 {fp8['heldout'][-1][1]:.4f}, bf16 {bf16['heldout'][-1][1]:.4f}" in printed
    assert "def " in printed.split("What the FP8 model writes")[1]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot.draw(record, tmp_path / "again.png")
    assert (tmp_path / "again.png").exists()
    ((_, *rows),) = table.tables_of(record)
    assert [row[0] for row in rows] == ["fp8", "bf16"]
