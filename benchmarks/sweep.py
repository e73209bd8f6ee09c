"""FP8 beside torch bf16 over tokens per expert, expert width and number of experts.

Each point is a step, eager and, on CUDA, as a graph, with weights that were quantized before;
`weights_ms` is what quantizing them takes, as a graph, too. Contenders take turns; the better of
two rounds counts. A second run with the same --json goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator

import torch

from common import OnResult, Record, earlier, environment, ignore, main, parser
from contender import Contender, Inputs, Shape, block
from fp8moe_cutlass.nn import MoEExperts
from layer import OURS, graph
from layer_baselines import TORCH
from timing import Limits, Run, Runs, back_to_back
from torch_experts import TorchExperts

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
    """The grid's shapes, every other one of each axis first: so a sweep cut short spans it."""
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


def tokens_per_expert(shape: Shape) -> float:
    return rows(shape) / shape["E"]


def run_sweep(
    device: torch.device,
    budget: float,
    done: list[Record],
    on_result: OnResult = ignore,
    quick: bool = False,
) -> Record:
    """The record of the points that begin within `budget` seconds, and of those `done` before."""
    torch.manual_seed(0)
    results = list(done)
    known = [row["shape"] for row in results]
    limits = Limits(device)
    place = environment(limits)
    deadline = time.monotonic() + budget
    wanted = points("cpu" if quick else device.type)
    for shape in wanted:
        if time.monotonic() >= deadline:
            break
        if shape in known:
            continue
        results.append(point(shape, device))
        on_result(results[-1])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"environment": place, "results": results, "points": len(wanted)}


def point(shape: Shape, device: torch.device) -> Record:
    """One row; a contender that fails is its "error"."""
    row: Record = {"op": "sweep", "shape": shape, "ms": None, "peers": {}, "graph_peers": {}}
    try:
        layer = MoEExperts(shape["E"], shape["H"], shape["I"], device=device)
        inputs = Inputs.random(shape, device)
        pair = {
            OURS: Contender(layer, inputs),
            TORCH: Contender(TorchExperts(layer), inputs),
        }
        ms = timed({name: c.step for name, c in pair.items()}, device)
        row |= {"ms": ms.pop(OURS), "peers": ms}
        quantize: Run = layer.quantize_weights
        if device.type == "cuda":
            ms = dict(graph_ms(pair, device))
            row |= {"graph_ms": ms.pop(OURS), "graph_peers": ms}
            quantize = graph(pair[OURS], quantize)
        row["weights_ms"] = timed({"": quantize}, device)[""]
    except RuntimeError as error:  # out of memory, a failed kernel: the other points still run
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def graph_ms(pair: dict[str, Contender], device: torch.device) -> Iterator[tuple[str, float]]:
    """Each contender's replay, one graph alive at a time."""
    for name, contender in pair.items():
        yield name, timed({name: graph(contender, contender.step)}, device)[name]
        contender.clear()


def timed(runs: Runs, device: torch.device) -> dict[str, float]:
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


def elapsed_ms(run: Run, count: int, device: torch.device) -> float:
    return sum(back_to_back(run, count, device.type == "cuda")[0]) / count


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    """Go on with the sweep in --json, if there is one."""
    return run_sweep(device, given.budget, earlier(given.json), on_result, given.quick)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--budget", type=float, default=90.0, help="seconds")
    main(arguments, run)
