"""The generated tables of docs/scale-out.md, and the one of README.md:

python -m fp8moe_cutlass.bench.ep_page REPOSITORY

writes them between the pages' markers, from the records in docs/benchmarks. A test keeps the pages
equal to that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .ep_fit import EXACT, Bare, bare, fit, measured, modelled
from .ep_model import WORLDS, Layer, Line, Links, distinct, fixed_ms, step, wire, zipf
from .ep_report import ALONE, LAYER, SAME
from .layer_report import markdown, ms_text
from .report import fill

Record = dict[str, Any]
EP, LAYERS = "ep-h200.json", "layer-h200.json"
TRAINED = {"train-cpu": "train-ep-cpu.json", "train-gpu": "train-ep-h200.json"}
MODELS = (
    ("DeepSeek-V3, 32 experts", "DeepSeek-V3", 256),
    ("Qwen3-235B, 16 experts", "Qwen3-235B", 128),
)
GATHERED = "bf16 torch, gather and all-to-all"


def percent(value: float) -> str:
    return f"{100 * value:+.0f}%"


# ---- what travels -------------------------------------------------------------------------------


def table_of_ranks(experts: int = 256) -> Iterator[Line]:
    """Distinct ranks a token goes to: what deduplication leaves of top-k rows."""
    tops = (1, 2, 4, 6, 8)
    yield (
        *("W", *(f"top-{k}" for k in tops), "Zipf: top-8"),
        *("the fullest rank's rows", "and assignments"),
    )
    for ranks in WORLDS:
        if ranks <= experts:
            skewed = (f"{value:.2f}" for value in vars(zipf(experts, 8, ranks)).values())
            yield (str(ranks), *(f"{distinct(experts, k, ranks):.2f}" for k in tops), *skewed)


def table_of_bytes(layer: Layer) -> Iterator[Line]:
    """KB a token sends to other ranks in a step, and the dispatch of it alone."""
    yield (
        "W",
        "rows to others, top-k copies",
        "deduplicated",
        "dispatch bf16, copies",
        "dispatch bf16",
        "dispatch FP8",
        "step bf16",
        "step FP8",
    )
    fp8, bf16 = wire(layer), wire(layer, fp8=False)
    for ranks in WORLDS[1:]:
        if ranks > layer.experts:
            break
        share = (ranks - 1) / ranks
        copies, rows = layer.slots * share, distinct(layer.experts, layer.slots, ranks) * share
        sizes = (copies * bf16.dispatch, rows * bf16.dispatch, rows * fp8.dispatch)
        steps = (rows * bf16.total, rows * fp8.total)
        yield (
            str(ranks),
            f"{copies:.2f}",
            f"{rows:.2f}",
            *(f"{size / 1e3:.1f}" for size in sizes + steps),
        )


# ---- what was measured --------------------------------------------------------------------------


def table_of_dispatches(record: Record) -> Iterator[Line]:
    """FP8 against bf16, between ranks, balanced, exact: with packing and unpacking, and without."""
    yield (
        *("model", "H", "W", "MB to others", "FP8 dispatch, ms", "of it the all-to-all"),
        *("bf16 all-to-all alone", "x", "x, all-to-alls alone", "bf16 torch with its gather", "x"),
    )
    for row in balanced(record, "dispatch"):
        alone, gathered = row["peers"][ALONE], row["peers"][GATHERED]
        yield (
            row["model"],
            str(row["shape"]["H"]),
            str(row["shape"]["W"]),
            f"{row['bytes'] / 1e6:.1f}",
            *(ms_text(ms) for ms in (row["ms"], row["limit_ms"], alone)),
            f"{alone / row['ms']:.2f}",
            f"{alone / row['limit_ms']:.2f}",
            ms_text(gathered),
            f"{gathered / row['ms']:.2f}",
        )


def table_of_layers(record: Record, layers: Record) -> Iterator[Line]:
    """Forward and backward beside bf16 torch with the same exchange, and what a bf16 layer would
    take that is as fast as torch on one GPU and exchanges by the bare all-to-all."""
    torch_ms = {
        short: row["peers"]["torch bf16"]
        for name, short, _ in MODELS
        for row in layers["results"]
        if (row["model"], row["variant"]) == (name, "forward+backward")
    }
    yield (
        *("model", "W", "routing, sizes", "ms", "one GPU alone", "four all-to-alls", "the rest"),
        *("efficiency", "tokens/s", "bf16 torch, same exchange", "x", "at best", "x"),
    )
    for row in record["results"]:
        if row["op"] != LAYER:
            continue
        theirs, model = row["peers"][SAME], row["model"]
        sent = row["shape"]["W"] > 1 and row["variant"] == EXACT and model in torch_ms
        best = torch_ms[model] + 4 * _bf16_ms(record, row) if sent else None
        yield (
            model,
            str(row["shape"]["W"]),
            row["variant"],
            *(ms_text(row[name]) for name in ("ms", "alone_ms", "exchange_ms")),
            ms_text(row["ms"] - row["alone_ms"] - row["exchange_ms"]),
            f"{100 * row['efficiency']:.0f}%",
            f"{row['tokens_per_s']:,.0f}",
            ms_text(theirs),
            f"{theirs / row['ms']:.2f}",
            ms_text(best),
            "" if best is None else f"{best / row['ms']:.2f}",
        )


def table_of_scaling(record: Record) -> Iterator[Line]:
    """Tokens/s of a model's balanced, exact steps by ranks, and bf16 torch's time over ours."""
    rows = [r for r in record["results"] if (r["op"], r["variant"]) == (LAYER, EXACT)]
    worlds = sorted({row["shape"]["W"] for row in rows})
    yield (
        "forward and backward, tokens/s",
        *(f"{w} GPU{'s' * (w > 1)}" for w in worlds),
        "bf16 torch with the same exchange",
    )
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        times = ", ".join(f"{row['peers'][SAME] / row['ms']:.2f}" for row in mine)
        yield (
            model,
            *(f"{row['tokens_per_s']:,.0f}" for row in mine),
            f"{times} times slower",
        )


def _bf16_ms(record: Record, layer: Record) -> float:
    """The bf16 all-to-all of a layer's rows, by itself."""
    for row in balanced(record, "dispatch"):
        if (row["model"], row["shape"]) == (layer["model"], layer["shape"]):
            return float(row["peers"][ALONE])
    raise ValueError(f"[ep_page] the record must have a dispatch of {layer['shape']}; got none")


def balanced(record: Record, op: str) -> Iterator[Record]:
    """The exact, balanced rows of `op` between ranks."""
    for row in record["results"]:
        if (row["op"], row["variant"]) == (op, EXACT) and row["shape"]["W"] > 1:
            yield row


# ---- the model ----------------------------------------------------------------------------------


def table_of_constants(links: Links) -> Iterator[Line]:
    yield ("constant", "fitted")
    yield ("an all-to-all of nothing, one rank", f"{links.collective_us:.0f} us")
    yield ("more for each peer in the node", f"{links.peer_us:.1f} us")
    yield ("bytes to other ranks, each way", f"{links.nvlink_gb_s:.0f} GB/s a GPU")
    yield ("plan and sizes of exact mode, beside their all-to-all", f"{links.host_us:.0f} us")
    yield ("rows packed, summed, summed again", f"{links.copy_gb_s:.0f} GB/s (the copy)")
    yield ("gaps of a step", f"{links.gaps_us:.0f} us")


def table_of_errors(record: Record, links: Links) -> Iterator[Line]:
    """Every exact all-to-all and step between ranks: measured, the model, its error."""
    yield ("model", "W", "what", "MB", "measured, ms", "model, ms", "error")
    rows = [run for run in bare(record) if run.row["variant"] == EXACT]
    for step_row in balanced(record, LAYER):
        of_layer = [r for r in rows if _same_layer(r.row, step_row)]
        for run in of_layer:
            yield _error(run.row, run.what, f"{run.bytes / 1e6:.1f}", run.ms, bare_ms(run, links))
        for row in record["results"]:
            if row["op"] == LAYER and _same_layer(row, step_row) and "exact" in row["variant"]:
                routing = row["variant"].partition(",")[0]
                what = f"the step, {routing}"
                yield _error(row, what, "", row["ms"], modelled(row, links))


def bare_ms(run: Bare, links: Links) -> float:
    """What the model says of an all-to-all of that many bytes."""
    ranks: int = run.row["shape"]["W"]
    return fixed_ms(ranks - 1, links) + run.bytes / links.nvlink_gb_s / 1e6


def _same_layer(a: Record, b: Record) -> bool:
    return bool((a["model"], a["shape"]) == (b["model"], b["shape"]))


def _error(row: Record, what: str, size: str, ms: float, model: float) -> Line:
    where = (row["model"], str(row["shape"]["W"]), what, size)
    return (*where, ms_text(ms), ms_text(model), percent(model / ms - 1.0))


def table_of_steps(layer: Layer, links: Links) -> Iterator[Line]:
    """The block's forward and backward, balanced, in ms: the model."""
    yield (
        *("W", "experts", "exchange, bf16", "exchange, FP8", "the rest", "step, FP8", "efficiency"),
        *("x bf16 at best", "dx hidden: step", "hierarchical: exchange", "efficiency"),
        *("on 4 nodes at most: exchange", "efficiency"),
    )
    for ranks in WORLDS:
        ours, theirs = step(layer, ranks, links), step(layer, ranks, links, fp8=False)
        tiered = [step(layer, ranks, links, tiered=True, limit=limit) for limit in (0, 4)]
        far = [(f"{s.exchange:.2f}", f"{100 * s.efficiency:.0f}%") for s in tiered]
        yield (
            str(ranks),
            str(layer.over(ranks).experts),
            f"{theirs.exchange:.2f}",
            f"{ours.exchange:.2f}",
            f"{ours.rest:.2f}",
            f"{ours.total:.2f}",
            f"{100 * ours.efficiency:.0f}%",
            f"{theirs.total / ours.total:.2f}",
            f"{step(layer, ranks, links, hide=True).total:.2f}",
            *(cell if ranks > links.node else "" for pair in far for cell in pair),
        )


def table_of_modes(layer: Layer, links: Links) -> Iterator[Line]:
    """What exact sizes and capacities cost, balanced, in ms: the model."""
    yield (
        *("W", "exact: exchange", "step", "capacity 1.1: exchange", "step"),
        *("1.25: exchange", "step"),
    )
    for ranks in (2, 4, 8, 16, 64):
        steps = [step(layer, ranks, links, spare=spare) for spare in (0.0, 1.1, 1.25)]
        yield (str(ranks), *(f"{ms:.2f}" for s in steps for ms in (s.exchange, s.total)))


# ---- training -----------------------------------------------------------------------------------


def table_of_training(record: Record) -> Iterator[Line]:
    """How far the run of several processes is from that of one, and FP8 from bf16."""
    one = record["one process"]
    (many,) = (runs for name, runs in record.items() if name.endswith(" processes"))
    yield ("", "FP8", "bf16", "FP8 against bf16, one process")
    pairs = ((many["fp8"], one["fp8"]), (many["bf16"], one["bf16"]), (one["fp8"], one["bf16"]))
    columns = [_apart(run, beside) for run, beside in pairs]
    for name in columns[0]:
        small = name in ("the first loss", "at most, in the first ten steps")
        of_pair = [column[name] for column in columns]
        texts = (f"{v:+.0e}" if small else f"{100 * v:+.2f}%" for v in of_pair)
        yield (name, *(text.replace("e-0", "e-") for text in texts))


def _apart(run: Record, beside: Record) -> dict[str, float]:
    a, b = run["loss"], beside["loss"]
    apart = [(x - y) / y for x, y in zip(a, b, strict=True)]
    last = len(a) // 10
    return {
        "the first loss": apart[0],
        "at most, in the first ten steps": max(map(abs, apart[:10])),
        "at most, in a step": max(map(abs, apart)),
        "mean over the last tenth of the steps": sum(a[-last:]) / sum(b[-last:]) - 1.0,
        "held out, at the end": run["heldout"][-1][1] / beside["heldout"][-1][1] - 1.0,
    }


# ---- the page -----------------------------------------------------------------------------------


def tables(folder: Path) -> dict[str, str]:
    """The generated parts of the page by name; folder: where the records are."""
    record, layers = (json.loads((folder / name).read_text()) for name in (EP, LAYERS))
    links = fit(record)
    found: dict[str, Iterable[Line]] = {
        "ranks": table_of_ranks(),
        "dispatch": table_of_dispatches(record),
        "layer": table_of_layers(record, layers),
        "ranks together": table_of_scaling(record),
        "constants": table_of_constants(links),
        "errors": table_of_errors(record, links),
    }
    for name, model, experts in MODELS:
        layer = measured(layers, record, name, model, experts)
        found[model] = table_of_steps(layer, links)
        if model == MODELS[0][1]:
            found |= {"bytes": table_of_bytes(layer), "modes": table_of_modes(layer, links)}
    for name, file in TRAINED.items():
        found[name] = table_of_training(json.loads((folder / file).read_text()))
    return {name: markdown(table) for name, table in found.items()}


def pages(root: Path) -> dict[Path, str]:
    """The pages as they should be."""
    parts = tables(root / "docs/benchmarks")
    summary = {"ranks together": parts.pop("ranks together")}
    readme, page = root / "README.md", root / "docs/scale-out.md"
    return {
        readme: fill(readme.read_text(), "ep_page", summary),
        page: fill(page.read_text(), "ep_page", parts),
    }


if __name__ == "__main__":
    for path, text in pages(Path(sys.argv[1])).items():
        path.write_text(text)
