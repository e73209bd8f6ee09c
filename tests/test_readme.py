"""What the README shows works: its examples run and compile, its commands name what exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import fp8moe_cutlass

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CXX = shutil.which("c++") or shutil.which("g++")


def block(language: str) -> str:
    """The first fenced block of a language."""
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_torch_example() -> None:
    small = block("python").replace("4096, 8, 1024, 2048", "200, 8, 256, 128")
    names: dict[str, object] = {}
    exec(small, names)
    x, w, probs, experts, out = (names[n] for n in ("x", "w", "probs", "experts", "out"))
    assert isinstance(x, torch.Tensor)
    picked = torch.einsum("tk,tsnk->tsn", x.double(), w.double()[experts])
    expected = (picked * probs[..., None]).sum(dim=1)
    assert (out - expected).norm() < 0.05 * expected.norm()


@pytest.mark.skipif(CXX is None, reason="no C++ compiler on this machine")
def test_cpp_example_compiles() -> None:
    command = [CXX, "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", "-x", "c++", "-"]
    command.insert(1, f"-I{fp8moe_cutlass.include_dir()}")
    done = subprocess.run(command, input=block("cpp"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
