"""benchmarks/quality.py at its tiny size on a CPU: arms train, pairs start alike, the record."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import page_records
import plot
import quality
import quality_step
import quality_text
import quality_train
import table
from common import ignore
from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import MoEExperts
from quality_experts import OtherWgrad
from quality_model import ARMS, FLOAT32_SCALES, MODELS

CPU = torch.device("cpu")
TINY = MODELS["tiny"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of which each follows from the one before it, mostly."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    tokens = np.cumsum(random.choice([1, 2, 7], 4000, p=[0.8, 0.1, 0.1])) % 64
    tokens = tokens.astype(np.uint16)
    quality_text.write(folder, tokens[:3700], tokens[3700:], 64, {})
    return folder


def trained(text: Path, out: Path, arm: str, seed: int = 0, tokens: float = 768) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    read = quality_train.Text(text, TINY, CPU)
    quality_train.train(arm, seed, "tiny", read, tokens, 1e9, out, CPU)
    return json.loads((out / f"{arm}-{seed}.json").read_text())


def test_every_arm_trains_and_the_record_compares(text: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for arm in ARMS:
        trained(text, runs, arm)
    for arm in ("bf16", "fp8"):
        trained(text, runs, arm, seed=1)
    again = trained(text, tmp_path / "again", "bf16")

    found = {f"{r['arm']}-{r['seed']}": r for r in quality.runs_of(runs)}
    bf16 = found["bf16-0"]
    for name in ("loss", "grad_norm", "start", "first_batch", "entropy"):
        assert again[name] == bf16[name]  # the same bits
    assert [h[:2] for h in again["heldout"]] == [h[:2] for h in bf16["heldout"]]
    assert bf16["heldout"][-1][1] < bf16["heldout"][0][1]
    for name, run in found.items():
        assert run["complete"]
        assert len(run["loss"]) == run["steps"] == 6
        alike = (run["start"], run["first_batch"]) == (bf16["start"], bf16["first_batch"])
        assert alike == name.endswith("-0")
        if name not in ("bf16-0", "bf16-1"):
            assert run["loss"] != bf16["loss"]  # what the arm changes, it changes
            assert run["loss"][0] == pytest.approx(bf16["loss"][0], rel=0.02)
    counts = [step for step, shares in found["fp8-0"]["underflows"] if shares]
    assert counts == [0, 3, 5]

    record_path = tmp_path / "quality.json"
    quality.main(["--runs", str(runs), "--json", str(record_path)])
    record = json.loads(record_path.read_text())
    rows = {row["variant"]: row for row in record["results"]}
    assert rows.keys() == ARMS.keys()
    gap = rows["fp8"]["gap"]
    ends = [found[f"{arm}-{s}"]["heldout"][-1][1] for s in (0, 1) for arm in ("fp8", "bf16")]
    each = [ends[0] - ends[1], ends[2] - ends[3]]
    assert gap["mean"] == pytest.approx(sum(each) / 2)
    # Student's t of one degree of freedom: the half width is 12.706 |a - b| / 2.
    assert gap["high"] - gap["mean"] == pytest.approx(12.706 * abs(each[0] - each[1]) / 2)
    assert rows["fp8"]["bar"].keys() == {"mean", "interval", "no_growth", "kept"}
    assert rows["double"]["gap"]["seeds"] == 1
    other = rows["fp8"]["other_experts"]
    assert 0 <= other["assignments"] <= other["tokens"] <= 1
    assert 0 < rows["bf16"]["entropy"] <= 1
    for of in (record, page_records.record("quality.json")):  # which has seeds enough for bands
        plot.draw(of, tmp_path / "quality.png")
        assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "quality.png").unlink()
    ((_, *lines),) = table.tables_of(record)
    assert len(lines) == len(ARMS)

    for path in runs.glob("*"):  # as on another machine: the record has the other runs
        if path.stem != "fp8-1":
            path.unlink()
    quality.main(["--runs", str(runs), "--json", str(record_path)])
    added = json.loads(record_path.read_text())
    assert added["runs"] == record["runs"]
    for row in record["results"]:
        row.pop("other_experts", None)  # the choices were in the files
    assert added == record


def test_runs_that_do_not_start_alike_are_refused(text: Path, tmp_path: Path) -> None:
    run = trained(text, tmp_path, "bf16", tokens=1) | {"choices": None}
    with pytest.raises(ValueError, match=r"must start alike; got fp8:0"):
        quality.merged([run, {**run, "arm": "fp8", "start": run["start"] + 1}])
    with pytest.raises(ValueError, match="must be of one steps"):
        quality.merged([run, {**run, "arm": "fp8", "steps": 9}])


def test_times_are_of_one_kind_of_gpu(text: Path, tmp_path: Path) -> None:
    """Losses are of all seeds; a seed that ran on another kind of GPU is in no time."""
    run = trained(text, tmp_path, "bf16", tokens=1) | {"choices": None}
    environment = {**run["environment"], "gpu": "another"}
    slow = {**run, "seed": 1, "environment": environment, "tokens_per_s": 1.0}
    slow["heldout"] = [(*at, loss + 1.0, 9e9) for *at, loss, _ in run["heldout"]]
    first, second = (row for row in quality.merged([run, slow, {**slow, "arm": "fp8"}])["results"])
    assert (first["gpu"], second["gpu"]) == (run["environment"]["gpu"], "another")
    assert first["tokens_per_s"] == run["tokens_per_s"]
    assert first["seconds"] == run["heldout"][-1][2]
    assert first["heldout"] == pytest.approx(run["heldout"][-1][1] + 0.5)


def test_a_run_that_is_out_of_time_stops_and_is_not_compared(text: Path, tmp_path: Path) -> None:
    read = quality_train.Text(text, TINY, CPU)
    run = quality_train.train("bf16", 0, "tiny", read, 768, 0.0, tmp_path, CPU)
    assert (len(run["loss"]), run["complete"]) == (2, False)
    assert quality.merged(quality.runs_of(tmp_path))["results"] == []


def test_quality_starts_processes(text: Path, tmp_path: Path) -> None:
    given = ["--arms", "bf16:3", "--text", str(text), "--runs", str(tmp_path), "--device", "cpu"]
    quality.main([*given, "--quick", "--json", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    assert [(row["variant"], row["seeds"]) for row in record["results"]] == [("bf16", 1)]


def test_statistics() -> None:
    found = quality.interval([1.0, 2.0, 3.0])  # s = 1, t of two degrees 4.303
    assert found["high"] == pytest.approx(2 + 4.303 / 3**0.5)
    run = {"heldout": [(1, 3.0, 10.0), (2, 2.0, 20.0), (3, 1.0, 30.0)]}
    assert quality.seconds_to(run, 1.5) == 25.0
    assert quality.seconds_to(run, 0.5) is None
    rising = {"steps": 50, "loss": [0.0] * 40 + [0.01 * n for n in range(10)]}
    assert quality.growth(rising, {"loss": [0.0] * 50}) == pytest.approx(0.1)
    a, b = np.array([[[0, 1], [2, 3]]]), np.array([[[0, 1], [3, 4]]])
    assert quality.other_experts(a, b) == {"tokens": 0.5, "assignments": 0.25}
    good, none = quality.interval([0.0, 0.004]), {"mean": 0.0, "low": -1.0, "high": 1.0}
    assert not quality.verdict(good, none)["kept"]  # the interval of two seeds is too wide
    tight = {"mean": 0.003, "low": 0.001, "high": 0.005}
    assert quality.verdict(tight, none)["kept"]
    assert not quality.verdict(tight, {"mean": 0.1, "low": 0.05, "high": 0.2})["kept"]
    assert quality.verdict({"mean": 0.0, "low": None, "high": None}, none)["kept"] is None


def test_text_comes_back_and_is_checked(text: Path, tmp_path: Path) -> None:
    tokens = np.arange(100, dtype=np.uint16)
    mix = quality_text.write(tmp_path, tokens[:90], tokens[90:], 100, {"packages": []})
    train, heldout, read = quality_text.read(tmp_path)
    assert (train.tolist(), heldout.tolist()) == (tokens[:90].tolist(), tokens[90:].tolist())
    assert read == mix
    (tmp_path / "mix.json").write_text(json.dumps({**mix, "sha256": "0"}))
    with pytest.raises(ValueError, match="must have mix"):
        quality_text.read(tmp_path)


def test_an_epoch_has_every_sequence_once(text: Path) -> None:
    read = quality_train.Text(text, TINY, CPU)
    batches, again = read.batches(3), read.batches(3)
    per_epoch = read.sequences // TINY.batch
    seen = []
    for _ in range(per_epoch):
        windows = next(batches)
        assert torch.equal(windows, next(again))
        assert torch.equal(windows[:, 1:-1], windows[:, 1:-1].clamp(0, 63))
        seen += [tuple(w.tolist()) for w in windows]
    assert len({*seen}) == len(seen) == per_epoch * TINY.batch


@pytest.mark.parametrize(
    ("wgrad", "recipe", "near"), [("bf16", Fp8Recipe(), 1e-4), ("double", FLOAT32_SCALES, 0.06)]
)
def test_other_weight_gradients(wgrad: Any, recipe: Fp8Recipe, near: float) -> None:
    """All but the weights' gradients has the layer's bits; those are near the layer's, and as far
    from bf16's as FP8 is."""
    sizes: Any = 4, 256, 128
    x = torch.randn(300, 256).bfloat16()
    idx = torch.rand(300, 4).topk(2).indices
    probs, dout = torch.rand(300, 2), torch.randn(300, 256).bfloat16()
    other = OtherWgrad(*sizes, wgrad=wgrad, recipe=recipe, dtype=torch.float32)

    def gradients(layer: MoEExperts) -> list[torch.Tensor]:
        layer.load_state_dict(other.state_dict())
        given = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
        out = layer(given[0], idx, given[1])
        out.backward(dout)
        grads: list[Any] = [t.grad for t in (*given, layer.gate_up_proj, layer.down_proj)]
        return [out.detach(), *grads]

    got = gradients(other)
    want = gradients(MoEExperts(*sizes, recipe=recipe, dtype=torch.float32))
    bf16 = gradients(MoEExperts(*sizes, recipe=None, dtype=torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))
    for a, b, exact in zip(got[3:], want[3:], bf16[3:], strict=True):
        assert 0 < (a - b).norm() / b.norm() < near
        assert 0.02 < (a - exact).norm() / exact.norm() < 0.09


def test_steps_take_turns() -> None:
    record = quality_step.run(CPU, Namespace(quick=True), ignore)
    (row,) = record["results"]
    tokens, multiplied = TINY.batch * TINY.context, 3 * TINY.hidden * TINY.intermediate
    assert row["flops"] == 6 * tokens * TINY.top_k * multiplied * TINY.layers
    assert row["ms"] > 0
    assert row["peers"]["bf16"] > 0
    [[_, cells]] = table.tables_of(record)
    assert cells[:2] == ("tiny, step", "eager")
