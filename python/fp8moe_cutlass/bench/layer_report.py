"""A record of bench --layer as tables and plots:
python -m fp8moe_cutlass.bench.layer_report FILE.json [PAGE] prints the tables, draws FILE.png and
writes the headline into the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .kernels import GEMMS
from .report import fill

Record = dict[str, Any]
COLUMNS = (
    "model",
    "tokens",
    "variant",
    "ms",
    "sustained",
    "x torch",
    "limit ms",
    "host us",
    "peers, ms",
)
HEADLINE = "forward+backward"
TORCH = "torch bf16"


def shape_text(row: Record) -> str:
    s = row["shape"]
    return f"{s['E']} experts, top-{s['S']}, H {s['H']}, I {s['I']}"


def ms_text(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def cells(row: Record) -> tuple[str, ...]:
    """One line of the table, in the order of COLUMNS."""
    if row.get("error"):
        return (
            row["model"],
            str(row["shape"]["T"]),
            row["variant"],
            "error",
            *[""] * 4,
            row["error"],
        )
    torch_ms = row["peers"].get(TORCH)
    peers = [f"{name} {ms_text(ms)}" for name, ms in row["peers"].items()]
    peers += [f"{name}: {text}" for name, text in row.get("errors", {}).items()]
    return (
        row["model"],
        str(row["shape"]["T"]),
        row["variant"],
        ms_text(row["ms"]),
        ms_text(row.get("sustained_ms")),
        f"{torch_ms / row['ms']:.2f}" if torch_ms else "",
        ms_text(row["limit_ms"]),
        f"{row['host_us']:.0f}",
        "; ".join(peers),
    )


def lines(row: Record) -> list[tuple[str, ...]]:
    """What a row is in the table."""
    return [cells(row)]


def memory_cells(record: Record) -> Iterator[tuple[str, ...]]:
    """What is kept from forward to backward, KiB a token, and the peak of both, GiB."""
    yield ("model", "variant", "who", "saved, arithmetic", "saved, allocator", "peak, GiB")
    for row in record["results"]:
        for who, m in row.get("memory", {}).items():
            tokens = row["shape"]["T"] * 1024
            yield (
                row["model"],
                row["variant"],
                who,
                f"{m['saved_arithmetic'] / tokens:.1f}" if "saved_arithmetic" in m else "",
                f"{m['saved'] / tokens:.1f}" if "saved" in m else "",
                f"{m['peak'] / 2**30:.2f}" if "peak" in m else "",
            )


def markdown(table: Iterable[tuple[str, ...]]) -> str:
    """The first line is the header."""
    head, *rest = table
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rest))


def tables(record: Record) -> str:
    times = markdown([COLUMNS, *(cells(row) for row in record["results"])])
    return f"{times}\n\n{markdown(memory_cells(record))}\n"


def headline_rows(record: Record) -> list[Record]:
    return [r for r in record["results"] if r["variant"] == HEADLINE and not r.get("error")]


def peers_of(rows: list[Record]) -> list[str]:
    """Who runs in any of the rows, in order of appearance."""
    return list(dict.fromkeys(peer for row in rows for peer in row["peers"]))


def headline(record: Record) -> str:
    """Forward and backward of every model, milliseconds, and how many times ours the peers take."""
    rows = headline_rows(record)
    peers = peers_of(rows)
    table: list[tuple[str, ...]] = [("forward and backward, ms", "fp8moe", *peers)]
    for row in rows:
        found = [(row["peers"].get(peer), row["ms"]) for peer in peers]
        times = [f"{ms_text(ms)} ({ms / ours:.2f}x)" if ms else "" for ms, ours in found]
        table.append((row["model"], ms_text(row["ms"]), *times))
    return markdown(table)


# ---- plots --------------------------------------------------------------------------------------


def plot(record: Record, path: Path) -> None:
    """Left: forward and backward beside the peers. Right: where the time goes, a stack of a lone
    step's kernels (GEMMs in blue) under what steps in a row add (the power limit's lower clock, the
    host, launches), beside the arithmetic limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = headline_rows(record)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 1.6 + 0.95 * max(len(rows), 2)), layout="constrained"
    )
    _compare(left, rows)
    _stack(right, rows)
    environment = record["environment"]
    place = environment["gpu"] or environment["cpu"]
    figure.suptitle(
        f"One expert block, forward + backward; {place}, torch {environment['torch']}", fontsize=10
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _compare(axes: Any, rows: list[Record]) -> None:
    names = peers_of(rows)
    height = 0.8 / (1 + len(names))
    for place, name in enumerate(["fp8moe", *names]):
        at = [y + place * height for y in range(len(rows))]
        values = [r["ms"] if name == "fp8moe" else r["peers"].get(name, 0.0) for r in rows]
        color = "tab:green" if name == "fp8moe" else f"C{place if place != 2 else 7}"
        bars = axes.barh(at, values, height=height * 0.95, color=color, label=name)
        axes.bar_label(bars, [ms_text(v) if v else "" for v in values], padding=2, fontsize=7)
    _name_rows(axes, rows, offset=0.4 - height / 2)
    axes.margins(x=0.12)
    axes.set_xlabel("ms")
    axes.legend(fontsize=7, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _stack(axes: Any, rows: list[Record]) -> None:
    from matplotlib import colormaps

    roles = list(dict.fromkeys(role for row in rows for role in row.get("kernels") or {}))
    gemms = [r for r in roles if r in GEMMS]
    others = [r for r in roles if r not in GEMMS]
    colors = {r: colormaps["Blues"](0.35 + 0.6 * i / len(GEMMS)) for i, r in enumerate(gemms)}
    colors |= {r: colormaps["YlOrBr"](0.15 + 0.8 * i / len(others)) for i, r in enumerate(others)}
    ends = [0.0] * len(rows)
    for role in gemms + others:
        values = [(row.get("kernels") or {}).get(role, 0.0) / 1e3 for row in rows]
        axes.barh(range(len(rows)), values, left=ends, height=0.6, color=colors[role], label=role)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    more = [max(row["ms"] - end, 0.0) for row, end in zip(rows, ends, strict=True)]
    axes.barh(range(len(rows)), more, left=ends, height=0.6, color="lightgray", label="in a row")
    for y, row in enumerate(rows):
        axes.plot([row["limit_ms"]] * 2, [y - 0.4, y + 0.4], color="black", linewidth=1.5)
    axes.plot([], [], color="black", label="arithmetic limit")
    _name_rows(axes, rows)
    axes.set_xlabel("ms; a lone step's GEMMs blue, its other kernels brown; gray: steps in a row")
    axes.legend(fontsize=6, ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _name_rows(axes: Any, rows: list[Record], offset: float = 0.0) -> None:
    labels = [f"{row['model']}\n{shape_text(row)}" for row in rows]
    axes.set_yticks([y + offset for y in range(len(rows))], labels, fontsize=7)
    axes.invert_yaxis()


if __name__ == "__main__":
    source = Path(sys.argv[1])
    loaded = json.loads(source.read_text())
    print(tables(loaded))
    plot(loaded, source.with_suffix(".png"))
    for page in map(Path, sys.argv[2:]):
        page.write_text(fill(page.read_text(), "layer_report", {"layer": headline(loaded)}))
