"""The text a run trains on: bytes of real files, a held-out part, and batches that are a function
of (seed, step) alone, so that stopping and resuming needs no data state.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

CPU = torch.device("cpu")
Bytes = NDArray[np.uint8]

SUFFIXES = (".py", ".txt", ".md", ".rst")
BLOCK = 16384  # bytes; every tenth block is held out
# Not prose of the library: installed packages, its tests, and tables written by programs.
STDLIB_SKIPS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
)


@dataclass(frozen=True)
class Corpus:
    """Bytes of text; `train` and `heldout` are disjoint. `fingerprint` names the exact content.

    Each part is placed once on every device that asks for batches: a step sends the starts of its
    windows alone.
    """

    name: str
    train: Bytes  # [n]
    heldout: Bytes  # [m]
    fingerprint: str
    _placed: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def batch(
        self, seed: int, step: int, batch: int, context: int, device: torch.device = CPU
    ) -> torch.Tensor:
        """Windows of the training text, [batch, context + 1] int64, from (seed, step) alone."""
        rng = np.random.default_rng([seed, step])
        starts = rng.integers(0, len(self.train) - context, size=batch)
        return self._windows("train", starts, context, device)

    def heldout_batches(
        self, windows: int, batch: int, context: int, device: torch.device = CPU
    ) -> Iterator[torch.Tensor]:
        """`windows` evenly spaced windows of the held-out text, in batches as `batch` gives."""
        starts = np.linspace(0, len(self.heldout) - context - 1, windows).astype(np.int64)
        for first in range(0, windows, batch):
            yield self._windows("heldout", starts[first : first + batch], context, device)

    def _windows(
        self, part: str, starts: NDArray[np.int64], context: int, device: torch.device
    ) -> torch.Tensor:
        if (part, device) not in self._placed:
            self._placed[part, device] = torch.tensor(getattr(self, part), device=device)
        first = torch.from_numpy(starts).to(device, non_blocking=True)
        at = first[:, None] + torch.arange(context + 1, device=device)
        return self._placed[part, device][at].long()

    @cached_property
    def unigram_entropy(self) -> float:
        """Entropy of one byte of the text in nats: what a model that sees no context can reach."""
        counts = np.zeros(256)
        for part in (self.train, self.heldout):
            for first in range(0, len(part), 1 << 24):
                counts += np.bincount(part[first : first + (1 << 24)], minlength=256)
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())


def find_text(path: Path | None) -> tuple[str, list[Path]]:
    """A name and the files: those of `path`, or the standard library's sources for None."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        name = f"the standard library of Python {platform.python_version()}"
        return name, walk(root, (".py",), STDLIB_SKIPS)
    if path.is_dir():
        return str(path), walk(path, SUFFIXES, frozenset())
    if not path.is_file():
        raise ValueError(f"[train] --text must be a file or a folder; got {path}")
    return str(path), [path]


def find_every_python() -> tuple[str, list[Path]]:
    """A name and the files: the Python sources of this interpreter, the standard library's first,
    then those of every installed package."""
    name, files = find_text(None)
    folders = dict.fromkeys(sysconfig.get_path(key) for key in ("purelib", "platlib"))
    for folder in folders:
        files += walk(Path(folder), (".py",), frozenset())
    return f"{name} and the packages installed beside it", files


def walk(root: Path, suffixes: tuple[str, ...], skips: frozenset[str]) -> list[Path]:
    """Files under root by suffix, in an order that depends on their names alone."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skips and f != "__pycache__")
        found += [Path(folder, f) for f in sorted(files) if f.endswith(suffixes)]
    return found


def load(
    path: Path | None,
    context: int,
    max_bytes: int | None = None,
    every_python: bool = False,
) -> Corpus:
    """Read the text of `path` (None: the standard library; `every_python`: and all installed
    packages), each content once, and split it.

    Raises ValueError when there is too little of it for one window in both parts.
    """
    if every_python and path is not None:
        raise ValueError(f"[train] --every-python is a text of its own; got --text {path} too")
    name, files = find_every_python() if every_python else find_text(path)
    pieces: dict[bytes, bytes] = {}  # by digest: a copy of a file would leak into the other part
    size = 0
    for file in files:
        piece = file.read_bytes()
        if pieces.setdefault(hashlib.sha256(piece).digest(), piece) is piece:
            size += len(piece)
        if max_bytes is not None and size >= max_bytes:
            break
    text = b"\n".join(pieces.values())[:max_bytes]
    if len(text) < 20 * (context + 1):
        raise ValueError(
            f"[train] the text must have at least {20 * (context + 1)} bytes; got {len(text)} "
            f"from {len(files)} files of {name}"
        )
    data = np.frombuffer(text, dtype=np.uint8)
    block = min(BLOCK, len(data) // 10)
    blocks = [data[i : i + block] for i in range(0, len(data), block)]
    held = np.concatenate(blocks[9::10])
    kept = np.concatenate([b for i, b in enumerate(blocks) if i % 10 != 9])
    return Corpus(name, kept, held, hashlib.sha256(text).hexdigest()[:16])
