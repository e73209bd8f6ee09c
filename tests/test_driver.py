"""The first minutes on a machine whose driver or GPU does not serve: one sentence, what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fp8moe_cutlass import _C
from fp8moe_cutlass.tools import doctor

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "tests" / "driver"


def toolkit() -> Path | None:
    """The folder of a CUDA toolkit, without which there is no runtime to ask."""
    nvcc = shutil.which("nvcc")
    places = [
        os.environ.get("CUDA_HOME"),
        "/usr/local/cuda",
        nvcc and Path(nvcc).resolve().parents[1],
    ]
    found = (Path(p) for p in places if p and (Path(p) / "include/cuda_runtime_api.h").exists())
    return next(found, None)


CUDA, CXX = toolkit(), shutil.which("g++")
needs_toolkit = pytest.mark.skipif(not (CUDA and CXX), reason="no CUDA toolkit or no g++ here")


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True,
        env={**os.environ, **environment}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs that ask the library's own check: by CUDA's runtime, and by one that we pretend."""
    out = tmp_path_factory.mktemp("driver")
    version = out / "cutlass" / "version.h"  # asked for a number, not needed otherwise
    version.parent.mkdir()
    version.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n")
    includes = [f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}", f"-I{out}", f"-I{CUDA}/include"]
    names = (
        SOURCES / "require_device.cpp",
        ROOT / "src/device/runtime.cpp",
        SOURCES / "fake_cudart.cpp",
    )
    objects = [out / f"{source.stem}.o" for source in names]
    for source, to in zip(names, objects, strict=True):
        run(
            CXX,
            "-std=c++20",
            "-DFP8MOE_HAS_CUDA=1",
            "-ffunction-sections",
            *includes,
            "-c",
            source,
            "-o",
            to,
        )
    libraries = f"-L{CUDA}/lib64", "-lcudart_static", "-lpthread", "-ldl", "-lrt"
    run(CXX, *objects[:2], *libraries, "-o", out / "real")
    run(CXX, *objects, "-Wl,--gc-sections", "-o", out / "pretended")
    c = SOURCES / "fake_libcuda.c"
    run(CXX, "-x", "c", "-shared", "-fPIC", c, "-o", out / "libcuda.so.1", "-ldl")
    return out


def said(folder: Path, fake: str) -> str:
    return run(folder / "real", LD_LIBRARY_PATH=str(folder), FAKE_CUDA=fake)


@needs_toolkit
def test_an_old_driver(folder: Path) -> None:
    out = said(folder, "11080,1")
    assert out.startswith("[quantize] CUDA tensors need an NVIDIA driver for CUDA 1")
    assert "or newer); got one for CUDA 11.8: update it, or build with an older CUDA" in out


@needs_toolkit
def test_no_gpu(folder: Path) -> None:
    assert "CUDA tensors need a Hopper GPU; got a driver that shows none" in said(folder, "99000,0")


@needs_toolkit
@pytest.mark.skipif(doctor.driver() is not None, reason="a driver is here")
def test_no_driver(folder: Path) -> None:
    out = run(folder / "real")
    assert "got none: install one, or start the container with its GPUs, or pass CPU" in out


@needs_toolkit
@pytest.mark.parametrize(("name", "capability"), [("NVIDIA A100", "8.0"), ("NVIDIA B200", "10.0")])
def test_a_gpu_that_is_not_hopper(folder: Path, name: str, capability: str) -> None:
    fake = {"FAKE_GPU": name, "FAKE_CAPABILITY": capability.replace(".", "")}
    out = run(folder / "pretended", **fake)
    assert (
        f"built for compute capability 9.0 (Hopper); got {name}, compute capability {capability}; "
        "pass CPU tensors" in out
    )


@needs_toolkit
def test_hopper(folder: Path) -> None:
    fake = {"FAKE_GPU": "NVIDIA H100", "FAKE_CAPABILITY": "90"}
    assert run(folder / "pretended", **fake) == "runs"


# ---- doctor -------------------------------------------------------------------------------------

HOPPER, AMPERE = doctor.Gpu("NVIDIA H100", (9, 0)), doctor.Gpu("NVIDIA A100", (8, 0))


def cuda_tensors(monkeypatch: pytest.MonkeyPatch, error: Exception | None, gpu: doctor.Gpu) -> str:
    def sm_count() -> int:
        if error:
            raise error
        return 132

    monkeypatch.setattr(doctor._C, "sm_count", sm_count)
    finding = doctor.cuda_tensors({"cuda": True}, [gpu])
    assert finding.good is (error is None and gpu is HOPPER)
    return finding.text


def test_doctor_says_what_the_library_would(monkeypatch: pytest.MonkeyPatch) -> None:
    old = _C.DeviceUnavailable("[sm_count] CUDA tensors need an NVIDIA driver")
    assert (
        cuda_tensors(monkeypatch, old, HOPPER) == "do not run: CUDA tensors need an NVIDIA driver"
    )
    assert cuda_tensors(monkeypatch, None, HOPPER) == "run on NVIDIA H100, 132 SMs"
    assert "here is NVIDIA A100" in cuda_tensors(monkeypatch, None, AMPERE)


SMI = "0, GPU-aa11, NVIDIA H100, 9.0\n1, GPU-ab22, NVIDIA A100, 8.0"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA H100", "NVIDIA A100"]),
        ("", []),
        ("1", ["NVIDIA A100"]),
        ("1,0", ["NVIDIA A100", "NVIDIA H100"]),
        ("GPU-ab", ["NVIDIA A100"]),
        ("GPU-a", []),  # ambiguous
        ("-1,0", []),
        ("0,7,1", ["NVIDIA H100"]),
    ],
)
def test_doctor_lists_what_the_process_can_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    monkeypatch.setattr(doctor, "nvidia_smi", lambda fields: SMI.splitlines())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cards = doctor.gpus()
    assert [g.name for g in cards] == names
    hidden = [f.text for f in doctor.here(cards, None) if f.topic == "GPUs hidden"]
    assert hidden == (
        [f"{2 - len(names)}, by CUDA_VISIBLE_DEVICES={visible!r}"] if len(names) < 2 else []
    )


def test_doctor_without_torch() -> None:
    [torch] = [f for f in doctor.advice(_C.build_info(), [], None) if f.topic == "torch layers"]
    assert "pip install 'fp8moe-cutlass[torch]'" in torch.text
    assert "ops on NumPy and other DLPack arrays" in torch.text
