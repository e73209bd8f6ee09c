"""Builds the text that quality.py trains on, from packages of Debian 12: documentation and sources.

    python benchmarks/quality_text.py --out FOLDER    # needs apt-get, dpkg-deb and tokenizers

PACKAGES fixes versions, files and shares, so the text is the same wherever it is built. A mirror
drops old versions; snapshot.debian.org keeps them (`--packages` is a folder of .deb files). Files
are documents: one in a hundred, by the hash of its name, is held out. A byte-pair vocabulary is
trained on the others. FOLDER gets parts of uint16 tokens, compressed by xz, for a machine without a
network, and mix.json with the hash of all tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Tokens = np.ndarray[Any, np.dtype[np.uint16]]


class Package(NamedTuple):
    """Files of one package whose names match, at most so many bytes of them."""

    name: str
    version: str
    files: str
    megabytes: int
    inside: str | None = None  # the archive in the package that holds them


KERNEL = r"linux-source-6\.1/(block|crypto|fs|init|ipc|kernel|lib|mm|net|security|virt)/.*\.[ch]$"
PACKAGES = (
    Package("linux-doc-6.1", "6.1.192-2", r"/_sources/.*\.txt$", 22),
    Package("python3.11-doc", "3.11.2-6+deb12u9", r"/_sources/.*\.txt$", 11),
    Package("perl-doc", "5.36.0-7+deb12u4", r"\.pod$", 9),
    Package("vim-runtime", "2:9.0.1378-2+deb12u2", r"/doc/.*\.txt$", 9),
    Package("git-doc", "1:2.39.5-0+deb12u3", r"\.txt$", 3),
    Package("linux-source-6.1", "6.1.192-2", KERNEL, 50, "linux-source-6.1.tar.xz"),
    Package("golang-1.19-src", "1.19.8-2", r"\.(go|md)$", 40),
    Package("rust-src", "1.63.0+dfsg1-2", r"/(library|compiler|src/doc)/.*\.(rs|md)$", 35),
    Package("openjdk-17-source", "17.0.21.1+2-1~deb12u1", r"\.java$", 45, "src.zip"),
    Package("libpython3.11-stdlib", "3.11.2-6+deb12u9", r"\.py$", 5),
)
SHA256 = "43efbb56c0e62cc4fdbadcaad1511818d54b38c3b07d0df5e397458ad807ceff"  # tokenizers 0.23.3
VOCABULARY = 16384
END = "<|end|>"  # after each document, id 0
HELD_OUT = 100  # one document in so many
LEAST, MOST = 500, 300_000  # bytes of a document: longer ones are mostly tables
TRAINED_ON = 40_000_000  # bytes that the vocabulary is trained on
PART = 6_000_000  # tokens per file

# ---- building -----------------------------------------------------------------------------------


def package_file(package: Package, folder: Path) -> Path:
    """The .deb, downloaded if it is not there."""
    pattern = f"{package.name}_{package.version.replace(':', '%3a')}_*.deb"
    if not [*folder.glob(pattern)]:
        command = ["apt-get", "download", f"{package.name}={package.version}"]
        subprocess.run(command, cwd=folder, check=True)
    [found] = folder.glob(pattern)
    return found


def members(archive: tarfile.TarFile, package: Package) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the package's files."""
    wanted = re.compile(package.files)
    for entry in archive:
        data = archive.extractfile(entry) if entry.isfile() else None
        if data is None:
            continue
        if package.inside is None:
            if wanted.search(entry.name):
                yield entry.name, data.read()
        elif entry.name.endswith(f"/{package.inside}"):
            if package.inside.endswith(".zip"):
                with zipfile.ZipFile(io.BytesIO(data.read())) as inner:
                    yield from ((n, inner.read(n)) for n in inner.namelist() if wanted.search(n))
            else:
                with tarfile.open(fileobj=data, mode="r|xz") as inside:
                    yield from members(inside, package._replace(inside=None))


def key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def documents(package: Package, deb: Path) -> dict[str, str]:
    """The package's texts by the hash of their names, as many as its share has room for."""
    unpack = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    found: dict[str, str] = {}
    with (
        subprocess.Popen(unpack, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for name, data in members(archive, package):
            if LEAST <= len(data) <= MOST:
                try:
                    found[key(f"{package.name}/{name}")] = data.decode()
                except UnicodeDecodeError:
                    continue
    room = package.megabytes * 1_000_000
    chosen = {}
    for k in sorted(found):
        size = len(found[k].encode())
        if size <= room:
            room -= size
            chosen[k] = found[k]
    return chosen


def held_out(k: str) -> bool:
    return int(k, 16) % HELD_OUT == 0


def vocabulary(texts: Iterator[str]) -> Any:
    """A byte-level byte-pair encoding of VOCABULARY tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def first_bytes(texts: list[str], room: int) -> Iterator[str]:
    for text in texts:
        room -= len(text.encode())
        if room < 0:
            return
        yield text


def encoded(tokenizer: Any, texts: list[str]) -> Tokens:
    """The texts one after the other, each with END behind it."""
    parts = []
    for i in range(0, len(texts), 200):
        for found in tokenizer.encode_batch_fast(texts[i : i + 200]):
            parts.append(np.array([*found.ids, 0], np.uint16))
    return np.concatenate(parts)


def build(packages: Path, out: Path) -> dict[str, Any]:
    """Writes the parts and mix.json; returns what mix.json holds."""
    start = time.monotonic()
    packages.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    texts: dict[str, str] = {}
    shares = []
    for package in PACKAGES:
        own = documents(package, package_file(package, packages))
        size = sum(len(text.encode()) for text in own.values())
        shares.append({**package._asdict(), "documents": len(own), "bytes": size})
        texts |= own
        print(f"{package.name}: {len(own)} documents, {size / 1e6:.1f} MB", flush=True)
    order = sorted(texts, key=lambda k: k[::-1])  # a share has the least keys of its package
    train = [texts[k] for k in order if not held_out(k)]
    heldout = [texts[k] for k in order if held_out(k)]
    tokenizer = vocabulary(first_bytes(train, TRAINED_ON))
    tokenizer.save(str(out / "tokenizer.json"))
    print(f"vocabulary after {time.monotonic() - start:.0f} s", flush=True)
    mix = {
        "packages": shares,
        "heldout_bytes": sum(len(text.encode()) for text in heldout),
        "train_bytes": sum(len(text.encode()) for text in train),
    }
    return write(out, encoded(tokenizer, train), encoded(tokenizer, heldout), VOCABULARY, mix)


# ---- the packed form ----------------------------------------------------------------------------


def write(
    out: Path, train: Tokens, heldout: Tokens, vocabulary: int, more: dict[str, Any]
) -> dict[str, Any]:
    """Writes the tokens as parts, and mix.json."""
    out.mkdir(parents=True, exist_ok=True)
    names: dict[str, list[str]] = {}
    for kind, tokens in (("train", train), ("heldout", heldout)):
        names[kind] = []
        for i in range(0, len(tokens), PART):
            name = f"{kind}-{i // PART:02}.xz"
            (out / name).write_bytes(lzma.compress(tokens[i : i + PART].tobytes(), preset=3))
            names[kind].append(name)
    mix = {
        "sha256": digest(train, heldout),
        "train_tokens": len(train),
        "heldout_tokens": len(heldout),
        "vocabulary": vocabulary,
        "parts": names,
        **more,
    }
    (out / "mix.json").write_text(json.dumps(mix, indent=1) + "\n")
    return mix


def digest(train: Tokens, heldout: Tokens) -> str:
    """sha256 of all tokens, little-endian."""
    found = hashlib.sha256(train.astype("<u2").tobytes())
    found.update(heldout.astype("<u2").tobytes())
    return found.hexdigest()


def read(folder: Path) -> tuple[Tokens, Tokens, dict[str, Any]]:
    """The tokens to train on, those held out, and the mix. ValueError if the hash differs."""
    mix = json.loads((folder / "mix.json").read_text())
    parts = {
        kind: [np.frombuffer(lzma.decompress((folder / n).read_bytes()), "<u2") for n in names]
        for kind, names in mix["parts"].items()
    }
    train, heldout = (np.concatenate(parts[kind]) for kind in ("train", "heldout"))
    if digest(train, heldout) != mix["sha256"]:
        raise ValueError(f"[quality_text] the parts in {folder} must have mix.json's hash")
    return train, heldout, mix


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--packages", type=Path, help="of .deb files; default: OUT/packages")
    given = arguments.parse_args()
    made = build(given.packages or given.out / "packages", given.out)
    print({name: value for name, value in made.items() if name != "packages"})
    print("the text of SHA256" if made["sha256"] == SHA256 else "another text than that of SHA256")
