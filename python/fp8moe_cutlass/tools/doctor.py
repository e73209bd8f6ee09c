"""Reports what was built, what is here and what would run; facts first, then advice."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from fp8moe_cutlass import _C
from fp8moe_cutlass.version import VersionMismatch, __version__, require_same

HOPPER = (9, 0)
MIN_TORCH = (2, 11)  # the first with DLPack's C exchange API; older ones work through __dlpack__


@dataclass(frozen=True)
class Gpu:
    """One visible GPU."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Finding:
    """A line of the report. good: None is a plain fact, False something to act on."""

    topic: str
    text: str
    good: bool | None = None


def package(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def nvidia_smi(fields: str) -> list[str]:
    """The driver's values of these fields, a line per GPU, without torch; [] without a driver."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def gpus() -> list[Gpu]:
    """The GPUs that this process can use: the driver's, as CUDA_VISIBLE_DEVICES has them."""
    found = {}
    for line in nvidia_smi("index,uuid,name,compute_cap"):
        index, uuid, name, capability = (part.strip() for part in line.split(","))
        major, minor = capability.split(".")
        found[index, uuid] = Gpu(name, (int(major), int(minor)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(found.values())
    cards = []
    for word in visible.split(","):  # those behind the first that names none are hidden
        named = [g for (i, uuid), g in found.items() if _names(word.strip(), i, uuid)]
        if len(named) != 1:
            break
        cards += named
    return cards


def _names(word: str, index: str, uuid: str) -> bool:
    """Whether a word of CUDA_VISIBLE_DEVICES means this GPU: by index, or how its UUID begins."""
    return word == index or (word.startswith("GPU-") and uuid.startswith(word))


def driver() -> str | None:
    """The NVIDIA driver's version, or None."""
    return next(iter(nvidia_smi("driver_version")), None)


def threads() -> str:
    """The number of threads that the CPU backend will take, and why."""
    given = os.environ.get("OMP_NUM_THREADS")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{given} threads (OMP_NUM_THREADS)" if given else f"{usable} threads (all usable cores)"


def built(info: dict[str, object]) -> list[Finding]:
    backends = (
        f"CPU and CUDA sm_90a (toolkit {info['cuda_toolkit']}, CUTLASS {info['cutlass']})"
        if info["cuda"]
        else "CPU alone"
    )
    try:
        require_same()
        found = Finding("version", __version__)
    except VersionMismatch as error:
        found = Finding("version", str(error), False)
    return [found, Finding("backends", backends)]


def here(cards: list[Gpu], torch: str | None) -> list[Finding]:
    old = torch is not None and tuple(int(n) for n in torch.split(".")[:2]) < MIN_TORCH
    return [
        Finding("python", f"{platform.python_version()} in {sys.prefix}"),
        Finding(
            "torch",
            torch or "not installed",
            False if torch is None or old else None,
        ),
        Finding("numpy", package("numpy") or "not installed"),
        Finding("driver", driver() or "none that nvidia-smi names"),
        *(Finding("GPU", f"{g.name}, sm_{g.capability[0]}{g.capability[1]}") for g in cards),
        *_hidden(cards),
    ]


def _hidden(cards: list[Gpu]) -> list[Finding]:
    """The GPUs that CUDA_VISIBLE_DEVICES hides."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return []
    count = len(nvidia_smi("name")) - len(cards)
    if count <= 0:
        return []
    return [Finding("GPUs hidden", f"{count}, by CUDA_VISIBLE_DEVICES={visible!r}")]


def cuda_tensors(info: dict[str, object], cards: list[Gpu]) -> Finding:
    """Whether CUDA tensors run on the first GPU, else what to do, in the library's own words."""
    hopper = [g for g in cards if g.capability == HOPPER]
    if cards and not hopper:
        names = ", ".join(g.name for g in cards)
        text = f"do not run: they need a Hopper GPU (sm_90); here is {names}; use CPU tensors"
        return Finding("CUDA tensors", text, False)
    if hopper and not info["cuda"]:
        text = (
            f"do not run: {hopper[0].name} is here, but this build has no CUDA backend. Install a "
            "CUDA toolkit (12.8 or newer, nvcc on PATH or CUDA_HOME set) and build again with "
            "FP8MOE_CUDA=ON"
        )
        return Finding("CUDA tensors", text, False)
    try:
        sms = _C.sm_count()
    except (_C.DeviceUnavailable, _C.UnsupportedDevice, _C.CudaError) as error:
        reason = str(error).removeprefix("[sm_count] ")
        return Finding("CUDA tensors", f"do not run: {reason}", False if cards else None)
    name = hopper[0].name if hopper else "cuda:0"
    return Finding("CUDA tensors", f"run on {name}, {sms} SMs", True)


def advice(info: dict[str, object], cards: list[Gpu], torch: str | None) -> list[Finding]:
    """The parts that would run, and what to do about those that would not."""
    isa = info["cpu_isa"]
    fits = "portable" if isa == "baseline" else "vectorized"
    found = [Finding("CPU tensors", f"run here: {isa} ({fits}), {threads()}", True)]
    found.append(cuda_tensors(info, cards))
    if torch is None:
        text = (
            "do not run: nn and autograd need pip install 'fp8moe-cutlass[torch]'; ops on "
            "NumPy and other DLPack arrays, and the C++ library, run without"
        )
        found.append(Finding("torch layers", text, False))
    else:
        found.append(Finding("torch layers", "run", True))
    return found


def report() -> dict[str, list[Finding]]:
    """The sections of `fp8moe-cutlass doctor`."""
    info, cards, torch = _C.build_info(), gpus(), package("torch")
    return {
        "What was built": built(info),
        "What is here": here(cards, torch),
        "What would run": advice(info, cards, torch),
    }
