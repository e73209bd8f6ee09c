"""Records as pages.py and its tables read them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
Record = dict[str, Any]
Rows = list[list[str]]


@cache
def record(name: str) -> Record:
    found: Record = json.loads((ROOT / "docs/benchmarks" / name).read_text())
    return found


def results(name: str) -> list[Record]:
    found: list[Record] = record(name)["results"]
    return found


def by(name: str, *keys: str) -> dict[Any, dict[str, Record]]:
    """The rows of a record by its last key, within the others."""
    found: dict[Any, dict[str, Record]] = {}
    *outer, inner = keys
    for r in results(name):
        of = tuple(r[key] for key in outer)
        found.setdefault(of[0] if len(of) == 1 else of, {})[r[inner]] = r
    return found


def place(name: str) -> Record:
    of = record(name)
    found: Record = of.get("environment") or of
    return found


def card(name: str) -> str:
    """The GPU of a record: H100 or H200."""
    found: str = re.findall(r"H\d00", place(name)["gpu"])[0]
    return found
