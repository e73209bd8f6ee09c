"""A sweep's record as a table, heat maps, and the generated part of docs/when-fp8-helps.md:

python -m fp8moe_cutlass.bench.sweep_report PAGE.md [FILE.json]

draws PAGE's map beside it and writes its tables between the page's markers: from a measured sweep,
or without one from the model, and says which.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .report import environment_text, fill
from .sweep import TORCH, predicted, tokens_an_expert

Record = dict[str, Any]
COLUMNS = (
    *("experts", "tokens an expert", "width", "FP8 ms", "bf16 ms", "bf16 / FP8"),
    *("as a graph", "with weights quantized every step"),
)


def eager(row: Record) -> float | None:
    """How many times faster FP8 is."""
    return ratio(row["peers"].get(TORCH), row["ms"])


def replayed(row: Record) -> float | None:
    return ratio(row["graph_peers"].get(TORCH), row.get("graph_ms"))


def with_weights(row: Record) -> float | None:
    """The same where the weights are quantized for every forward and backward, as a graph if the
    row has one."""
    ms, peers = row.get("graph_ms") or row["ms"], row["graph_peers"] or row["peers"]
    return ratio(peers.get(TORCH), ms and ms + row["weights_ms"])


def ratio(slow: float | None, fast: float | None) -> float | None:
    return slow / fast if slow and fast else None


def text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def cells(row: Record) -> tuple[str, ...]:
    """One line of the table, in the order of COLUMNS."""
    s = row["shape"]
    where = (str(s["E"]), f"{tokens_an_expert(s):.0f}", str(s["I"]))
    if row["ms"] is None:
        return (*where, row["error"], *[""] * 4)
    times = (f"{row['ms']:.3f}", f"{row['peers'][TORCH]:.3f}")
    return (*where, *times, *(text(f(row)) for f in (eager, replayed, with_weights)))


def lines(row: Record) -> list[tuple[str, ...]]:
    return [cells(row)]


def ordered(record: Record) -> list[Record]:
    key: Callable[[Record], Any] = lambda r: (  # noqa: E731
        r["shape"]["E"],
        r["shape"]["I"],
        tokens_an_expert(r["shape"]),
    )
    return sorted(record["results"], key=key)


def markdown(record: Record) -> str:
    table = [COLUMNS, tuple("---" for _ in COLUMNS), *(cells(row) for row in ordered(record))]
    return "\n".join("| " + " | ".join(line) + " |" for line in table) + "\n"


def plot(record: Record, path: Path) -> None:
    """bf16's time over FP8's: a column of maps for each number of experts; eager, as graphs, and
    with the weights quantized every step. Green: FP8 is faster."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in record["results"] if row["ms"] is not None]
    experts = sorted({row["shape"]["E"] for row in rows})
    views: list[tuple[str, Callable[[Record], float | None]]] = [
        ("eager", eager),
        ("CUDA graph", replayed),
        ("weights quantized every step", with_weights),
    ]
    views = [(name, of) for name, of in views if any(of(row) for row in rows)]
    figure, axes = pyplot.subplots(
        len(views),
        len(experts),
        figsize=(1.5 + 3.4 * len(experts), 1.0 + 2.1 * len(views)),
        layout="constrained",
        squeeze=False,
    )
    for line, (name, of) in zip(axes, views, strict=True):
        for place, count in zip(line, experts, strict=True):
            _map(place, [row for row in rows if row["shape"]["E"] == count], of)
            place.set_title(f"{count} experts, {name}", fontsize=8)
    figure.suptitle(f"bf16 time / FP8 time, forward + backward; {source(record)}", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _map(axes: Any, rows: list[Record], of: Callable[[Record], float | None]) -> None:
    tokens = sorted({tokens_an_expert(row["shape"]) for row in rows})
    widths = sorted({row["shape"]["I"] for row in rows})
    values = np.full((len(widths), len(tokens)), np.nan)
    for row in rows:
        at = widths.index(row["shape"]["I"]), tokens.index(tokens_an_expert(row["shape"]))
        values[at] = of(row) or np.nan
    axes.imshow(np.log2(values), cmap="RdYlGn", vmin=-1, vmax=1, aspect="auto", origin="lower")
    for (y, x), value in np.ndenumerate(values):
        if not np.isnan(value):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(tokens)), [f"{n:.0f}" for n in tokens], fontsize=7)
    axes.set_yticks(range(len(widths)), widths, fontsize=7)
    axes.set_xlabel("tokens an expert", fontsize=7)
    axes.set_ylabel("expert width I", fontsize=7)


def source(record: Record) -> str:
    if record["environment"] is None:
        return "PREDICTED by the model, not measured"
    return "measured on " + environment_text(record)


def crossover(record: Record) -> list[str]:
    """For each number of experts and width, the fewest tokens an expert from which FP8 is faster at
    every larger point: eager, as a graph, with weights quantized every step."""
    table = [
        "| experts | width | eager | CUDA graph | weights quantized every step |",
        "|" + "---|" * 5,
    ]
    rows = [row for row in ordered(record) if row["ms"] is not None]
    for experts, width in dict.fromkeys((r["shape"]["E"], r["shape"]["I"]) for r in rows):
        found = []
        for of in (eager, replayed, with_weights):
            best = "none"
            for row in reversed(
                [r for r in rows if (r["shape"]["E"], r["shape"]["I"]) == (experts, width)]
            ):
                value = of(row)
                if value is None or value <= 1.0:
                    break
                best = f"{tokens_an_expert(row['shape']):.0f}"
            found.append(best)
        table.append("| " + " | ".join([str(experts), str(width), *found]) + " |")
    return table


def write(page: Path, record: Record) -> None:
    """Write the record into the page, and its map beside it."""
    plot(record, page.with_suffix(".png"))
    hidden = record["results"][0]["shape"]["H"]
    part = [
        f"**{source(record)[0].upper()}{source(record)[1:]}.** Hidden size {hidden}, top-8.",
        "",
        f"![bf16 time over FP8 time]({page.with_suffix('.png').name})",
        "",
        "FP8 is faster from this many tokens an expert on:",
        "",
        *crossover(record),
        "",
        "<details><summary>All points</summary>",
        "",
        markdown(record),
        "</details>",
    ]
    page.write_text(fill(page.read_text(), "sweep_report", {"sweep": "\n".join(part)}))


if __name__ == "__main__":
    at, *measured = (Path(argument) for argument in sys.argv[1:])
    write(at, json.loads(measured[0].read_text()) if measured else predicted())
