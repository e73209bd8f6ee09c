"""The examples in C++ and C, built by CMake against the installed package, and run."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fp8moe_cutlass
from fp8moe_cutlass.nn import MoEExperts

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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder in which an example's programs lie."""
    if CMAKE is None:
        pytest.skip("no cmake on this machine")

    @functools.cache
    def build(language: str) -> Path:
        into, root = tmp_path_factory.mktemp(language), fp8moe_cutlass.cmake_dir()
        run(CMAKE, "-S", EXAMPLES / language, "-B", into, f"-Dfp8moe_ROOT={root}")
        run(CMAKE, "--build", into)
        return into

    return build


@pytest.mark.parametrize("language", ["cpp", "c"])
def test_example_builds_and_runs(language: str, built: Callable[[str], Path]) -> None:
    out = run(built(language) / "grouped_gemm")
    assert out.startswith(f"fp8moe {fp8moe_cutlass.__version__}")
    assert 0.0 < float(out.split()[-1]) < 0.05


def numbers(seed: int, scale: float, *shape: int) -> torch.Tensor:
    """train_layer.cpp's."""
    h = np.arange(np.prod(shape), dtype=np.uint32) + np.uint32(seed << 24)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    made = ((h >> np.uint32(8)).astype(np.float32) * np.float32(2**-24) - np.float32(0.5)) * scale
    return torch.from_numpy(made.astype(np.float32)).view(shape)


def trained(device: str) -> list[float]:
    """The losses of train_layer.cpp, by the Python layer."""
    tokens, experts, hidden, intermediate, rate = 96, 4, 144, 80, 64.0
    layer = MoEExperts(experts, hidden, intermediate, dtype=torch.float32, device=device)
    with torch.no_grad():
        layer.gate_up_proj.copy_(numbers(1, 0.25, experts, 2 * intermediate, hidden))
        layer.down_proj.copy_(numbers(2, 0.25, experts, hidden, intermediate))
    x = numbers(3, 2.0, tokens, hidden).to(device)
    probs = numbers(4, 0.5, tokens, 2).to(device) + 0.5
    n = torch.arange(tokens, device=device)
    ids = torch.stack([n % experts, (n + 1 + n // experts % (experts - 1)) % experts], dim=1)
    losses = []
    for _ in range(8):
        out = layer(x, ids, probs)
        error = out.detach() - x
        squares = np.square(error.cpu().double().numpy().ravel())
        losses.append(float(np.add.accumulate(squares)[-1] / squares.size))  # one by one, in order
        out.backward(error * (np.float32(2.0) / np.float32(error.numel())).item())
        for p in layer.parameters():
            p.data -= rate * p.grad
            p.grad = None
    return losses


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_in_cpp_has_pythons_losses(device: str, built: Callable[[str], Path]) -> None:
    lines = run(built("cpp") / "train_layer", device).splitlines()
    losses = [float(line.split()[-1]) for line in lines]
    assert losses == trained(device)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("framework", ["numpy", "jax"])
def test_dlpack_example(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"no {framework} here")
    assert "numpy,jax,cupy" in run(sys.executable, EXAMPLES / "dlpack.py", "--help")
    out = run(sys.executable, EXAMPLES / "dlpack.py", framework)
    assert 0.0 < float(out.split()[-1]) < 0.05
