"""The command line end to end at tiny sizes, through the console script's own entry."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8moe_cutlass import build_info, cli, doctor, ops, train
from fp8moe_cutlass.train import data
from fp8moe_cutlass.verify import checks

Command = Callable[..., tuple[int, str]]
CPU = torch.device("cpu")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `fp8moe-cutlass ARGS...` in this process; gives exit code and all it printed."""

    def run(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fp8moe-cutlass", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return int(stop.value.code or 0), printed.out + printed.err

    return run


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """`train` makes torch deterministic for its process; the other tests choose for themselves."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text with structure a model can learn: repeated lines with a counter."""
    path = tmp_path / "text.py"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i % 10}\n\n" for i in range(800)))
    return path


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


# ---- extras -------------------------------------------------------------------------------------


def test_import_needs_no_extra() -> None:
    code = (
        "import sys, fp8moe_cutlass\n"
        "print([m for m in ('typer', 'rich', 'matplotlib', 'torch') if m in sys.modules])"
    )
    assert python(code).stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_says_what_to_install(missing: str) -> None:
    done = python(f"import sys; sys.modules['{missing}'] = None; import fp8moe_cutlass.cli")
    assert done.returncode == 1
    assert missing in done.stderr
    assert "pip install 'fp8moe-cutlass[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


# ---- doctor and verify --------------------------------------------------------------------------


def test_doctor(command: Command) -> None:
    code, out = command("doctor")
    info = build_info()
    assert code == 0
    assert info["version"] in out
    assert torch.__version__ in out
    assert f"run here: {info['cpu_isa']}" in out
    assert ("CPU and CUDA sm_90a" if info["cuda"] else "CPU alone") in out
    if not torch.cuda.is_available():
        assert "CUDA tensors  do not run" in out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_fits_the_encoding_of_the_terminal(
    encoding: str, text: Path, tmp_path: Path
) -> None:
    small = ["--size", "tiny", "--steps", "2", "--text", text, "--out", tmp_path / "out"]
    for args, last in (["doctor"], "torch layers"), (["train", *small], "FP8 model writes"):
        done = subprocess.run(
            [sys.executable, "-m", "fp8moe_cutlass", *args],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            timeout=120,
        )
        out = done.stdout.decode(encoding)
        assert done.returncode == 0, done.stderr
        assert last in out
        if args == ["doctor"]:
            assert f"{'✓' if encoding == 'utf-8' else '+'} CPU tensors" in out


def test_doctor_reads_what_the_driver_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for gpus in (0, 2):
        cards = "".join(f"echo '{n}, GPU-{n}, NVIDIA H200, 9.0';" for n in range(gpus))
        lines = cards, "echo 580.1;" * gpus
        program.write_text('#!/bin/sh\ncase "$1" in *name,*) {}:;; *) {}:;; esac\n'.format(*lines))
        program.chmod(0o755)
        assert doctor.gpus() == [doctor.Gpu("NVIDIA H200", (9, 0))] * gpus
        assert doctor.driver() == ("580.1" if gpus else None)


def test_verify_passes_and_covers_every_operator(command: Command) -> None:
    code, out = command("verify")
    assert code == 0
    assert "FAILED" not in out
    # plan_from_* are route's other forms, packed_row_bytes a number, zero_workspace no operator;
    # their tests are their own.
    assert {op for op in ops.__all__ if op.islower() and op not in out} <= {
        "plan_from_counts",
        "plan_from_row_id_map",
        "packed_row_bytes",
        "zero_workspace",
    }


def test_verify_fails_on_a_wrong_bit(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ops.dequantize

    def off_by_one_bit(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = honest(*args, **kwargs)
        x.view(torch.int32)[3, 5] ^= 1
        return x

    monkeypatch.setattr(checks.ops, "dequantize", off_by_one_bit)
    code, out = command("verify")
    assert code == 1
    assert out.count("FAILED") == 1
    assert "1 of 40800 differ" in out


def test_verify_reports_an_operator_that_raises(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(checks.ops, "dequantize", broken)
    code, out = command("verify")
    assert code == 1
    assert "RuntimeError: no luck" in out


def test_verify_refuses_a_seed_that_fails_every_operator(command: Command) -> None:
    code, out = command("verify", "--seed", -1)
    assert code == 2
    assert "Invalid value for '--seed'" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["verify", "train"])
def test_no_gpu_is_one_clear_line(command: Command, name: str) -> None:
    code, out = command(name, "--device", "cuda")
    assert code == 2
    assert "torch sees no GPU" in out
    assert "Traceback" not in out


# ---- the text -----------------------------------------------------------------------------------


def test_batches_depend_on_seed_and_step_alone(text: Path) -> None:
    one, two = data.load(text, 32), data.load(text, 32)
    assert one.fingerprint == two.fingerprint
    assert torch.equal(one.batch(3, 7, 4, 32), two.batch(3, 7, 4, 32))
    assert not torch.equal(one.batch(3, 7, 4, 32), one.batch(3, 8, 4, 32))
    assert not torch.equal(one.batch(3, 7, 4, 32), one.batch(4, 7, 4, 32))
    assert one.batch(3, 7, 4, 32).shape == (4, 33)


def test_every_byte_is_in_one_part(text: Path) -> None:
    corpus = data.load(text, 32)
    assert len(corpus.train) + len(corpus.heldout) == text.stat().st_size
    assert 0.05 < len(corpus.heldout) / text.stat().st_size < 0.15
    parts = Counter(corpus.train.tolist()) + Counter(corpus.heldout.tolist())
    assert parts == Counter(text.read_bytes())


def test_unigram_entropy(text: Path) -> None:
    counts = Counter(text.read_bytes())
    n = sum(counts.values())
    expected = -sum(c / n * math.log(c / n) for c in counts.values())
    assert data.load(text, 32).unigram_entropy == pytest.approx(expected, rel=1e-12)


def test_standard_library_is_the_default_text() -> None:
    name, files = data.find_text(None)
    assert "standard library" in name
    assert len(files) > 100
    assert files == data.find_text(None)[1]
    assert not any("site-packages" in f.parts or "test" in f.parts for f in files)


def test_every_python_source_once() -> None:
    name, files = data.find_every_python()
    assert "packages installed" in name
    assert files[: len(data.find_text(None)[1])] == data.find_text(None)[1]
    assert any("numpy" in f.parts for f in files)


def test_copies_of_a_file_are_read_once(tmp_path: Path) -> None:
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text("a" * 3000)
    (tmp_path / "c.md").write_text("b" * 3000)
    corpus = data.load(tmp_path, 32)
    assert len(corpus.train) + len(corpus.heldout) == 6001


def test_folder_of_text_and_too_little_of_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b.txt").write_text("b" * 3000)
    (tmp_path / "a" / "a.md").write_text("a" * 3000)
    (tmp_path / "a" / "image.bin").write_bytes(bytes(5000))
    corpus = data.load(tmp_path, 32)
    assert np.concatenate([corpus.train, corpus.heldout]).tobytes().count(b"a") == 3000
    assert len(corpus.train) + len(corpus.heldout) == 6001
    with pytest.raises(ValueError, match="got 6001 from 2 files"):
        data.load(tmp_path, 1024)
    with pytest.raises(ValueError, match="must be a file or a folder"):
        data.load(tmp_path / "nothing", 32)


# ---- train --------------------------------------------------------------------------------------


def tiny(text: Path, out: Path, *args: object) -> tuple[object, ...]:
    return ("train", "--size", "tiny", "--text", text, "--out", out, *args)


def run_of(result: dict[str, Any], variant: str, seed: int = 0) -> dict[str, Any]:
    (run,) = (r for r in result["runs"] if (r["variant"], r["seed"]) == (variant, seed))
    return {k: v for k, v in run.items() if k not in ("seconds", "tokens_per_second")}


def assert_same(a: Any, b: Any) -> None:
    """Equal in every bit, through nested dicts and lists."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def test_train_learns_compares_and_reports(command: Command, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, printed = command(*tiny(text, out, "--steps", 60))
    assert code == 0
    result = json.loads((out / "loss.json").read_text())
    assert result["unigram_entropy"] == pytest.approx(data.load(text, 32).unigram_entropy)
    last: dict[str, float] = {}
    for name in ("fp8", "bf16"):
        run = run_of(result, name)
        assert len(run["loss"]) == 60
        steps, heldout = zip(*run["heldout"], strict=True)
        assert steps == (10, 20, 30, 40, 50, 56, 58, 60)  # five times as often in the last tenth
        assert heldout[-1] < 0.7 * result["unigram_entropy"]
        last[name] = sum(heldout[-3:]) / 3
        assert result["summary"][name]["heldout"] == pytest.approx(last[name])
    watched = run_of(result, "fp8")["telemetry"]
    assert [step for step, _ in watched] == [10, 20, 30, 40, 50, 60]
    (report,) = watched[-1][1].values()
    assert sum(report["transposes"]["x columns"]["shifts"]) > 0
    assert all(20 < decibels < 45 for decibels in report["snr"].values()), report["snr"]
    assert run_of(result, "bf16")["telemetry"] == []
    deviation = last["fp8"] / last["bf16"] - 1
    assert result["summary"]["fp8"]["heldout_deviation"] == pytest.approx(deviation)
    # Same seed, same batches: the first losses differ by FP8's rounding alone; but they do differ.
    first = [run_of(result, name)["loss"][0] for name in ("fp8", "bf16")]
    assert first[0] != first[1]
    assert first[0] == pytest.approx(first[1], rel=0.01)
    assert f"{last['fp8']:.4f}" in printed
    assert f"{last['bf16']:.4f}" in printed
    assert f"{100 * deviation:+.3f}%" in printed
    assert f"{result['unigram_entropy']:.4f}" in printed
    assert "def " in printed.split("What the FP8 model writes")[1]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.rglob("checkpoint.pt"))


def test_seeds(command: Command, text: Path, tmp_path: Path) -> None:
    code, _ = command(*tiny(text, tmp_path, "--steps", 3, "--seeds", 2))
    assert code == 0
    result = json.loads((tmp_path / "loss.json").read_text())
    runs = {(r["variant"], r["seed"]): r for r in result["runs"]}
    assert set(runs) == {(v, s) for v in ("fp8", "bf16") for s in (0, 1)}
    # One seed, the same batches; another, others. Two recipes, two roundings.
    losses = {key: run["loss"][0] for key, run in runs.items()}
    assert len(set(losses.values())) == 4
    for seed in (0, 1):
        assert losses["fp8", seed] == pytest.approx(losses["bf16", seed], rel=0.01)
    bf16 = [runs["bf16", seed]["heldout"][-1][1] for seed in (0, 1)]
    assert result["summary"]["bf16"]["spread"] == pytest.approx(
        abs(bf16[0] - bf16[1]) * 2 / sum(bf16)
    )


def test_resume_equals_an_uninterrupted_run(command: Command, text: Path, tmp_path: Path) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert command(*tiny(text, whole, "--steps", 7))[0] == 0
    for stop_at in (2, 5):
        code, printed = command(*tiny(text, pieces, "--steps", 7, "--resume", "--stop-at", stop_at))
        assert code == 0
        assert f"fp8, seed 0 stopped after step {stop_at}" in printed
        assert not (pieces / "loss.json").exists()
    # fp8's run is past step 3 and finishes; bf16's stops there.
    code, printed = command(*tiny(text, pieces, "--steps", 7, "--resume", "--stop-at", 3))
    assert "bf16, seed 0 stopped after step 3" in printed
    assert (pieces / "loss.json").exists()
    assert command(*tiny(text, pieces, "--steps", 7, "--resume"))[0] == 0
    a, b = (json.loads((out / "loss.json").read_text()) for out in (whole, pieces))
    for variant in ("fp8", "bf16"):
        assert run_of(a, variant) == run_of(b, variant)
    # Nothing is left to do: a further --resume changes nothing and still reports.
    before = (pieces / "loss.json").read_bytes()
    assert "held-out loss" in command(*tiny(text, pieces, "--steps", 7, "--resume"))[1]
    assert (pieces / "loss.json").read_bytes() == before


def test_a_run_that_would_not_finish_is_not_begun(text: Path, tmp_path: Path) -> None:
    config = train.configure("tiny", 2, 0)
    corpus = data.load(text, config.model.context)
    arguments: Any = {"variants": ("bf16",), "seeds": 2, "resume": True}
    with pytest.raises(train.Paused, match="too little time is left for bf16, seed 1"):
        train.train(config, corpus, CPU, tmp_path, left=lambda: 0.0, **arguments)
    assert [r["seed"] for r in json.loads((tmp_path / "loss.json").read_text())["runs"]] == [0]
    train.train(config, corpus, CPU, tmp_path, left=lambda: 60.0, **arguments)
    assert [r["seed"] for r in json.loads((tmp_path / "loss.json").read_text())["runs"]] == [0, 1]


def test_resume_refuses_another_run(command: Command, text: Path, tmp_path: Path) -> None:
    for stop in (("--stop-at", 1), ()):  # by its checkpoint, by its result
        assert command(*tiny(text, tmp_path, "--steps", 2, *stop))[0] == 0
        code, printed = command(*tiny(text, tmp_path, "--steps", 2, "--resume", "--size", "small"))
        assert code == 2
        assert "was written with" in " ".join(printed.split())
    code, printed = command(*tiny(text, tmp_path, "--steps", 2, "--seed", 1, "--resume"))
    assert code == 2
    assert "was written with seed = 0; got 1" in " ".join(printed.split())


def test_ctrl_c_asks_first_and_stops_second() -> None:
    stop = cli.Stop(at=None, minutes=None)
    before = signal.getsignal(signal.SIGINT)  # ignored in a shell's background job
    with stop.on_interrupt():
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--size", "huge"), "got huge"),
        (("--steps", 0), "got 0"),
        (("--text", "/no"), "got /no"),
        (("--seeds", 0), "seeds must be at least 1; got 0"),
        (("--seed", -1), "Invalid value for '--seed'"),
        (("--stop-at", 0), "Invalid value for '--stop-at'"),
        (("--minutes", "nan"), "--minutes must be at least 0; got nan"),
        (("--minutes", -1), "--minutes must be at least 0; got -1.0"),
        (("--out", __file__), "File exists"),
    ],
)
def test_train_refuses_bad_settings(command: Command, args: Any, message: str) -> None:
    code, printed = command("train", "--size", "tiny", *args)
    assert code == 2
    assert message in printed


def test_train_refuses_an_unknown_variant_before_it_trains(text: Path, tmp_path: Path) -> None:
    config = train.configure("tiny", 2, 0)
    corpus = data.load(text, config.model.context)
    with pytest.raises(ValueError, match="variants must be of fp8, bf16; got fp4"):
        train.train(config, corpus, CPU, tmp_path / "run", ("fp8", "fp4"))
    assert not (tmp_path / "run").exists()


def test_train_looks_whether_it_can_write_before_it_trains(
    command: Command, text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train.Trainer, "run", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr("os.access", lambda _, mode, **__: mode != os.W_OK)
    code, printed = command(*tiny(text, tmp_path))
    assert code == 2
    assert "[train] out must be a folder that can be written to" in printed


def test_a_sample_does_not_command_the_terminal() -> None:
    assert cli.harmless("def f():\n\treturn \x1b[2J\x07\u0151") == (
        "def f():\n\treturn \ufffd[2J\ufffd\u0151"
    )
