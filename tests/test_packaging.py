"""What travels in the wheel and in the source distribution: licence and third-party notices."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

import fp8moe_cutlass

ROOT = Path(__file__).parent.parent
NOTICES = [
    "LICENSE",
    *sorted(f"third_party/licenses/{f.name}" for f in (ROOT / "third_party/licenses").iterdir()),
]


def test_notices_name_what_is_compiled_in() -> None:
    assert {"cuda-runtime", "cutlass", "nanobind", "robin_map"} == {
        Path(notice).stem for notice in NOTICES[1:]
    }


@pytest.mark.parametrize("notice", NOTICES)
def test_wheel_has_the_notice(notice: str) -> None:
    dist = distribution("fp8moe-cutlass")
    assert dist.metadata["License-Expression"] == "Apache-2.0"
    [installed] = [f for f in dist.files or [] if str(f).endswith(f"licenses/{notice}")]
    assert installed.read_text() == (ROOT / notice).read_text()


def test_sdist_has_the_notices(tmp_path: Path) -> None:
    build = (
        f"from scikit_build_core.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", build], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert set(NOTICES) <= names
    assert not any(name.startswith("docs/benchmarks/") for name in names)


def test_citation_and_changelog_have_the_version() -> None:
    assert f"\nversion: {fp8moe_cutlass.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == fp8moe_cutlass.__version__
