"""One sweep: tokens an expert x expert width x number of experts, FP8 block beside torch bf16.

Each point is forward and backward, eager and, on CUDA, as a graph; weights already quantized, what
quantizing them takes besides. Contenders in turn, the better of two rounds of runs back to back.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp8moe_cutlass.nn import MoEExperts

from .layer import block
from .layer_peers import TorchExperts
from .layer_runs import Contender, Inputs, Shape
from .sweep_model import bf16_seconds, fp8_seconds, weights_seconds
from .timing import Limits, event

Record = dict[str, Any]
TORCH = "torch bf16"

GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {
        "tokens": (8, 32, 128, 512, 2048, 8192),
        "I": (512, 1024, 2048),
        "E": (8, 32, 128),
        "H": (4096,),
    },
    "cpu": {"tokens": (16, 128), "I": (128,), "E": (2, 4), "H": (256,)},
}
SLOTS = 8
MOST_FLOPS = 45e12  # of a point: beyond, the arithmetic alone decides
MOST_ELEMENTS = 2**31  # of a tensor of rows: beyond, torch compiles its kernels again
ROUND_SECONDS = 0.05


def points(device: str) -> list[Shape]:
    """The grid's shapes, every other one of each axis first: a sweep cut short still spans it."""
    grid = GRIDS[device]
    places = [
        (len([at for at in (a, b, c) if at % 2]), n, width, experts, hidden)
        for a, n in enumerate(grid["tokens"])
        for b, width in enumerate(grid["I"])
        for c, experts in enumerate(grid["E"])
        for hidden in grid["H"]
    ]
    shapes = []
    for _, n, width, experts, hidden in sorted(places, key=lambda place: place[0]):
        slots = min(SLOTS, experts)
        shapes.append(block(n * experts // slots, experts, slots, hidden, width))
    return [s for s in shapes if flops(s) <= MOST_FLOPS and rows(s) * s["H"] < MOST_ELEMENTS]


def rows(shape: Shape) -> int:
    return shape["T"] * shape["S"]


def flops(shape: Shape) -> float:
    """Of forward and backward."""
    return 18.0 * rows(shape) * shape["H"] * shape["I"]


def tokens_an_expert(shape: Shape) -> float:
    return rows(shape) / shape["E"]


def run_sweep(
    device: torch.device,
    budget: float,
    done: list[Record] | None = None,
    on_result: Callable[[Record], None] = lambda row: None,
) -> Record:
    """The record of all points measured within `budget` seconds, those of `done` (rows of an
    earlier sweep of the same device) among them and not measured again."""
    from . import environment

    torch.manual_seed(0)
    results = list(done or [])
    known = [row["shape"] for row in results]
    wanted = [shape for shape in points(device.type) if shape not in known]
    limits = Limits(device)
    place = environment(limits)
    deadline = time.monotonic() + budget
    for shape in wanted:
        if time.monotonic() >= deadline:
            break
        results.append(point(shape, device))
        on_result(results[-1])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"environment": place, "results": results, "points": len(points(device.type))}


def predicted() -> Record:
    """What the model says of the grid of an H200, as a sweep's record. No measurement."""
    results = [
        {
            "op": "sweep",
            "shape": shape,
            "ms": 1e3 * fp8_seconds(shape),
            "peers": {TORCH: 1e3 * bf16_seconds(shape)},
            "graph_ms": 1e3 * fp8_seconds(shape, graph=True),
            "graph_peers": {TORCH: 1e3 * bf16_seconds(shape, graph=True)},
            "weights_ms": 1e3 * weights_seconds(shape),
        }
        for shape in points("cuda")
    ]
    return {"environment": None, "results": results, "points": len(results)}


def point(shape: Shape, device: torch.device) -> Record:
    """One row; a contender that fails is its "error"."""
    row: Record = {"op": "sweep", "shape": shape, "ms": None, "peers": {}, "graph_peers": {}}
    try:
        layer = MoEExperts(shape["E"], shape["H"], shape["I"], device=device)
        inputs = Inputs.random(shape, device)
        pair = {
            "fp8moe": Contender(layer, inputs),
            TORCH: Contender(TorchExperts(layer, shape["S"]), inputs),
        }
        ms = timed({name: c.step for name, c in pair.items()}, device)
        row |= {"ms": ms.pop("fp8moe"), "peers": ms}
        row["weights_ms"] = timed({"": layer.quantize_weights}, device)[""]
        if device.type == "cuda":
            ms = dict(graph_ms(pair, device))
            row |= {"graph_ms": ms.pop("fp8moe"), "graph_peers": ms}
    except RuntimeError as error:  # out of memory, a failed kernel: the other points still run
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def graph_ms(pair: dict[str, Contender], device: torch.device) -> Iterator[tuple[str, float]]:
    """Each contender's replay, one graph alive at a time."""
    for name, contender in pair.items():
        yield name, timed({name: contender.graph(contender.step)}, device)[name]
        contender.clear()


def timed(runs: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Milliseconds of one run of each: the better of two rounds back to back, about ROUND_SECONDS
    a round."""
    for run in runs.values():
        for _ in range(3):
            run()
    best: dict[str, float] = {}
    for _ in range(2):
        for name, run in runs.items():
            once = best[name] if name in best else elapsed_ms(run, 1, device)
            count = int(min(max(1e3 * ROUND_SECONDS / max(once, 1e-3), 2), 50))
            ms = elapsed_ms(run, count, device)
            best[name] = min(ms, best.get(name, ms))
    return best


def elapsed_ms(run: Callable[[], object], count: int, device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            run()
        return 1e3 * (time.perf_counter() - start) / count
    before, after = event(), event()
    torch.cuda.synchronize()
    before.record()
    for _ in range(count):
        run()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / count
