"""The expert block in JAX (examples/jax_moe), built by CMake: the bits of the torch layer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fp8moe_cutlass
from moe_problem import Problem, problem
from test_consumers import CMAKE, EXAMPLES, run
from test_docs import JAX, program

NAMES = ("out", "dx", "dprobs", "dgate_up", "ddown")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="no jax here: pip install jax"
)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


ON_CUDA = {"bfloat16", "float32"}  # each case compiles for seconds there


def problems() -> dict[str, Problem]:
    """By name. Sizes off the tile; an expert without tokens; ids that name no expert."""
    made = {}
    for dtype in DTYPES:
        p = problem(tokens=104, experts=8, hidden=272, intermediate=144, dtype=dtype)
        p.topk_idx[p.topk_idx == 3] = -1
        made[str(dtype).removeprefix("torch.")] = p
    one = problem(tokens=40, slots=1, topk_idx=torch.zeros(40, 1, dtype=torch.int64))
    return made | {"one expert": one, "no tokens": problem(tokens=0)}


def layers() -> list[Problem]:
    """Three layers with the tokens, routing and output gradient of the first."""
    return [problem(tokens=64, seed=seed) for seed in range(3)]


def results_of(p: Problem, device: str) -> list[torch.Tensor]:
    """The torch layer's output and gradients."""
    there = p.to(device)
    made = there.run(there.experts())
    return [getattr(made, name).cpu() for name in NAMES]


def results_of_layers(device: str) -> list[torch.Tensor]:
    first, *_ = parts = [p.to(device) for p in layers()]
    modules = [p.experts() for p in parts]
    x, probs = first.x.clone().requires_grad_(), first.probs.clone().requires_grad_()
    out = x
    for module in modules:
        out = out + module(out, first.topk_idx, probs)
    out.backward(first.dout)
    gate_up, down = (
        torch.stack([getattr(module, name).grad for module in modules])
        for name in ("gate_up_proj", "down_proj")
    )
    return [t.detach().cpu() for t in (out, x.grad, probs.grad, gate_up, down)]


def written(path: Path, device: str) -> None:
    """All problems, as jax_cases.py reads them."""
    arrays: dict[str, Any] = {}

    def add(case: str, p: Problem, **replaced: torch.Tensor) -> None:
        for name, t in {**vars(p), **replaced}.items():
            integers = name == "topk_idx"
            arrays[f"{case}/{name}"] = (t.int() if integers else t.float()).numpy()
        arrays[f"{case}/dtype"] = np.array(str(p.x.dtype).removeprefix("torch."))

    for case, p in problems().items():
        if device == "cpu" or case in ON_CUDA:
            add(case, p)
    parts = layers()
    stacked = {n: torch.stack([getattr(p, n) for p in parts]) for n in ("gate_up", "down")}
    add("layers", parts[0], **stacked)
    np.savez(path, **arrays)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built: what goes on PYTHONPATH."""
    if CMAKE is None:
        pytest.skip("no cmake on this machine")
    into, root = tmp_path_factory.mktemp("build"), fp8moe_cutlass.cmake_dir()
    options = (f"-Dfp8moe_ROOT={root}", f"-DPython_EXECUTABLE={sys.executable}")
    run(CMAKE, "-S", EXAMPLES / "jax_moe", "-B", into, *options)
    run(CMAKE, "--build", into)
    return into


def jax_run(device: str, *command: Any, **environment: str) -> None:
    """Python with JAX on a device: four devices of the CPU, or the GPUs."""
    of_jax = {
        "JAX_PLATFORMS": device,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONFAULTHANDLER": "1",  # where a crash was
    }
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | of_jax | environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def found(
    request: pytest.FixtureRequest, build: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What JAX gives on a device, run once."""
    into = tmp_path_factory.mktemp("jax")
    written(into / "problems.npz", request.param)
    script = Path(__file__).with_name("jax_cases.py")
    jax_run(request.param, script, build, into / "problems.npz", into / "found.npz")
    return {"device": request.param, **np.load(into / "found.npz")}


@pytest.mark.slow
def test_page_runs_as_written(build: Path, tmp_path: Path) -> None:
    code = tmp_path / "page.py"
    code.write_text(program(JAX))
    path = os.pathsep.join([str(build), os.environ.get("PYTHONPATH", "")])
    jax_run("cpu", code, PYTHONPATH=path)


def assert_same(found: dict[str, Any], case: str, want: list[torch.Tensor]) -> None:
    if f"{case}/out" not in found:
        pytest.skip(f"not run: {case}")
    for name, t in zip(NAMES, want, strict=True):
        np.testing.assert_array_equal(found[f"{case}/{name}"], t.float().numpy(), err_msg=name)


@pytest.mark.parametrize("case", list(problems()))
def test_output_and_gradients(case: str, found: dict[str, Any]) -> None:
    """Under jit, remat and a batch axis; without a gradient; under vmap, which is a loop."""
    want = results_of(problems()[case], found["device"])
    for way in ("jit", "remat", "batched"):
        assert_same(found, f"{case}, {way}", want)
    for way in ("alone", "vmap"):
        np.testing.assert_array_equal(found[f"{case}, {way}/out"], want[0].float().numpy())


def test_scan_over_layers(found: dict[str, Any]) -> None:
    assert_same(found, "layers", results_of_layers(found["device"]))


@pytest.mark.parametrize("case", list(problems()))
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_experts_shared_by_devices(devices: int, case: str, found: dict[str, Any]) -> None:
    """The bits of one device: a token has two experts, and a sum of two has one order."""
    assert_same(found, f"{case}, shared {devices}", results_of(problems()[case], found["device"]))


def test_gradients_that_nobody_reads_are_not_computed(found: dict[str, Any]) -> None:
    want = results_of(problems()["bfloat16"], found["device"])
    np.testing.assert_array_equal(found["frozen/dx"], want[1].float().numpy())
    backward, weight_gradients = found["frozen/calls"]
    assert backward >= 1
    assert weight_gradients == 0


ERRORS = {
    "width": "[moe_experts] H and I must be multiples of 16; got 250 and 144",
    "weights": "[moe_experts] gate_up must be [E, 2I, H] and down [E, H, I]; got",
    "x": "[moe_experts] x must be [..., 272]; got (104, 128)",
    "ids": "[moe_experts] topk_idx and topk_weights must be [104, S]; got (103, 2)",
    "dtype": "[moe_experts] topk_idx must be int32 or int64; got int16",
    "check_vma": "[moe_experts] shard_map must have check_vma=False",
}


def test_errors(found: dict[str, Any]) -> None:
    want = dict(ERRORS)
    if found["device"] == "cpu":
        want["id"] = "[route] topk_idx must lie in [-1, 8); got"
    for name, said in want.items():
        assert said in str(found[f"error/{name}"]), name


HANDLER_ERROR = """
import jax, jax.numpy as jnp
import fp8moe_jax

rows = jnp.zeros((3, 32), jnp.int8)
outputs = [jax.ShapeDtypeStruct((3, 1), dtype) for dtype in (jnp.int32, jnp.float32)]
call = jax.jit(lambda rows: fp8moe_jax._call("unpack", outputs, rows, hidden=16))
try:
    jax.block_until_ready(call(rows))
except Exception as error:
    assert "[jax] an array must be float32" in str(error), error
else:
    raise AssertionError("no error")
"""


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_error_of_a_handler(device: str, build: Path) -> None:
    """In a process of its own: on an H200 one with errors of handlers ended by SIGSEGV."""
    jax_run(device, "-c", HANDLER_ERROR, PYTHONPATH=str(build))


@pytest.mark.slow
def test_benchmark(build: Path, tmp_path: Path) -> None:
    """benchmarks/jax_layer.py at a tiny size: JAX and torch in one process."""
    script = EXAMPLES.parent / "benchmarks/jax_layer.py"
    given = ("--device", "cpu", "--quick", "--build", build, "--json", tmp_path / "found.json")
    jax_run("cpu", script, *given)
    (row,) = json.loads((tmp_path / "found.json").read_text())["results"]
    assert all(row["bit_equal"].values())
    assert set(row["peers"]) == {"torch, captured", "ragged_dot"}
    assert 0.03 < row["ragged_dot_differs_by"] < 0.1  # FP8 against bf16
