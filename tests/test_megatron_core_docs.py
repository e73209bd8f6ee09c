"""docs/how-to/megatron-core.md runs as written, and examples/megatron_gpt_moe.py trains.

Skipped without megatron-core; .ci/run has a step for it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

from test_docs import MEGATRON, ROOT, run_python
from test_megatron_core_flags import EXPERTS, LAYER

pytestmark = pytest.mark.slow


def test_page_runs_as_written(tmp_path: Path) -> None:
    stand_ins = f"""import sys
sys.path.append({str(ROOT / "tests")!r})
import megatron_cpu
megatron_cpu.on_cpu()"""
    run_python(MEGATRON, tmp_path, *([] if torch.cuda.is_available() else [stand_ins]))


def test_page_names_every_option_that_is_refused() -> None:
    page = (ROOT / MEGATRON).read_text()
    refused = {name for changed in (*EXPERTS.values(), *LAYER.values()) for name in changed}
    others = {"fine_grained_activation_offloading", "cuda_graph_modules"}  # go with one that is
    others |= {"tensor_model_parallel_size"}  # "tensor parallelism" there
    assert {name for name in refused - others if f"`{name}" not in page} == set()


def test_example(tmp_path: Path) -> None:
    """Three runs of ten steps: losses fall, FP8's stay near; every kind loads the checkpoint."""
    example = ROOT / "examples/megatron_gpt_moe.py"
    arguments = ["--out", tmp_path, "--ranks", "2", "--steps", "10", "--cpu", "--batch", "4"]
    done = subprocess.run(
        [sys.executable, example, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads((tmp_path / "loss.json").read_text())
    assert (tmp_path / "loss.png").exists()
    for run in ("experts", "layer"):
        pairs = list(zip(losses[run], losses["megatron"], strict=True))
        assert len(pairs) == 10
        assert losses[run][-1] < losses[run][0] - 0.1
        assert all(abs(a - b) < 0.03 for a, b in pairs)
    loaded = [float(x) for x in re.findall(r": '([\d.]+)'", done.stdout.splitlines()[-1])]
    assert len(loaded) == 3
    assert max(loaded) - min(loaded) < 0.005
