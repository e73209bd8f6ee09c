"""Trainer with accelerate's FSDP2 over experts that two GPUs share, against one GPU."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate")

import transformers
from accelerate.state import AcceleratorState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import ranks
from fp8moe_cutlass.integrations import transformers as fp8moe
from ranks import Pool, results
from test_transformers_group import BATCH, as_torchrun, whole_weights
from transformers_models import E, error, experts_of, model_of, tokens

ARGUMENTS: dict[str, Any] = {
    "max_steps": 4,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.1,
    "report_to": "none",
    "save_steps": 2,
    "disable_tqdm": True,
    "logging_steps": 1,
    "seed": 3,
}
KINDS: dict[str, dict[str, Any]] = {
    "fsdp": {
        "fsdp": True,
        "fsdp_config": {"transformer_layer_cls_to_wrap": "Qwen3MoeDecoderLayer"},
    },
    "sharded states": {
        "fsdp": True,
        "fsdp_config": {
            "transformer_layer_cls_to_wrap": "Qwen3MoeDecoderLayer",
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    },
    "ddp": {},
}


pool = ranks.pool(2, backend="nccl")


def train(folder: str, arguments: dict[str, Any], resume: str | None = None) -> Any:
    """Losses, norms and whole weights."""
    AcceleratorState._reset_state(True)  # which a test before has made, with its variables
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    fp8moe.swap(model, group=dist.group.WORLD if ranks > 1 else None)
    given = transformers.TrainingArguments(
        folder, per_device_train_batch_size=BATCH // ranks, **ARGUMENTS | arguments
    )
    if given.n_gpu > 1:  # or Trainer takes all that it sees
        given._n_gpu = 1
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(32)]
    of = fp8moe.GroupTrainer if ranks > 1 else transformers.Trainer
    trainer = of(model, given, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    if "fsdp" in arguments:
        assert isinstance(trainer.model, FSDPModule)
        assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
    for m in experts_of(trainer.model).values() if ranks > 1 else ():
        assert m.down_proj.to_local().shape[0] == E // ranks
        m.check()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    found = [[float(row[key]) for row in rows] for key in ("loss", "grad_norm")]
    weights = {k: w.cpu() for k, w in whole_weights(trainer.model).items()}
    return found[0], found[1], weights


def run(pool: Pool, *args: Any) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return results(pool.run(2, as_torchrun, port, train, *args))


@pytest.mark.parametrize("mixed", [{}, {"bf16": True}], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_trainer(pool: Pool, kind: str, mixed: dict[str, Any], tmp_path: Path) -> None:
    """As one GPU; whole weights in the files; resumed, the same losses."""
    arguments = KINDS[kind] | mixed
    losses, norms, want = train(str(tmp_path / "one"), mixed)
    folder = str(tmp_path / "two")
    through = run(pool, folder, arguments)[0]
    torch.testing.assert_close(through[0], losses, rtol=5e-3, atol=0)
    torch.testing.assert_close(through[1], norms, rtol=0.1, atol=0)
    start = whole_weights(model_of("Qwen3Moe", num_hidden_layers=1))
    for name, w in want.items():
        assert error(through[2][name] - start[name], w - start[name]) < 0.3, name  # AdamW
    again = run(pool, str(tmp_path / "again"), arguments, f"{folder}/checkpoint-2")[0]
    torch.testing.assert_close(again[0][-2:], through[0][-2:], rtol=1e-4, atol=0)
    if kind != "sharded states":
        last = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-4")
        for name, w in last.named_parameters():
            assert torch.equal(w.float(), through[2][name].float()), name
