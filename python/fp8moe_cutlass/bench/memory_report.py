"""The memory of the expert block, as rows, tables, and the generated part of docs/layer.md:

python -m fp8moe_cutlass.bench.memory_report PAGE.md FILE.json

writes the tables of a record of bench --memory or bench --layer between the page's markers.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fp8moe_cutlass.nn import MoEExperts

from . import memory
from .layer import HEADLINE, QUICK, REMADE, SHAPES, VARIANTS_OF_MEMORY, WITH_WEIGHTS
from .layer_peers import peers
from .layer_runs import Contender, Inputs, Shape
from .report import fill
from .timing import Limits, event

Record = dict[str, Any]
COLUMNS = ("model", "what is saved", "who", "KiB a token, arithmetic", "allocator", "peak, GiB")


def run_memory(
    device: torch.device,
    quick: bool = False,
    on_result: Callable[[Record], None] = lambda row: None,
) -> Record:
    """Rows of every model of bench --layer: by arithmetic anywhere, on CUDA by the allocator too,
    with what one quantization of the weights takes."""
    from . import environment

    results: list[Record] = []
    for name, shape in (QUICK if quick else SHAPES["cuda"]).items():
        for row in rows(name, shape, device):
            results.append(row)
            on_result(row)
        gc.collect()
    return {"environment": environment(Limits(device)), "results": results}


def rows(name: str, shape: Shape, device: torch.device) -> Iterator[Record]:
    t, s, e, h, i = (shape[n] for n in "TSEHI")
    cuda = device.type == "cuda"
    inputs = Inputs.random(shape, device) if cuda else None
    for variant, recompute, z, keep in (
        (HEADLINE, "none", "bf16", "bf16"),
        *VARIANTS_OF_MEMORY,
    ):
        options: Any = {"recompute": recompute, "save_preactivation": z}
        layer = MoEExperts(e, h, i, device=device if cuda else "meta", **options)
        found = {"fp8moe": {"saved_arithmetic": memory.saved_bytes(t, s, e, h, i, keep)}}
        row: Record = {"op": "memory", "model": name, "shape": shape, "variant": variant}
        if inputs is not None:
            found["fp8moe"] |= allocated(Contender(layer, inputs))
        if variant == HEADLINE:
            found["torch bf16"] = {"saved_arithmetic": memory.bf16_saved_bytes(t, s, h, i)}
            row["weight_bytes"] = memory.weight_bytes(e, h, i)
            if inputs is not None:
                row["weights_ms"] = once_ms(layer.quantize_weights)
                for peer, factory in peers(device).items():
                    try:
                        contender = Contender(factory(layer, s), inputs)
                        found.setdefault(peer, {}).update(allocated(contender))
                    except Exception as error:  # a peer that fails must not end the table
                        row.setdefault("errors", {})[peer] = f"{type(error).__name__}: {error}"[
                            :300
                        ]
        yield row | {"memory": found}


def allocated(contender: Contender) -> dict[str, int]:
    for _ in range(2):
        contender.step()
    return memory.measure(contender.forward, contender.backward, contender.clear)


def once_ms(run: Callable[[], object]) -> float:
    for _ in range(2):
        run()
    before, after = event(), event()
    before.record()
    for _ in range(5):
        run()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / 5


# ---- tables -------------------------------------------------------------------------------------


def lines(row: Record) -> Iterator[tuple[str, ...]]:
    """A line of the table for everyone in the row, in the order of COLUMNS."""
    tokens = row["shape"]["T"] * 1024
    what = "default" if row["variant"] == HEADLINE else row["variant"].removeprefix(f"{HEADLINE}, ")
    for who, m in row["memory"].items():
        yield (
            row["model"],
            what if who == "fp8moe" else "",
            who,
            f"{m['saved_arithmetic'] / tokens:.1f}" if "saved_arithmetic" in m else "",
            f"{m['saved'] / tokens:.1f}" if "saved" in m else "",
            f"{m['peak'] / 2**30:.2f}" if "peak" in m else "",
        )


def weights_table(record: Record) -> list[tuple[str, ...]]:
    """GiB of the weights of each model, what quantizing them once takes, and from how many tokens
    in flight on FP8 holds less than bf16 although it holds both copies."""
    table: list[tuple[str, ...]] = [
        (
            *("model", "bf16 weights, GiB", "FP8 copies, both, GiB", "transposes remade, GiB"),
            *("less than bf16 from, tokens", "transposes remade"),
            *("quantizing once, ms", "of a step", "remaking transposes, ms"),
        )
    ]
    results = record["results"]
    for row in (r for r in results if r["variant"] == HEADLINE and "weight_bytes" in r):
        size = row["weight_bytes"]
        timed = row.get("ms") is not None
        of_model = [r for r in results if timed and r["model"] == row["model"] and r["ms"]]
        ms, remade = (
            next((r["ms"] - row["ms"] for r in of_model if r["variant"] == variant), None)
            for variant in (WITH_WEIGHTS, REMADE)
        )
        ms = row.get("weights_ms") if ms is None else ms
        both = size["fp8 copies"] + size["fp8 transposes"]
        table.append(
            (
                row["model"],
                f"{size['bf16 parameters'] / 2**30:.2f}",
                f"{both / 2**30:.2f}",
                f"{size['fp8 copies'] / 2**30:.2f}",
                f"{memory.break_even(row['shape']):,.0f}",
                f"{memory.break_even(row['shape'], copies=1):,.0f}",
                "" if ms is None else f"{ms:.2f}",
                f"{100 * ms / row['ms']:.0f}%" if ms and timed else "",
                "" if remade is None else f"{remade:.2f}",
            )
        )
    return table


def tables(record: Record) -> str:
    from .layer_report import markdown

    held = [line for row in record["results"] if "memory" in row for line in lines(row)]
    return f"{markdown([COLUMNS, *held])}\n\n{markdown(weights_table(record))}\n"


if __name__ == "__main__":
    page, source = Path(sys.argv[1]), Path(sys.argv[2])
    part = f"From {source.name}.\n\n{tables(json.loads(source.read_text()))}".rstrip()
    page.write_text(fill(page.read_text(), "memory_report", {"memory": part}))
