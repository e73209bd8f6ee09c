"""train on CUDA: every recipe learns, stops and goes on bit for bit, and no step waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_layer_gpu import no_sync

from fp8moe_cutlass import train
from fp8moe_cutlass.train import Trainer, configure, load


@pytest.fixture
def corpus(tmp_path: Path) -> Any:
    text = tmp_path / "text.py"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i % 10}\n\n" for i in range(800)))
    return load(text, 32)


@pytest.fixture(autouse=True)
def settled(device: torch.device) -> Any:
    fill = torch.utils.deterministic.fill_uninitialized_memory
    train.settle(device)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.parametrize("variant", train.VARIANTS)
def test_learns_and_resumes(
    variant: str, corpus: Any, device: torch.device, tmp_path: Path
) -> None:
    config = configure("tiny", 20, 0)
    whole = Trainer(config, corpus, variant, device, tmp_path / "whole")
    whole.run()
    assert len(whole.curve.loss) == 20
    assert whole.curve.heldout[-1][1] < 0.8 * whole.curve.loss[0]
    assert bool(whole.curve.telemetry) == (variant != "bf16")

    pieces = Trainer(config, corpus, variant, device, tmp_path / "pieces")
    with pytest.raises(train.Paused):
        pieces.run(stop=lambda trainer: trainer.step == 7)
    again = Trainer(config, corpus, variant, device, tmp_path / "pieces")
    assert again.resume()
    again.run()
    assert again.curve.loss == whole.curve.loss
    assert again.curve.heldout == whole.curve.heldout
    assert again.curve.telemetry == whole.curve.telemetry


@pytest.mark.parametrize("variant", train.VARIANTS)
def test_no_step_waits(variant: str, corpus: Any, device: torch.device, tmp_path: Path) -> None:
    trainer = Trainer(configure("tiny", 20, 0), corpus, variant, device, tmp_path)
    for _ in range(3):
        trainer.train_step()
    with no_sync():
        for _ in range(3):
            trainer.train_step()
    torch.cuda.synchronize()
    assert trainer.latest_loss > 0
