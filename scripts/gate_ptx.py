#!/usr/bin/env python3
"""Says which GPU kernels of one commit are not, but for names, kernels of another.

    scripts/gate_ptx.py BASE [--new REV] [-j 2] [--only GLOB]

Compiles every .cu under src/ of both (NEW: the working tree unless --new is given) to PTX, with the
flags of each side's CMake files. What a rename or a move changes is masked: names of kernels,
parameters, functions and variables, labels, linkage, comments. A kernel stands with the functions
and variables that it uses. A kernel of NEW passes if one of BASE has the same text; kernels that
only BASE has were deleted. Exit status 1 if any kernel is only in NEW.

--only compares the .cu files whose path under src/ or name matches, on both sides. Needs nvcc
(PATH, CUDA_HOME or /usr/local/cuda) and the CUTLASS headers (CUTLASS_DIR, or the nvidia-cutlass
wheel of this Python). PTX is kept in the temporary folder, by content of the source, what it
includes of ours, and flags. An instance of a GEMM takes about 5 s.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import fnmatch
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(tempfile.gettempdir()) / f"fp8moe-gate-ptx-{os.getuid()}"
DIFF_LINES = 24

NAME = re.compile(r"(?<![\w$%.])[A-Za-z_$][\w$]*")
LABEL = re.compile(r"\$L__BB\d+_(\d+)")
REGISTER = re.compile(r"(%[a-z]+)\d+")
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
VARIABLE = re.compile(r"([A-Za-z_$][\w$]*)\s*(?:\[[^\]]*\])*\s*(?:=|;)")
FUNCTION = re.compile(r"\.(entry|func)\s*(?:\([^)]*\)\s*)?([A-Za-z_$][\w$]*)")
LOCAL = re.compile(r"^\s*\.(?:shared|local)\b[^;]*?([A-Za-z_$][\w$]*)\s*(?:\[[^\]]*\])*;")
# As demanglers write an anonymous namespace.
ANONYMOUS = re.compile(r"\(anonymous namespace\)|_GLOBAL__N__\w+?_cu_[0-9a-f]{8}|<unnamed>")


@dataclass(frozen=True)
class Kernel:
    """A kernel of a .cu file, and its text with the names masked."""

    source: str
    name: str
    text: str


class Tree:
    """The sources of one side and how its CMake files compile them."""

    def __init__(self, root: Path, cutlass: Path) -> None:
        self.root = root
        files = [root / "CMakeLists.txt", *sorted(root.glob("cmake/*.cmake"))]
        cmake = "\n".join(file.read_text() for file in files)
        flags = re.search(r"\$<\$<COMPILE_LANGUAGE:CUDA>:([^>]*)>", cmake)
        arch = re.search(r"CMAKE_CUDA_ARCHITECTURES (\w+)-real", cmake)
        standard = re.search(r"CMAKE_CUDA_STANDARD (\d+)", cmake)
        if not (flags and arch and standard):
            sys.exit(
                f"gate_ptx: the CMake files must name CUDA flags, arch and standard; got {root}"
            )
        self.flags = [
            *("-ptx", "-DNDEBUG", f"-std=c++{standard[1]}"),
            *("-gencode", f"arch=compute_{arch[1]},code=compute_{arch[1]}"),
            *flags[1].split(),
            *("-DFP8MOE_HAS_CUDA=1", '-DFP8MOE_VERSION="0"', '-DFP8MOE_CUDA_TOOLKIT="0"'),
            '-DFP8MOE_CUTLASS_VERSION="0"',
        ]
        self.includes = [root / "include", root / "src"]
        self.cutlass = cutlass

    def sources(self, only: str | None) -> list[Path]:
        """The .cu files, the slow ones (instances) first."""
        found = (self.root / "src").rglob("*.cu")
        chosen = [
            f
            for f in found
            if only is None
            or fnmatch.fnmatch(f.name, only)
            or fnmatch.fnmatch(str(f.relative_to(self.root / "src")), only)
        ]
        return sorted(chosen, key=lambda f: ("instances" not in f.parts, f))

    def key(self, source: Path, compiler: str) -> str:
        """Of all that the PTX depends on but CUTLASS, of which `compiler` has the version."""
        sha = hashlib.sha256("\0".join([compiler, *self.flags]).encode())
        seen: set[Path] = set()
        todo = [source]
        while todo:
            file = todo.pop()
            text = file.read_text()
            sha.update(text.encode() + b"\0")
            for name in INCLUDE.findall(text):
                for folder in (file.parent, *self.includes):
                    path = (folder / name).resolve()
                    if path.is_file() and path not in seen:
                        seen.add(path)
                        todo.append(path)
        return sha.hexdigest()[:32]

    def ptx(self, source: Path, nvcc: str, compiler: str) -> str:
        """The PTX of source, compiled unless an equal source was compiled before."""
        kept = CACHE / f"{self.key(source, compiler)}.ptx"
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                out = Path(folder) / "out.ptx"
                includes = [*(f"-I{i}" for i in self.includes), "-isystem", str(self.cutlass)]
                command = [nvcc, *self.flags, *includes, "-o", str(out), str(source)]
                run = subprocess.run(command, capture_output=True, text=True)
                if run.returncode:
                    sys.exit(f"gate_ptx: nvcc failed on {source}\n{run.stderr}")
                out.rename(kept)
        return kept.read_text()


def items(ptx: str) -> list[list[str]]:
    """The declarations and functions of a module, as lines without comments."""
    found: list[list[str]] = []
    item: list[str] = []
    depth = 0
    has_body = False
    for line in re.sub(r"/\*.*?\*/", "", ptx, flags=re.DOTALL).splitlines():
        line = line.split("//")[0].rstrip()
        if not line.strip() or line.startswith((".version", ".target", ".address_size")):
            continue
        if line.lstrip().startswith((".loc", ".file")):
            continue
        item.append(line)
        depth += line.count("{") + line.count("(") - line.count("}") - line.count(")")
        has_body |= line.startswith("{")
        if depth == 0 and (line.endswith("}") if has_body else line.endswith(";")):
            found.append(item)
            item, has_body = [], False
    if item:
        sys.exit(f"gate_ptx: PTX must end after an item; got {item[0]}")
    return found


def kernels(source: str, ptx: str) -> list[Kernel]:
    """The kernels of a module."""
    declared: dict[str, list[str]] = {}
    entries: list[str] = []
    for item in items(ptx):
        whole = " ".join(item)
        function = FUNCTION.search(whole)
        variable = None if function else VARIABLE.search(whole)
        match = function[2] if function else variable[1] if variable else None
        if match is None:
            sys.exit(f"gate_ptx: cannot read an item of {source}: {item[0]}")
        if match not in declared or len(item) > len(declared[match]):  # a definition, not its head
            declared[match] = item
        if function and function[1] == "entry":
            entries.append(match)
    return [Kernel(source, name, masked(name, declared)) for name in dict.fromkeys(entries)]


def masked(kernel: str, declared: dict[str, list[str]]) -> str:
    """The text of a kernel and of all it uses, each thing named by the order of its first use."""
    order: list[str] = [kernel]  # of what is declared outside functions
    lines: list[str] = []
    at = 0
    while at < len(order):
        name = order[at]
        item = declared[name]
        local = [m[1] for line in item if (m := LOCAL.match(line))]
        names = {word: f"local{n}" for n, word in enumerate(local)}

        def mask(match: re.Match[str], names: dict[str, str] = names, name: str = name) -> str:
            word = match[0]
            if word.startswith("$L__BB"):
                return LABEL.sub(r"$\1", word)
            if word in declared:
                if word not in order:
                    order.append(word)
                return f"@{order.index(word)}"
            return names.get(word, word.removeprefix(f"{name}_"))  # a parameter is NAME_param_0

        external = ".extern" in item[0] and ".func" in item[0]  # whose name is its meaning
        for line in item:
            line = re.sub(r"^\s*(?:\.(?:visible|weak|common)\s+)+", "", line)
            lines.append(line if external else NAME.sub(mask, line))
        at += 1
    return "\n".join(lines)


def demangled(names: set[str]) -> dict[str, str]:
    """Readable names; as they are without a demangler."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    ordered = sorted(names)
    if tool is None:
        return {name: name for name in ordered}
    run = subprocess.run(
        [tool], input="\n".join(ordered), capture_output=True, text=True, check=True
    )
    readable = [ANONYMOUS.sub("{}", line).removeprefix("void ") for line in run.stdout.splitlines()]
    return dict(zip(ordered, readable, strict=True))


def nearest(kernel: Kernel, base: list[Kernel], readable: dict[str, str]) -> Kernel | None:
    """The kernel of BASE with that name, else the one that shares most lines."""
    lines = collections.Counter(REGISTER.sub(r"\1", kernel.text).splitlines())

    def shared(other: Kernel) -> tuple[bool, float]:
        theirs = collections.Counter(REGISTER.sub(r"\1", other.text).splitlines())
        both = (lines & theirs).total()
        same_name = readable[kernel.name] == readable[other.name]
        return same_name, 2 * both / (lines.total() + theirs.total())

    return max(base, key=shared, default=None)


def difference(old: str, new: str) -> str:
    """A short diff; of registers' numbers only where nothing else differs."""
    plain_old, plain_new = (REGISTER.sub(r"\1", text) for text in (old, new))
    if plain_old != plain_new:
        old, new = plain_old, plain_new
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("base", "new")]
        for file, text in zip(files, (old, new), strict=True):
            file.write_text(text + "\n")
        command = ["git", "diff", "--no-index", "--no-color", "-U1", *map(str, files)]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[4:]
    shown = lines[:DIFF_LINES]
    if len(lines) > DIFF_LINES:
        shown.append(f"... {len(lines) - DIFF_LINES} more lines")
    return "\n".join(f"    {line}" for line in shown)


def cutlass_headers() -> Path:
    """As third_party/FindCUTLASS.cmake finds them."""
    given = os.environ.get("CUTLASS_DIR")
    wheel = importlib.util.find_spec("cutlass_library")
    if given:
        places = [Path(given), Path(given) / "include"]
    elif wheel and wheel.submodule_search_locations:
        places = [Path(wheel.submodule_search_locations[0]) / "source" / "include"]
    else:
        places = []
    for place in places:
        if (place / "cutlass" / "version.h").exists():
            return place
    sys.exit("gate_ptx: needs the CUTLASS headers: set CUTLASS_DIR or install nvidia-cutlass")


def find_nvcc() -> str:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])
    nvcc = shutil.which("nvcc", path=path)
    if nvcc is None:
        sys.exit("gate_ptx: needs nvcc (PATH, CUDA_HOME or /usr/local/cuda); found none")
    return nvcc


def archive(rev: str, into: Path) -> Path:
    """The sources of a commit, in a folder of their own."""
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", rev], cwd=ROOT, capture_output=True, text=True
    )
    paths = [p for p in ("CMakeLists.txt", "cmake", "include", "src") if p in listed.stdout.split()]
    run = subprocess.run(["git", "archive", rev, *paths], cwd=ROOT, capture_output=True)
    if run.returncode:
        sys.exit(f"gate_ptx: no such commit: {rev}\n{run.stderr.decode()}")
    into.mkdir()
    subprocess.run(["tar", "-x", "-C", str(into)], input=run.stdout, check=True)
    return into


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", metavar="BASE", help="a commit")
    parser.add_argument("--new", metavar="REV", help="a commit (default: the working tree)")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="compilers at a time (2)")
    parser.add_argument("--only", metavar="GLOB", help="these .cu files alone")
    args = parser.parse_args()
    cutlass, nvcc = cutlass_headers(), find_nvcc()
    compiler = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    compiler += (cutlass / "cutlass" / "version.h").read_text()
    CACHE.mkdir(mode=0o700, exist_ok=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(args.j) as pool,
    ):
        base = Tree(archive(args.base, Path(folder) / "base"), cutlass)
        new = Tree(archive(args.new, Path(folder) / "new") if args.new else ROOT, cutlass)
        jobs = [(tree, f) for tree in (base, new) for f in tree.sources(args.only)]
        if not jobs:
            sys.exit(f"gate_ptx: no .cu file matches {args.only}")
        compiled = pool.map(lambda job: job[0].ptx(job[1], nvcc, compiler), jobs)
        found: dict[Tree, list[Kernel]] = {base: [], new: []}
        for (tree, file), ptx in zip(jobs, compiled, strict=True):
            found[tree] += kernels(str(file.relative_to(tree.root)), ptx)
    return report(found[base], found[new])


def report(base: list[Kernel], new: list[Kernel]) -> int:
    readable = demangled({kernel.name for kernel in [*base, *new]})
    left = collections.defaultdict(list)
    for kernel in base:
        left[kernel.text].append(kernel)
    added = []
    for kernel in new:
        twins = left[kernel.text]
        if twins:  # of equal ones that of the same name, so that a deleted one has its own
            same = [t for t in twins if readable[t.name] == readable[kernel.name]]
            twins.remove((same or twins)[0])
        else:
            added.append(kernel)
    gone = [kernel for kernels in left.values() for kernel in kernels]
    for kernel in gone:
        print(f"only in BASE: {readable[kernel.name]}  ({kernel.source})")
    for kernel in added:
        print(f"only in NEW: {readable[kernel.name]}  ({kernel.source})")
        close = nearest(kernel, base, readable)
        if close is not None and close.text == kernel.text:
            print(f"  one more copy of {readable[close.name]}")
        elif close is not None:
            print(f"  nearest in BASE: {readable[close.name]}  ({close.source})")
            print(difference(close.text, kernel.text))
    print(
        f"{len(base)} kernels in BASE, {len(new)} in NEW: {len(new) - len(added)} equal, "
        f"{len(added)} only in NEW, {len(gone)} only in BASE"
    )
    return 1 if added else 0


if __name__ == "__main__":
    sys.exit(main())
