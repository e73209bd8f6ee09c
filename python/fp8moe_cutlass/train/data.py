"""The text a run trains on: bytes of real files, a held-out part, and batches that are a function
of (seed, step) alone, so that stopping and resuming needs no data state.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

SUFFIXES = (".py", ".txt", ".md", ".rst")
BLOCK = 16384  # bytes; every tenth block is held out
# Not prose of the library: installed packages, its tests, and tables written by programs.
STDLIB_SKIPS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
)


@dataclass(frozen=True)
class Corpus:
    """Bytes of text; `train` and `heldout` are disjoint. `fingerprint` names the exact content."""

    name: str
    train: Bytes  # [n]
    heldout: Bytes  # [m]
    fingerprint: str

    def batch(self, seed: int, step: int, batch: int, context: int) -> torch.Tensor:
        """Windows of the training text, [batch, context + 1] int64, from (seed, step) alone."""
        rng = np.random.default_rng([seed, step])
        starts = rng.integers(0, len(self.train) - context, size=batch)
        windows = self.train[starts[:, None] + np.arange(context + 1)]
        return torch.from_numpy(windows.astype(np.int64))

    def heldout_batches(self, windows: int, batch: int, context: int) -> Iterator[torch.Tensor]:
        """`windows` evenly spaced windows of the held-out text, in batches as `batch` gives."""
        starts = np.linspace(0, len(self.heldout) - context - 1, windows).astype(np.int64)
        for first in range(0, windows, batch):
            rows = starts[first : first + batch, None] + np.arange(context + 1)
            yield torch.from_numpy(self.heldout[rows].astype(np.int64))

    def unigram_entropy(self) -> float:
        """Entropy of one byte of the text in nats: what a model that sees no context can reach."""
        counts = np.bincount(np.concatenate([self.train, self.heldout]), minlength=256)
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


def walk(root: Path, suffixes: tuple[str, ...], skips: frozenset[str]) -> list[Path]:
    """Files under root by suffix, in an order that depends on their names alone."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skips and f != "__pycache__")
        found += [Path(folder, f) for f in sorted(files) if f.endswith(suffixes)]
    return found


def load(path: Path | None, context: int, max_bytes: int | None = None) -> Corpus:
    """Read the text of `path` (None: the standard library) and split it.

    Raises ValueError when there is too little of it for one window in both parts.
    """
    name, files = find_text(path)
    pieces: list[bytes] = []
    size = 0
    for file in files:
        pieces.append(file.read_bytes())
        size += len(pieces[-1])
        if max_bytes is not None and size >= max_bytes:
            break
    text = b"\n".join(pieces)[:max_bytes]
    if len(text) < 20 * (context + 1):
        raise ValueError(
            f"[train] the text must have at least {20 * (context + 1)} bytes; got {len(text)} "
            f"from {len(files)} files of {name}"
        )
    data = np.frombuffer(text, dtype=np.uint8)
    block = min(BLOCK, len(data) // 10)
    held = (np.arange(len(data)) // block) % 10 == 9
    return Corpus(name, data[~held], data[held], hashlib.sha256(text).hexdigest()[:16])
