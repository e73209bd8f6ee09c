"""How an installation starts and fails: one sentence that says what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

import fp8moe_cutlass

ROOT = Path(__file__).parent.parent
HERE = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
CMAKE, NINJA = (shutil.which(tool, path=HERE) for tool in ("cmake", "ninja"))
pytestmark = pytest.mark.skipif(not CMAKE or not NINJA, reason="no cmake or ninja here")

# What the machine says of CUDA and compilers; a test sets what it is about.
SAYS = ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUTLASS_DIR", "FP8MOE_CUDA", "CXX", "CC")


def configure(build: Path, *options: str, **environment: str) -> str:
    """What CMake prints in one run over `build`, in one line of single spaces."""
    env = {k: v for k, v in os.environ.items() if k not in SAYS} | environment
    done = subprocess.run(
        [str(CMAKE), "-G", "Ninja", "-S", ROOT, "-B", build, f"-DCMAKE_MAKE_PROGRAM={NINJA}",
         "-DFP8MOE_PYTHON=OFF", "-UFP8MOE_NVCC", "-UFP8MOE_DRIVER", "-UCMAKE_FIND_ROOT*", *options],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    said = re.sub(r"\s+", " ", done.stdout + done.stderr)
    assert (done.returncode != 0) == ("CMake Error" in said), said
    return said


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build folder that knows its C++ compiler; each run over it takes a second."""
    folder = tmp_path_factory.mktemp("build")
    assert "CPU backend alone" in configure(folder, "-DFP8MOE_CUDA=OFF")
    return folder


@pytest.fixture
def no_nvcc(tmp_path: Path) -> list[str]:
    """Options by which CMake finds neither nvcc nor a driver."""
    return [
        f"-DCMAKE_FIND_ROOT_PATH={tmp_path}",
        "-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=ONLY",
        "-DFP8MOE_DRIVER=FP8MOE_DRIVER-NOTFOUND",
        "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY",
    ]


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


# ---- FP8MOE_CUDA --------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["OFF", "off", "0", "No", "false"])
def test_off_in_every_word_fetches_no_cutlass(word: str) -> None:
    reader = SettingsReader.from_file(
        str(ROOT / "pyproject.toml"), {}, state="wheel", env={"FP8MOE_CUDA": word}
    )
    assert reader.settings.build.requires == []


def test_off_in_another_word(build: Path) -> None:
    assert "CPU backend alone" in configure(build, "-DFP8MOE_CUDA=no")


@pytest.mark.parametrize("word", ["on", "1"])
def test_on_needs_nvcc(build: Path, no_nvcc: list[str], word: str) -> None:
    said = configure(build, f"-DFP8MOE_CUDA={word}", *no_nvcc)
    assert "FP8MOE_CUDA=ON, but no nvcc was found" in said
    assert "install a CUDA toolkit, 12.8 or newer" in said
    assert "FP8MOE_CUDA=OFF builds the CPU backend alone" in said


def test_another_word_is_an_error(build: Path) -> None:
    said = configure(build, "-DFP8MOE_CUDA=maybe")
    assert "FP8MOE_CUDA must be AUTO, ON or OFF; got maybe" in said


@pytest.mark.parametrize("word", ["auto", ""])
def test_auto_builds_the_cpu_backend_where_nothing_speaks_of_cuda(
    build: Path, no_nvcc: list[str], word: str
) -> None:
    assert "CPU backend alone" in configure(build, f"-DFP8MOE_CUDA={word}", *no_nvcc)


def test_auto_is_not_silent_where_cuda_is_wanted(
    build: Path, no_nvcc: list[str], tmp_path: Path
) -> None:
    said = configure(build, "-DFP8MOE_CUDA=AUTO", *no_nvcc, CUDA_HOME="/no/cuda")
    assert "CUDA_HOME=/no/cuda, but no nvcc was found" in said
    driver = program(tmp_path / "nvidiactl", "")
    said = configure(build, "-DFP8MOE_CUDA=AUTO", *no_nvcc, f"-DFP8MOE_DRIVER={driver}")
    assert f"an NVIDIA driver is here ({driver}), but no nvcc was found" in said
    assert "FP8MOE_CUDA=OFF builds the CPU backend alone" in said


@pytest.mark.parametrize("word", ["AUTO", "ON"])
def test_cudacxx_is_named_where_it_names_nothing(build: Path, word: str) -> None:
    said = configure(build, f"-DFP8MOE_CUDA={word}", CUDACXX="/no/nvcc")
    assert "CUDACXX must name nvcc; got CUDACXX=/no/nvcc, which is not there" in said


def test_nvcc_on_path_comes_first_and_must_work(build: Path, tmp_path: Path) -> None:
    """A broken nvcc is an error, with what it prints, and no CPU build."""
    first = program(tmp_path / "first" / "nvcc", "echo this nvcc is broken; exit 1")
    program(tmp_path / "home" / "bin" / "nvcc", "exit 1")
    said = configure(
        build,
        "-DFP8MOE_CUDA=AUTO",
        PATH=f"{first.parent}{os.pathsep}{os.environ['PATH']}",
        CUDA_HOME=str(tmp_path / "home"),
    )
    assert f"CUDA backend by {first}; FP8MOE_CUDA=OFF builds the CPU backend alone" in said
    assert "needs nvcc 12.8 or newer" in said
    assert "this nvcc is broken" in said


# ---- compilers and tools ------------------------------------------------------------------------


def test_no_compiler(tmp_path: Path) -> None:
    said = configure(tmp_path, CXX="/no/g++")
    assert "a C++20 compiler is needed, GCC 11 or clang 16 or newer; none works here" in said
    assert "(tried CXX=/no/g++)" in said


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")
def test_old_compiler(tmp_path: Path) -> None:
    old = program(tmp_path / "g++", f'exec {shutil.which("g++")} -U__GNUC__ -D__GNUC__=10 "$@"')
    said = configure(tmp_path / "build", CXX=str(old))
    assert "a C++20 compiler is needed, GCC 11 or clang 16 or newer; got GNU 10." in said


def test_nanobind_missing(build: Path, tmp_path: Path) -> None:
    (tmp_path / "nanobind.py").write_text("raise SystemExit(1)")
    said = configure(
        build, "-DFP8MOE_CUDA=OFF", "-DFP8MOE_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert "the Python module needs nanobind" in said
    assert "pip install 'nanobind>=2.4,<4'" in said


# ---- one tree, many installations ---------------------------------------------------------------


def test_an_install_leaves_the_tree_alone() -> None:
    """So read-only trees install, and two installs at once; editable ones keep their folder."""
    folder = {
        state: SettingsReader.from_file(str(ROOT / "pyproject.toml"), {}, state=state).settings
        for state in ("wheel", "editable")
    }
    assert folder["wheel"].build_dir == ""
    assert folder["editable"].build_dir.startswith("build/")


def test_the_version_has_one_source(build: Path) -> None:
    cache = (build / "CMakeCache.txt").read_text()
    [numbers] = re.findall(r"^CMAKE_PROJECT_VERSION:STATIC=(.*)$", cache, re.M)
    built = fp8moe_cutlass.build_info()["version"]
    assert fp8moe_cutlass.__version__ == version("fp8moe-cutlass") == built
    assert built.startswith(numbers)


def test_pins_exist_for_the_oldest_python() -> None:
    """A pin without a marker holds for Python 3.10, whose pip would find nothing otherwise."""
    pins = re.findall(r"^([\w-]+)==\S+$", (ROOT / "constraints.txt").read_text(), re.M)
    assert "torch" in pins
    for name in pins:
        try:
            needs = metadata(name)["Requires-Python"] or ""
        except PackageNotFoundError:  # a linter, where only the tests' packages are
            continue
        assert SpecifierSet(needs).contains("3.10"), f"{name} needs Python {needs}"


@pytest.mark.skipif(not shutil.which("nm"), reason="no nm here")
def test_the_library_exports_its_own_symbols_alone() -> None:
    library = Path(fp8moe_cutlass.cmake_dir()).parents[1] / "libfp8moe.so"
    done = subprocess.run(
        ["nm", "-DC", "--defined-only", library], capture_output=True, text=True, check=True
    )
    names = {line.split(None, 2)[2] for line in done.stdout.splitlines()}
    assert "fp8moe_quantize" in names
    own = re.compile(r"(typeinfo |vtable )?(name )?(for )?fp8moe(::|_)")
    assert not [name for name in names if not own.match(name)]
