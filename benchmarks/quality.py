"""Does FP8 train as well as bf16: trains arms side by side, one per GPU, and compares them.

    python benchmarks/quality_text.py --out TEXT
    python benchmarks/quality.py --arms bf16:0 fp8:0 --text TEXT --runs RUNS --tokens 40e6 \
        --seconds 500 --json quality.json
    python benchmarks/quality.py --runs RUNS --json quality.json    # of the runs that are there

An arm is NAME:SEED; quality_model.py has the names. Runs of a seed start from the same weights and
see the same batches. Each writes files of its own in RUNS as it goes (quality_train.py); the record
is made of all of them, of one model. A record that is there keeps its other runs, but not which
experts their tokens chose.

The bar was fixed before the first run. The mean gap of FP8 to bf16 in held-out loss at the end,
over paired seeds, is at most BAR.mean nats per token. Its 95% interval lies within BAR.interval of
0. The gap of the training loss does not grow over the last fifth of the steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common import Record, parser
from quality_model import ARMS, MODELS

# ---- the bar ------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """What FP8 is held to, nats per token."""

    mean: float
    interval: float


BAR = Bar(mean=0.004, interval=0.01)
LAST = 0.2  # share of the steps over which a gap must not grow
# Student's t, 97.5%, by degrees of freedom.
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def interval(values: Sequence[float]) -> Record:
    """The mean of values, one per seed, and its 95% interval; None of one seed."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return {"mean": mean, "low": None, "high": None, "seeds": n}
    half = T975[min(n - 1, len(T975)) - 1] * statistics.stdev(values) / math.sqrt(n)
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": n}


def verdict(gap: Record, growth: Record) -> Record:
    """Whether a gap and its growth keep the bar; None: one seed cannot say."""
    known = gap["low"] is not None
    found: Record = {
        "mean": gap["mean"] <= BAR.mean,
        "interval": max(-gap["low"], gap["high"]) <= BAR.interval if known else None,
        "no_growth": growth["low"] <= 0 if known else None,
    }
    found["kept"] = all(found.values()) if known or not found["mean"] else None
    return found


# ---- the record ---------------------------------------------------------------------------------


def runs_of(folder: Path) -> list[Record]:
    """The runs of a folder, with their experts as `choices`."""
    runs = []
    for path in sorted(folder.glob("*-*.json")):
        run = json.loads(path.read_text())
        chosen = path.with_suffix(".npy")
        runs.append(run | {"choices": np.load(chosen) if chosen.exists() else None})
    return runs


OF_ALL = ("model", "config", "parameters", "text")  # of a run, once in a record


def runs_of_record(path: Path) -> list[Record]:
    """The runs of a record, as runs_of gives them, without their choices; none where it is not."""
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    return [
        {name: record[name] for name in OF_ALL} | run | {"choices": None} for run in record["runs"]
    ]


def merged(runs: list[Record]) -> Record:
    """One record of the runs. Those that did not end are in it, and in no comparison."""
    done = [run for run in runs if run["complete"]]
    check_alike(done)
    base = {run["seed"]: run for run in done if run["arm"] == "bf16"}
    rows = []
    for arm in (name for name in ARMS if any(run["arm"] == name for run in done)):
        of = [run for run in done if run["arm"] == arm]
        rows.append(row(arm, of, [(run, base[run["seed"]]) for run in of if run["seed"] in base]))
    config = {name: runs[0][name] for name in OF_ALL}
    kept = [{k: v for k, v in run.items() if k not in (*config, "choices")} for run in runs]
    about = {"bar": BAR._asdict(), **config}
    return {"environment": runs[0]["environment"], **about, "results": rows, "runs": kept}


def check_alike(runs: list[Record]) -> None:
    """ValueError unless the runs can be compared."""
    for name in ("model", "config", "steps", "text"):
        found = {json.dumps(run[name]) for run in runs}
        if len(found) > 1:
            raise ValueError(f"[quality] runs must be of one {name}; got {sorted(found)}")
    for name in ("commit", "torch"):
        found = {str(run["environment"][name]) for run in runs}
        if len(found) > 1:
            raise ValueError(f"[quality] runs must be of one {name}; got {sorted(found)}")
    starts: dict[int, tuple[int, int]] = {}
    for run in runs:
        start = run["start"], run["first_batch"]
        if starts.setdefault(run["seed"], start) != start:
            who = f"{run['arm']}:{run['seed']}"
            raise ValueError(f"[quality] runs of a seed must start alike; got {who}")


def row(arm: str, of: list[Record], pairs: list[tuple[Record, Record]]) -> Record:
    """An arm: its means over seeds, and beside bf16 of the same seeds. Times are of the seeds that
    ran on the first one's kind of GPU."""
    gpu = of[0]["environment"]["gpu"]
    timed = [run for run in of if run["environment"]["gpu"] == gpu]
    last = [run["heldout"][-1][1] for run in of]
    found: Record = {
        "op": "quality",
        "variant": arm,
        "about": ARMS[arm].about,
        "gpu": gpu,
        "seeds": len(of),
        "tokens": of[0]["tokens"],
        "heldout": statistics.fmean(last),
        "between_seeds": statistics.stdev(last) if len(last) > 1 else None,
        "tokens_per_s": statistics.fmean(run["tokens_per_s"] for run in timed),
        "seconds": statistics.fmean(run["heldout"][-1][2] for run in timed),
        "peak_gib": max(run.get("peak_gib", 0.0) for run in of),
        "entropy": statistics.fmean(run["entropy"][-1][1] for run in of),
    }
    if arm == "bf16" or not pairs:
        return found
    found["gap"] = interval([a["heldout"][-1][1] - b["heldout"][-1][1] for a, b in pairs])
    found["growth"] = interval([growth(a, b) for a, b in pairs])
    if arm == "fp8":
        found["bar"] = verdict(found["gap"], found["growth"])
    for name, allowed in (("seconds_to_bf16", 0.0), ("seconds_to_bf16_and_bar", BAR.mean)):
        times = [
            seconds_to(a, b["heldout"][-1][1] + allowed)
            for a, b in pairs
            if a["environment"]["gpu"] == gpu
        ]
        reached = [t for t in times if t is not None]
        found[name] = statistics.fmean(reached) if len(reached) == len(times) else None
    both = [(a["choices"], b["choices"]) for a, b in pairs]
    shares = [other_experts(a, b) for a, b in both if a is not None and b is not None]
    if shares:
        found["other_experts"] = {k: statistics.fmean(s[k] for s in shares) for k in shares[0]}
    return found


def growth(a: Record, b: Record) -> float:
    """Nats by which the gap of the training loss rises over the last fifth: its least-squares
    slope times that many steps."""
    steps: int = max(2, round(LAST * a["steps"]))
    gap = np.subtract(a["loss"][-steps:], b["loss"][-steps:])
    return steps * float(np.polyfit(np.arange(steps), gap, 1)[0])


def seconds_to(run: Record, loss: float) -> float | None:
    """Seconds of training until the held-out loss is at most `loss`, straight between
    evaluations; None: it never is."""
    last, then = math.inf, 0.0
    for _, value, seconds in run["heldout"]:
        if value <= loss:
            share = 1.0 if last == math.inf else (last - loss) / (last - value)
            return float(then + share * (seconds - then))
        last, then = value, seconds
    return None


def other_experts(a: Any, b: Any) -> Record:
    """Of a batch's tokens, means over the layers: the share whose experts are not all the same, and
    the share of assignments to an expert that the other model does not choose."""
    same = (a[..., :, None] == b[..., None, :]).any(axis=-1)
    return {"tokens": float(1 - same.all(axis=-1).mean()), "assignments": float(1 - same.mean())}


def gaps(record: Record, arm: str) -> tuple[list[int], list[Record]]:
    """Steps, and the gap of the training loss to bf16 around each with its interval."""
    runs = [run for run in record["runs"] if run["complete"]]
    base = {run["seed"]: run for run in runs if run["arm"] == "bf16"}
    pairs = [(r, base[r["seed"]]) for r in runs if r["arm"] == arm and r["seed"] in base]
    if not pairs:
        return [], []
    each = [np.subtract(a["loss"], b["loss"]) for a, b in pairs]
    edges = np.linspace(0, len(each[0]), min(60, len(each[0])) + 1).astype(int)
    spans = [*itertools.pairwise(edges)]
    return [int(high) for _, high in spans], [
        interval([float(gap[low:high].mean()) for gap in each]) for low, high in spans
    ]


# ---- running ------------------------------------------------------------------------------------


def launch(given: argparse.Namespace) -> None:
    """Trains each arm in a process of its own, as many at once as there are GPUs."""
    begun, gpus = time.monotonic(), 1 if given.device == "cpu" else torch.cuda.device_count()
    free: queue.Queue[int] = queue.Queue()
    for gpu in range(gpus):
        free.put(gpu)

    def one(named: str) -> int:
        arm, _, seed = named.partition(":")
        gpu = free.get()
        limit = given.seconds - (time.monotonic() - begun)
        command = [sys.executable, str(Path(__file__).with_name("quality_train.py"))]
        options = {
            "arm": arm,
            "seed": seed or "0",
            "model": given.model,
            "text": given.text,
            "tokens": given.tokens,
            "limit": limit,
            "out": given.runs,
            "device": given.device,
        }
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": shown[gpu] if gpu < len(shown) else ""}
        try:
            wait = None if limit == math.inf else max(limit, 0) + 60
            return subprocess.run(command, env=env, timeout=wait).returncode
        except subprocess.TimeoutExpired:
            return 124
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(gpus) as pool:
        for arm, code in zip(given.arms, pool.map(one, given.arms), strict=True):
            print(f"{arm}: {'ended' if code == 0 else f'failed, {code}'}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--arms", nargs="*", default=[], help="NAME:SEED, of quality_model.ARMS")
    made.add_argument("--model", choices=MODELS, default="fine")
    made.add_argument("--text", type=Path, help="of quality_text.py; needed with --arms")
    made.add_argument("--runs", type=Path, required=True, help="a folder for the arms' files")
    made.add_argument("--tokens", type=float, default=100e6, help="that each arm trains on")
    made.add_argument("--seconds", type=float, default=math.inf, help="for all arms together")
    given = made.parse_args(arguments)
    unknown = {arm.partition(":")[0] for arm in given.arms} - ARMS.keys()
    if unknown or (given.arms and given.text is None):
        made.error(f"--arms must be of {', '.join(ARMS)}, and need --text; got {given.arms}")
    if given.quick:
        given.model, given.tokens = "tiny", 2000
    if given.arms:
        launch(given)
    runs = runs_of(given.runs)
    if not runs:
        raise SystemExit(f"no run in {given.runs}")
    again = {(run["arm"], run["seed"]) for run in runs}
    runs += [r for r in runs_of_record(given.json) if (r["arm"], r["seed"]) not in again]
    record = merged(sorted(runs, key=lambda run: ([*ARMS].index(run["arm"]), run["seed"])))
    given.json.write_text(json.dumps(record) + "\n")
    for line in record["results"]:
        gap = line.get("gap")
        beside = "" if gap is None else f", gap {gap['mean']:+.4f} ({gap['low']}, {gap['high']})"
        print(f"{line['variant']}: {line['heldout']:.4f}{beside}, {line['tokens_per_s']:,.0f}/s")
    print(f"wrote {given.json}")


if __name__ == "__main__":
    main()
