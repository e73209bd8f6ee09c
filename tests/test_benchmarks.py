"""The scripts in benchmarks/ at tiny sizes, and what table.py and plot.py make of every record."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import gemm
import ops as ops_script
import plot
import records
import table
from cases import CASES
from common import ignore
from fp8moe_cutlass import ops
from host_overhead import host_overhead
from launch import processes

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
RECORDS = sorted(ROOT.glob("docs/benchmarks/*.json"))


def script(name: str, *args: object) -> str:
    """What `python benchmarks/NAME.py ARGS...` prints."""
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_times(record: dict[str, Any]) -> None:
    """The rows have a time, its limit and its work."""
    assert record["environment"]["copy_tb_s"] > 0
    for row in record["results"]:
        assert 0 < row["repeat"]["min"] <= row["ms"] <= row["repeat"]["max"]
        assert row["limit_ms"] > 0
        assert row["bytes"] > 0


def test_every_operator_has_a_case() -> None:
    # plan_from_* are route's other forms, packed_row_bytes a number, zero_workspace no operator;
    # share_words takes as long as the ranks that it waits for, copy_rows as the driver's copies.
    assert {op for op in ops.__all__ if op.islower()} - set(CASES) == {
        *("plan_from_counts", "plan_from_row_id_map", "packed_row_bytes", "zero_workspace"),
        *("share_words", "copy_rows"),
    }


def test_records_knows_every_record() -> None:
    """But for those of scripts that it names; and its commands' options exist."""
    otherwise = {"quality", "quality-coarse", "quality-long", "rollout-losses"}
    otherwise |= {"gemm-candidates", "lora-losses", "torchtitan-losses"}
    assert set(records.JOBS) | otherwise == {path.stem for path in RECORDS}
    for job in records.JOBS.values():
        for command in job.commands:
            for name, options in re.findall(r"(benchmarks/\w+\.py)(.*)", command):
                code = (ROOT / name).read_text()
                assert all(f'"{of}"' in code for of in re.findall(r"(?<!\S)--[\w-]+", options))


def test_records_makes_what_it_can(tmp_path: Path) -> None:
    cpu = ["--device", "cpu", "--quick"]
    assert records.main([str(tmp_path), "activations", *cpu]) == 0
    assert json.loads((tmp_path / "activations.json").read_text())["results"]
    assert "activations.py" in (tmp_path / "activations.log").read_text()
    assert records.main([str(tmp_path), "layer", *cpu, "--seconds", "1"]) == 1
    assert not (tmp_path / "layer.json").exists()


def test_host_overhead() -> None:
    """What `ops.py --device cpu` appends."""
    [row] = host_overhead(calls=10)
    assert 0 < row["repeat"]["min"] <= row["repeat"]["max"]


def test_ops() -> None:
    record = ops_script.run_ops(CPU, quick=True)
    assert_times(record)
    assert {row["op"] for row in record["results"]} == set(CASES)
    for row in record["results"]:
        assert (row["flops"] > 0) == row["op"].startswith("grouped_gemm")


def test_a_script_writes_its_record(tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    printed = script("ops", "--device", "cpu", "--quick", "--op", "dequantize", "--json", out)
    record = json.loads(out.read_text())
    assert_times(record)
    (row,) = record["results"]
    assert row["bytes"] == 256 * 256 + 256 * 2 * 4 + 256 * 256 * 2  # codes, scales, bf16
    assert f"dequantize, row, M256 K256: {row['ms']:.3f} ms" in printed
    assert "table.py" in printed


def test_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(o: Any) -> Any:
        raise RuntimeError("no such product")

    peers = {"same": lambda o: gemm.call_of(o)[0], "failing": failing, "none": lambda o: None}
    monkeypatch.setattr(gemm, "PEERS", peers)
    given: dict[str, Any] = {"quick": True, "only": None, "seed": 0, "burst": False}
    record = gemm.run(CPU, Namespace(budget=60.0, **given), ignore)
    assert_times(record)
    assert [row["op"] for row in record["results"]] == ["fprop", "dgrad", "wgrad", "wgrad"]
    assert record["left_out"] == []
    for row in record["results"]:
        s = row["shape"]
        assert row["flops"] == 2 * s["M"] * s["N"] * s["K"]
        assert row["peers"].keys() == {"same"}
        assert row["peers_failed"] == {"failing": "RuntimeError: no such product"}
    late = gemm.run(CPU, Namespace(budget=-1.0, **given), ignore)
    assert (late["results"], len(late["left_out"])) == ([], len(gemm.QUICK))


@pytest.mark.slow
def test_ep(tmp_path: Path) -> None:
    """Two ranks over gloo, each row timed once."""
    out = tmp_path / "ep.json"
    options = ("--device", "cpu", "--ranks", 2, "--quick")
    printed = script("ep", *options, "--json", out)
    record = json.loads(out.read_text())
    assert_times(record)
    place = record["environment"]
    assert (place["ranks"], place["backend"]) == (2, "gloo")
    exchanges = ["dispatch", "dispatch of a gradient", "combine"]
    layers = [f"layer, {way}" for way in ("forward, weights reused", "forward", "forward+backward")]
    assert [(row["variant"], row["op"]) for row in record["results"]] == [
        (variant + by, op)
        for variant, ops in (
            ("random, exact", [*exchanges, *layers]),
            ("random, exact, beside bf16", layers[1:]),
            ("zipf, exact", [*exchanges, *layers]),
            ("random, capacity 1.25", [*exchanges, *layers]),
        )
        for op in ops
        for by in ("", ", peer")
    ]
    # Rows of 256 codes, 2 scales, 2 ids and 2 probs: 288 bytes; a gradient's 272; bf16's 512.
    there, back = (288, 272), (512, 512 + 8)
    width = dict(zip(exchanges, (288, 272, 512), strict=True)) | {
        "layer, forward": there[0] + back[0],
        "layer, forward, weights reused": there[0] + back[0],
        "layer, forward+backward": sum(there) + sum(back),
    }
    for row in record["results"]:
        assert row["bytes"] == round(row["rows_sent"] * width[row["op"]])
        assert row["shape"]["E"] == 8
        assert printed.count(f"{row['op']}, tiny, {row['variant']}, W") == 1


def test_ranks_must_match_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"torchrun started, 4; got 2"), processes(2, CPU):
        pass
    with pytest.raises(ValueError, match=r"at least 1; got 0"), processes(0, CPU):
        pass


# ---- showing records ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_committed_record_is_a_table(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    table.main()
    for head, *rows in table.tables_of(json.loads(path.read_text())):
        assert rows
        assert all(len(row) == len(head) for row in rows)


DRAWN = [
    "memory-bound",
    "layer",
    "sweep",
    "ep-4",
    "transformers-recipe",
]


@pytest.mark.parametrize("name", DRAWN)
def test_records_are_drawn(name: str, tmp_path: Path) -> None:
    record = json.loads((ROOT / f"docs/benchmarks/{name}.json").read_text())
    for kernels in {False, name == "layer"}:
        plot.draw(record, tmp_path / "p.png", kernels)
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_committed_plots_are_small() -> None:
    plots = [*ROOT.glob("docs/benchmarks/*.png")]
    assert plots
    assert all(path.stat().st_size < 150_000 for path in plots)


LAYERS = {"frozen": 9, "lora_model": 6, "activations": 42, "activation_blocks": 10, "rollout": 14}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_scripts_run(name: str, tmp_path: Path) -> None:
    modes = ["--mode", "turned", "--mode", "kept", "--mode", "bf16, attention"]  # without peft
    more = modes if name == "lora_model" else []
    script(name, "--device", "cpu", "--quick", "--json", tmp_path / "record.json", *more)
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["results"]) == LAYERS[name]
    assert all(row["ms"] > 0 for row in record["results"])


@pytest.mark.slow
def test_lora_model_on_two_ranks(tmp_path: Path) -> None:
    given = ("--mode", "turned", "--layers", 1, "--ranks", 2, "--device", "cpu", "--quick")
    script("lora_model", *given, "--json", tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["environment"]["ranks"] == 2
    assert [(row["shape"]["T"], row["layers"]) for row in record["results"]] == [(64, 1), (128, 1)]


def test_tokens_of_a_whole_model_spread_over_its_experts() -> None:
    """Were all weights of one deviation, nearly all tokens would choose the same eight experts."""
    transformers = pytest.importorskip("transformers")
    from transformers_step import initialize, sizes

    config = transformers.Qwen3MoeConfig(**sizes(3, 1024, 64, 16) | {"vocab_size": 512})
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM._from_config(config)
    initialize(model)
    found: list[torch.Tensor] = []

    def keep(_: Any, __: Any, routed: Any) -> None:
        (ids,) = (t for t in routed if t.dtype == torch.int64)
        found.append(ids.flatten().bincount(minlength=16))

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(keep)
    model(torch.randint(512, (1, 512)))
    assert len(found) == 3
    for counts in found:
        assert counts.max() < 1.3 * counts.float().mean()
