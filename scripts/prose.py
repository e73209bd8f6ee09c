"""Counts what makes README and docs hard to read; exits with 1 where a page breaks a limit.

    python scripts/prose.py [--rev REV] [PAGE...]

Per page: lines, words, numbers, sentences over 25 words, and words that the glossary replaces.
Without pages it reads README.md, CONTRIBUTING.md, CHANGELOG.md and docs/.
`--rev` reads the pages of a commit. README.md also has limits of its own.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST = 25  # words in a sentence
README = {"lines": 100, "words": 750, "numbers": 80}

UNITS = "scale|GEMM|launch|byte|KiB|us|ms|row|kernel|call|word|cop(?:y|ie)|stage|way"
PER = "expert|token|channel|row|step|rank|call|warp|tile|launch|parameter|layer|GPU|block|device"
GLOSSARY = {  # what to write: what not to
    "per": rf"\b(?:{UNITS})s? an? (?:{PER})\b",
    "static or dynamic schedule": r"\bdealt\b|\btiles? (?:are |is )?taken\b",
    "raster group": r"\bbands?\b",
    "staging buffer, plan buffer": r"\bslabs?\b",
    "128x128-scaled, 1x128-scaled": r"\btokens_(?:block|column)\b|\bper_channel\b",
    "tail tile, split tile": r"\b(?:low|flank|thin) tiles?\b",
    "192x128 tile": r"\btall tiles?\b",
    "wire format": r"\bthe wire\b(?! format)",
    "dispatch layer, integration": r"\bdoors?\b",
    "reference, baseline": r"\bat (?:its|their) best\b|\bas (?:it is )?usually written\b",
    "FP8 weight cache": r"\bFP8 copies\b",
    "except": r"\bbut for\b|, but (?:that|where|while)\b",
    "who does what": r"\b(?:is|are|was|were) (?:asked|aimed)\b|\baimed at\b|\bas it comes\b",
    "no acceptance sheet": r"\b(?:bar|aim|target)s? (?:is|are|was|were) met\b|\b1\.\d+ asked\b",
}


def prose(text: str) -> list[str]:
    """The paragraphs, list items and table cells of a page, without code, links and markup."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*(?:[-*>]|\d+\.|#+) +", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\|(.*)\|$", lambda row: "\n\n" + row[1].replace("|", "\n\n"), text, flags=re.M)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip(" \n-:")]


def sentences(text: str) -> list[str]:
    return [s for part in prose(text) for s in re.split(r"(?<=[.!?])[)\"*]*\s+(?=\S)", part)]


def words(text: str) -> list[str]:
    return re.findall(r"[^\s|]*\w[^\s|]*", text)


def measure(text: str) -> dict[str, list[str] | int]:
    """What the limits are about, of one page."""
    bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return {
        "lines": text.count("\n"),
        "words": len(words(bare)),
        "numbers": len(re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)*", bare)),
        "long sentences": [s for s in sentences(text) if len(words(s)) > LONGEST],
        "glossary": [
            f"{found[0]} (write: {better})"
            for part in prose(text)
            for better, worse in GLOSSARY.items()
            for found in re.finditer(worse, part)
        ],
    }


def pages(rev: str | None) -> list[str]:
    where = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs"]
    listing = ["ls-files"] if rev is None else ["ls-tree", "-r", "--name-only", rev]
    done = subprocess.run(["git", *listing, "--", *where], cwd=ROOT, capture_output=True, text=True)
    return [p for p in done.stdout.split() if p.endswith(".md")]


def read(page: str, rev: str | None) -> str:
    if rev is None:
        return (ROOT / page).read_text()
    show = ["git", "show", f"{rev}:{page}"]
    return subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE")
    parser.add_argument("--rev", help="a commit to read instead of the working tree")
    given = parser.parse_args()
    wrong: list[str] = []
    total: dict[str, int] = {}
    print(f"{'page':45}{'lines':>7}{'words':>7}{'numbers':>9}{'long':>6}{'glossary':>10}")
    for page in given.pages or pages(given.rev):
        found = measure(read(page, given.rev))
        counts = {k: v if isinstance(v, int) else len(v) for k, v in found.items()}
        total = {k: total.get(k, 0) + v for k, v in counts.items()}
        print(f"{page:45}" + "{:7}{:7}{:9}{:6}{:10}".format(*counts.values()))
        for kind in ("long sentences", "glossary"):
            hits = found[kind]
            assert isinstance(hits, list)
            wrong += [f"{page}: {kind}: {hit}" for hit in hits]
        if page == "README.md":
            wrong += [f"{page}: {k} {counts[k]} > {m}" for k, m in README.items() if counts[k] > m]
    print(f"{'total':45}" + "{:7}{:7}{:9}{:6}{:10}".format(*total.values()))
    if given.rev is None:
        print(*wrong, sep="\n")
    return int(bool(wrong) and given.rev is None)


if __name__ == "__main__":
    sys.exit(main())
