"""The examples in C++ and C, built by CMake against the installed package, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fp8moe_cutlass

EXAMPLES = Path(__file__).parent.parent / "examples"
# pip may have put CMake beside this interpreter without the environment being activated.
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_paths_name_the_installed_package() -> None:
    cmake_dir = run(sys.executable, "-m", "fp8moe_cutlass", "--cmake-dir").strip()
    include_dir = run(sys.executable, "-m", "fp8moe_cutlass", "--include-dir").strip()
    assert cmake_dir == fp8moe_cutlass.cmake_dir()
    assert (Path(cmake_dir) / "fp8moeConfig.cmake").is_file()
    assert include_dir == fp8moe_cutlass.include_dir()
    for header in ("ops.h", "c_api.h"):
        assert (Path(include_dir) / "fp8moe" / header).is_file()


@pytest.mark.skipif(CMAKE is None, reason="no cmake on this machine")
@pytest.mark.parametrize("language", ["cpp", "c"])
def test_example_builds_and_runs(language: str, tmp_path: Path) -> None:
    root = fp8moe_cutlass.cmake_dir()
    run(CMAKE, "-S", EXAMPLES / language, "-B", tmp_path, f"-Dfp8moe_ROOT={root}")
    run(CMAKE, "--build", tmp_path)
    out = run(tmp_path / "grouped_gemm")
    assert out.startswith(f"fp8moe {fp8moe_cutlass.__version__}")
    assert 0.0 < float(out.split()[-1]) < 0.05


@pytest.mark.parametrize("framework", ["numpy", "jax"])
def test_dlpack_example(framework: str) -> None:
    pytest.importorskip(framework)
    assert "numpy,jax,cupy" in run(sys.executable, EXAMPLES / "dlpack.py", "--help")
    out = run(sys.executable, EXAMPLES / "dlpack.py", framework)
    assert 0.0 < float(out.split()[-1]) < 0.05
