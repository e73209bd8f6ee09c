"""Importing: without torch, without a driver, in one direction; what ships beside the code."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import client
import fp8moe_cutlass
from fp8moe_cutlass import _C

PACKAGE = Path(fp8moe_cutlass.__file__).parent

# Each room and what it may know of: tools, integrations -> nn -> distributed -> autograd -> ops.
# Nothing imports tools.
VOCABULARY = {"arrays", "recipe", "routing", "slow_path", "stream", "tensor", "typing", "version"}
RANK = {
    "_C": 0,
    **dict.fromkeys(VOCABULARY, 1),
    "ops": 2,
    "autograd": 3,
    "distributed": 4,
    "nn": 5,
    "integrations": 6,
    "tools": 7,
}


def run(code: str, **environment: str) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment or None
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_leaves_torch_alone() -> None:
    """The package alone imports neither torch nor its own operators."""
    assert run("import fp8moe_cutlass, sys; print('torch' in sys.modules)") == "False"


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # import torch: ModuleNotFoundError
import numpy as np
import fp8moe_cutlass as f
x = np.linspace(-3, 3, 64 * 256, dtype=np.float32).reshape(64, 256)
topk_idx = np.stack([np.arange(64) % 4, (np.arange(64) + 1) % 4], 1)
plan = f.ops.route(4, topk_idx=topk_idx)
plan.check()
rows, _ = f.ops.permute_pad(f.ops.quantize(x), plan)
w, w_t = f.ops.quantize_weight(np.ones((4, 128, 256), np.float32))
d = f.ops.grouped_gemm(rows, w, plan, out_dtype="float32")
h = f.ops.act_quantize(np.ones((128, 256), np.float32), plan)
out = f.ops.unpermute_unpad(d, plan)
want = 2 * f.ops.quantize(x).dequantize("float32").sum(1, keepdims=True, dtype=np.float64)
assert np.allclose(out, want, rtol=1e-4, atol=1e-2), np.abs(out - want).max()
print(type(out).__name__, out.dtype, rows.data.dtype, h.shape)
"""


def test_ops_alone_makes_values_of_torch() -> None:
    """FP8 tensors and plans are pytrees, whatever else is imported."""
    code = """
import torch
from fp8moe_cutlass import ops
q, plan = ops.quantize(torch.ones(2, 128)), ops.route(1, topk_idx=torch.zeros(2, 1).long())
print([len(torch.utils._pytree.tree_leaves(value)) for value in (q, plan)])
"""
    assert run(code) == "[2, 1]"


OLD_EXTENSION = """
import fp8moe_cutlass as f
from fp8moe_cutlass import _C
info = _C.build_info()
_C.build_info = lambda: {**info, "version": "0.0.9"}
"""


def test_an_extension_of_another_version() -> None:
    """Refused by the first use of anything, in one sentence; `doctor` goes on and says it."""
    for use in ("f.ops", "f.nn", "f.autograd", "from fp8moe_cutlass import ops"):
        code = f"try: {use}\nexcept f.VersionMismatch as error: print(error)"
        said = run(OLD_EXTENSION + code)
        assert said.startswith(f"fp8moe_cutlass {fp8moe_cutlass.__version__} needs its extension")
        assert "got 0.0.9 in" in said
        assert "pip install --force-reinstall fp8moe-cutlass" in said
    doctor = "from fp8moe_cutlass.tools import cli; cli.app(['doctor'])"
    done = subprocess.run(
        [sys.executable, "-c", OLD_EXTENSION + doctor], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    assert "got 0.0.9 in" in " ".join(done.stdout.split())


def test_numpy_works_without_torch() -> None:
    assert run(WITHOUT_TORCH) == "ndarray float32 uint8 (128, 128)"


def test_nn_says_that_it_needs_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport fp8moe_cutlass as f\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "f.nn"], capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError" in done.stderr
    assert "torch" in done.stderr.splitlines()[-1]


def test_import_touches_no_driver() -> None:
    """No library of a driver is mapped, and no device file is open, after import."""
    code = (
        "import os, fp8moe_cutlass, fp8moe_cutlass._C\n"
        "maps = open('/proc/self/maps').read()\n"
        "files = [os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')]\n"
        "print('libcuda.so' in maps, any('/dev/nvidia' in f for f in files))"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    assert run(code) == "False False"


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fp8moe_cutlass.nothing  # noqa: B018


def imports(path: Path) -> set[str]:
    """The rooms of the package a file imports from, wherever in the file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = path.relative_to(PACKAGE.parent).parts[: -node.level]
                base = ".".join([*up, *([base] if base else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    parts = [n.split(".") for n in names if n.startswith("fp8moe_cutlass.")]
    return {p[1] for p in parts if p[1] in RANK}


def files() -> list[tuple[str, Path]]:
    """(room, file) of every ranked file."""
    found = [(path.relative_to(PACKAGE).parts[0], path) for path in PACKAGE.rglob("*.py")]
    return [(room.removesuffix(".py"), path) for room, path in found if room[:2] != "__"]


@pytest.mark.parametrize(("room", "path"), [(r, p) for r, p in files() if r in RANK])
def test_one_direction(room: str, path: Path) -> None:
    """A room imports only from rooms below it."""
    for other in imports(path) - {room}:
        assert RANK[other] < RANK[room] or {room, other} <= VOCABULARY, f"{path} imports {other}"


def test_the_rule_sees_imports(tmp_path: Path) -> None:
    """The scanner finds every form of import."""
    path = PACKAGE / "ops" / "imaginary.py"
    source = "from ..nn import MoE\nimport fp8moe_cutlass.autograd\nfrom fp8moe_cutlass import _C\n"
    real = tmp_path / "imaginary.py"
    real.write_text(source)

    class At(type(real)):  # type: ignore[misc]
        def read_text(self, *args: object, **kwargs: object) -> str:
            return source

    assert imports(At(path)) == {"nn", "autograd", "_C"}


# ---- the same of the C++ sources ----------------------------------------------------------------

SOURCES = Path(__file__).parents[1] / "src"
# What the files of a folder include by quotes, beside their own folder, common/ and include/fp8moe.
BELOW = {
    "bindings": set(),
    "api": {"cpu"},
    "ops": {"cpu", "device"},
    "gemm": {"cpu", "device"},
    "cpu": set(),
    "device": set(),
    "common": set(),
}


def includes(text: str) -> set[str]:
    """What a source includes from src/ by quotes; a name without a folder is a neighbour."""
    names = re.findall(r'^ *# *include *"([^"]+)"', text, re.MULTILINE)
    return {name for name in names if "/" in name and not name.startswith("fp8moe/")}


def room(name: str) -> str:
    """The folder of a file under src/; of an operator, its family's: "ops/permute"."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "ops" and len(parts) > 2 else parts[0]


def backend(name: str) -> str | None:
    """The backend that a file under src/ is of; None for a check and what both share."""
    if name.split("/")[0] in ("cpu", "device"):
        return name.split("/")[0]
    if re.search(r"_cpu\.\w+$", name):
        return "cpu"
    return "device" if re.search(r"_cuda\.\w+$|\.cuh?$", name) else None


@pytest.mark.parametrize(
    "path", [p for p in sorted(SOURCES.rglob("*.*")) if p.is_file()], ids=lambda p: p.name
)
def test_includes_go_one_way(path: Path) -> None:
    """bindings -> include/; {api, ops/<family>, gemm} -> {cpu, device} -> common; no family
    another."""
    mine = str(path.relative_to(SOURCES))
    for name in includes(path.read_text()):
        top = name.split("/")[0]
        assert room(name) == room(mine) or top in BELOW[mine.split("/")[0]] | {"common"}, (
            f"{mine} includes {name}"
        )
        assert {backend(mine), backend(name)} != {"cpu", "device"}, f"{mine} includes {name}"


def test_the_public_headers_stand_alone() -> None:
    for path in (SOURCES.parent / "include" / "fp8moe").iterdir():
        assert not includes(path.read_text()), path


def test_the_rule_sees_includes() -> None:
    text = '#include "cpu/tile.h"\n  # include "ops/route/slots.cuh"\n#include <cuda.h>\n'
    text += '#include "call.h"\n#include "fp8moe/ops.h"\n'
    assert includes(text) == {"cpu/tile.h", "ops/route/slots.cuh"}
    assert room("ops/route/slots.cuh") == "ops/route"
    assert room("gemm/instances/x.cu") == "gemm"
    names = "gemm/tile_cpu.h", "cpu/tile.h", "ops/route/slots.cuh", "ops/route/route.cpp"
    assert [backend(n) for n in names] == ["cpu", "cpu", "device", None]


# -------------------------------------------------------------------------------------------------


def test_only_the_bindings_know_python_and_only_ops_know_the_extension() -> None:
    """_C is called in ops/ and by Fp8Tensor.dequantize (and asked for its build and its
    kinds of activations elsewhere)."""
    callers = {room for room, path in files() if "_C" in imports(path)}
    assert callers <= {"activation", "ops", "stream", "tensor", "tools", "version"}, callers


def test_stub_is_what_the_extension_has() -> None:
    """The stub in the tree, which type checkers and readers see, is the generated one."""
    generated = Path(str(_C.__file__)).parent / "_C.pyi"
    # From build to build the generator imports the package, or its modules one by one.
    ways = re.compile(r"^import fp8moe_cutlass.*\n", re.M)
    mine, theirs = (ways.sub("", f.read_text()) for f in (PACKAGE / "_C.pyi", generated))
    assert mine == theirs
    tree = ast.parse(generated.read_text())
    functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert functions == {n for n in dir(_C) if callable(getattr(_C, n)) and n.islower()}


def test_typed_marker_ships() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_paths_of_the_cxx_package() -> None:
    """What a C++ project needs is where the functions say, in an editable install too."""
    assert (Path(fp8moe_cutlass.cmake_dir()) / "fp8moeConfig.cmake").exists()
    assert (Path(fp8moe_cutlass.include_dir()) / "fp8moe" / "ops.h").exists()
    shown = run(
        "import sys, runpy; sys.argv = ['fp8moe_cutlass', '--cmake-dir'];"
        "runpy.run_module('fp8moe_cutlass', run_name='__main__')"
    )
    assert shown == fp8moe_cutlass.cmake_dir()


# ---- the types ----------------------------------------------------------------------------------

PUBLIC = ("", "ops", "nn", "autograd", "distributed", "telemetry", "integrations.deepep")
PUBLIC += ("integrations.transformer_engine", "integrations.transformers")


def test_client_uses_every_public_name() -> None:
    """mypy --strict looks at tests/client.py (pyproject.toml), which has every name and runs."""
    tree = ast.parse(Path(client.__file__).read_text())
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    used |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    for room in PUBLIC:
        module = importlib.import_module(f"fp8moe_cutlass.{room}".strip("."))
        assert set(module.__all__) - used == set(), room
    client.main()
