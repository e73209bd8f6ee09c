"""Losses of torchtitan's debug DeepSeek-V3 on CPUs, with its own experts and with ours.

    python benchmarks/torchtitan_losses.py --json FILE

By torchtitan's Trainer, 20 steps of 2 x 128 tokens per rank: one rank, FSDP over two, and expert
parallelism over two, by tests/titan_cpu.py, each with our experts and with our layer. Needs
torchtitan; fifteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

sys.path.append(str(Path(__file__).parent.parent / "tests"))

OVERRIDE = "--override.imports=fp8moe_cutlass.integrations.torchtitan."
OURS = ("fp8moe_experts", "fp8moe_layer")
EP = "--parallelism.expert_parallel_degree=2"
RUNS: dict[str, tuple[int, list[str], list[str]]] = {  # ranks, options of both, of ours
    "one rank": (1, [], []),
    "FSDP over two ranks": (2, [], []),
    "expert parallelism over two": (2, [EP], []),
    "the same, FP8 compiled": (2, [EP], ["--compile.enable"]),
}
ALWAYS = [
    *("--module=deepseek_v3", "--config=deepseek_v3_debugmodel", "--debug.seed=1"),
    *("--training.steps=20", "--training.local_batch_size=2", "--training.seq_len=128"),
    *("--training.disable_cuda_graphs", "--parallelism.spmd_backend=partial_dtensor"),
]


def losses(folder: Path, text: list[str], ranks: int, *options: str) -> list[float]:
    import titan_cpu

    out, start = folder / "losses.json", [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*start, titan_cpu.__file__, str(out), *ALWAYS, f"--dump_folder={folder}", *text]
    subprocess.run([*command, *options], check=True)
    found: list[float] = json.loads(out.read_text())
    return found


def row(name: str, who: str, own: list[float], ours: list[float]) -> dict[str, Any]:
    apart = max(abs(a - b) for a, b in zip(own, ours, strict=True))
    found = {"own": own, "ours": ours, "apart": apart}
    return {"op": "losses", "shape": {"steps": 20}, "variant": name, "who": who, **found}


def record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch
    import torchtitan

    versions = {"torch": torch.__version__, "torchtitan": torchtitan.__version__}
    return {"environment": {**versions, "commit": common.commit()}, "results": rows}


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--json", type=Path, required=True)
    path = given.parse_args().json
    import titan_cpu

    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        text = titan_cpu.assets(folder / "assets")
        theirs: dict[Any, list[float]] = {}
        for name, (ranks, both, more) in RUNS.items():
            way = ranks, *both
            if way not in theirs:
                theirs[way] = losses(folder, text, ranks, *both)
            for who in OURS:
                ours = losses(folder, text, ranks, *both, *more, OVERRIDE + who)
                rows.append(row(name, who, theirs[way], ours))
                common.show(rows[-1])
    common.write(record(rows), path)


if __name__ == "__main__":
    main()
