"""One palette and one size for every plot of this repository, and a PNG of few bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

OURS = "#00795c"
OURS_LIGHT = "#8ccfb7"
BF16 = "#8b8f96"
OTHER = "#d98a1f"
BASELINE = "#b5483a"
LIMIT = "#222222"
SERIES = ("#2f6db3", "#d98a1f", "#00795c", "#b5483a", "#8458a8", "#57a8c7", "#a6842a", "#5b5f66")
WIDTH = 9.0  # inches: pages show a plot about 900 pixels wide

_SETTINGS: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def place_of(record: dict[str, Any]) -> str:
    """Where a record was made."""
    e = record["environment"]
    return f"{e['gpu'] or e['cpu']}, torch {e['torch'].partition('+')[0]}"


def subplots(rows: int = 1, columns: int = 1, *, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure of the common width, and its axes."""
    figsize = (WIDTH, height)
    made = _pyplot().subplots(rows, columns, figsize=figsize, layout="constrained", **options)
    return made[0], made[1]


def mosaic(layout: list[list[str]], *, height: float) -> tuple[Any, dict[str, Any]]:
    """The same, with axes by name."""
    made = _pyplot().subplot_mosaic(layout, figsize=(WIDTH, height), layout="constrained")
    return made[0], made[1]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(_SETTINGS)
    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write the figure; a PNG with a palette of 128 colors, which is a quarter of the bytes."""
    from matplotlib import pyplot

    if path.suffix.lower() != ".png":
        figure.savefig(path)
    else:
        from PIL import Image

        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        Image.open(buffer).convert("RGB").quantize(128).save(path, optimize=True)
    pyplot.close(figure)
