"""Makes the records of docs/benchmarks anew, of one commit, as many at once as there are GPUs for.

    python benchmarks/records.py OUT [NAME ...] [--seconds N]

NAME is a record's; without one, every record that this machine has the GPUs for. OUT gets NAME.json
and NAME.log. --seconds: nothing begins that would end later. A record that takes a minute more than
three times its estimate is given up. Exit status 1: one failed or was left out. The records of
quality.py, gemm_candidates.py, lora_losses.py and torchtitan_losses.py are made by these alone.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch


class Job(NamedTuple):
    """How a record is made: so many GPUs, about so many seconds on H200s, commands, and the library
    without which it would not be that record. Commands of benchmarks/ get --json, the same file."""

    gpus: int
    seconds: int
    commands: tuple[str, ...]
    needs: str | None = None


def job(gpus: int, seconds: int, *commands: str, needs: str | None = None) -> Job:
    return Job(gpus, seconds, tuple(f"python benchmarks/{of}" for of in commands), needs)


def ranks(gpus: int, seconds: int, *commands: str, needs: str | None = None) -> Job:
    """Of scripts that torchrun starts."""
    start = f"torchrun --standalone --nproc-per-node {gpus} benchmarks/"
    return Job(gpus, seconds, tuple(start + of for of in commands), needs)


BESIDE_TE = ("DeepSeek-V3, 32", "Qwen3-235B, 16", "DeepSeek-V2-Lite, 64", "Qwen3-30B, 128")
# The operators of memory-bound. The others are in gemm, lora and router.
MOVED = (
    *("quantize", "quantize_weight", "dequantize", "count_codes", "quantize_pack"),
    *("permute_pad", "permute_pad_backward", "unpermute_unpad", "unpermute_unpad_backward"),
    *("transpose_fp8", "permute_transpose_fp8", "act_quantize", "act_quantize_backward"),
)
# In the order in which they are made: what README quotes comes first.
JOBS = {
    "layer": job(1, 90, "layer.py --steps"),
    "ep-2": job(2, 80, "ep.py --ranks 2 --worlds 2 --routings random"),
    "ep-4": job(4, 120, "ep.py --ranks 4 --worlds 4 --routings random"),
    "transformers-recipe": job(
        1,
        330,
        "transformers_recipe.py --advised --case qwen3-30b --case qwen3-30b-vocabulary"
        " --case deepseek-v3-sizes --case qwen3-30b-lora",
    ),
    "several-gpus": ranks(2, 255, "several_gpus.py"),
    "lora-model": job(1, 130, "lora_model.py"),
    "sweep": job(1, 95, "sweep.py"),
    "memory-bound": job(1, 40, "ops.py" + "".join(f" --op {op}" for op in MOVED)),
    "gemm": job(1, 195, "gemm.py --burst --seed 1", needs="deep_gemm"),
    "bf16": job(1, 120, "bf16_layer.py"),
    "layer-te": job(
        1,
        130,
        "layer.py --steps" + "".join(f" --model '{model} experts'" for model in BESIDE_TE),
        needs="transformer_engine",
    ),
    "router": job(1, 40, "router.py"),
    "activations": job(1, 10, "activations.py"),
    "activation-blocks": job(1, 110, "activation_blocks.py"),
    "lora": job(1, 20, "frozen.py"),
    "rollout": job(1, 20, "rollout.py"),
    "quality-step": job(1, 90, "quality_step.py"),
    "gemm-accuracy": job(1, 60, "gemm_accuracy.py", needs="deep_gemm"),
    "torchtitan": job(
        1,
        115,
        "torchtitan_step.py --compiled",
        "torchtitan_step.py",
        "torchtitan_step.py --graphs --who layer",
        "torchtitan_step.py --words 151936 --who layer",
        needs="torchtitan",
    ),
    "torchtitan-2": ranks(
        2, 75, "torchtitan_step.py --ep", "torchtitan_step.py", needs="torchtitan"
    ),
    "jax": Job(
        1,
        140,
        (
            'cmake -S examples/jax_moe -B "$OUT/jax" -DPython_EXECUTABLE="$PYTHON"'
            ' -Dfp8moe_ROOT="$(python -m fp8moe_cutlass --cmake-dir)"',
            'cmake --build "$OUT/jax"',
            'XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/jax_layer.py --build "$OUT/jax"',
        ),
        "jax",
    ),
    "megatron": job(2, 540, "megatron_step.py", needs="megatron"),
    "ep-soak-4": job(4, 120, "ep_soak.py --ranks 4 --transport peer"),
}
ROOT = Path(__file__).parent.parent


def script(name: str, more: str) -> str:
    """The commands of a record, for bash. more: arguments of every script of benchmarks/."""
    log = f'exec > "$OUT/{name}.log" 2>&1 < /dev/null'
    lines = [log, 'python() { "$PYTHON" "$@"; }', "set -ex"]
    for command in JOBS[name].commands:
        of = f' --json "$OUT/{name}.json"{more}' if "benchmarks/" in command else ""
        lines.append(command + of)
    return "\n".join(lines)


def make(names: list[str], out: Path, gpus: list[str], seconds: float, more: str) -> bool:
    """Whether all were made."""
    free: queue.Queue[str] = queue.Queue()
    for gpu in gpus:
        free.put(gpu)
    begun = time.monotonic()
    threads = str(max(1, (os.cpu_count() or 1) // len(gpus)))

    def run(name: str, own: list[str], since: float) -> bool:
        env = {"OMP_NUM_THREADS": threads, **os.environ, "OUT": str(out), "PYTHON": sys.executable}
        env["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        limit = ["timeout", "-k", "5", str(60 + 3 * JOBS[name].seconds)]
        command = [*limit, "bash", "-c", script(name, more)]
        code = subprocess.run(command, cwd=ROOT, env=env).returncode
        for gpu in own:
            free.put(gpu)
        took = time.monotonic() - begun - since
        print(f"{name}: {'made' if code == 0 else f'failed ({code})'} in {took:.0f} s", flush=True)
        return code == 0

    made = []
    with ThreadPoolExecutor(len(gpus)) as pool:
        for name in names:
            job = JOBS[name]
            able = job.gpus <= len(gpus) and not (job.needs and find_spec(job.needs) is None)
            own = [free.get() for _ in range(able * job.gpus)]  # waits until they are free
            since = time.monotonic() - begun
            if able and since + job.seconds <= seconds:
                made.append(pool.submit(run, name, own, since))
                continue
            for gpu in own:
                free.put(gpu)
            print(f"{name}: left out; takes {job.seconds} s, {job.gpus} GPUs, {job.needs}")
    return len(made) == len(names) and all(of.result() for of in made)


def main(arguments: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("out", type=Path)
    made.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(JOBS)}")
    made.add_argument("--seconds", type=float, default=float("inf"), help="for all together")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--quick", action="store_true", help="tiny shapes: does everything run?")
    given = made.parse_args(arguments)
    unknown = [name for name in given.names if name not in JOBS]
    if unknown:
        made.error(f"no record {', '.join(unknown)}; there are {', '.join(JOBS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    count = 4 if given.device == "cpu" else torch.cuda.device_count()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    gpus = [""] * count if given.device == "cpu" else shown[:count]
    more = f" --device {given.device}" + " --quick" * given.quick
    if not gpus:
        made.error("no GPU is here; --device cpu is for a try")
    names = given.names or [name for name, job in JOBS.items() if job.gpus <= count]
    return int(not make(names, given.out.resolve(), gpus, given.seconds, more))


if __name__ == "__main__":
    sys.exit(main())
