"""The command line end to end at tiny sizes, through the console script's own entry."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8moe_cutlass import build_info, ops
from fp8moe_cutlass.tools import cli, doctor
from fp8moe_cutlass.tools.verify import checks

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
    done = python(f"import sys; sys.modules['{missing}'] = None; import fp8moe_cutlass.tools.cli")
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
def test_output_fits_the_encoding_of_the_terminal(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fp8moe_cutlass", "doctor"],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"{'✓' if encoding == 'utf-8' else '+'} CPU tensors" in done.stdout.decode(encoding)


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
    # plan_from_* are route's other forms, packed_row_bytes a number, zero_workspace no operator,
    # share_words waits for other ranks, copy_rows copies; their tests are their own.
    assert {op for op in ops.__all__ if op.islower() and op not in out} <= {
        "plan_from_counts",
        "plan_from_row_id_map",
        "packed_row_bytes",
        "zero_workspace",
        "share_words",
        "copy_rows",
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
def test_no_gpu_is_one_clear_line(command: Command) -> None:
    code, out = command("verify", "--device", "cuda")
    assert code == 2
    assert "torch sees no GPU" in out
    assert "Traceback" not in out
