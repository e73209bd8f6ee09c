"""torchtitan's own training on CPUs: `python titan_cpu.py LOSSES_JSON ARGUMENT...`, the arguments
being those of `python -m torchtitan.train`; torchrun starts several ranks.

What torchtitan 0.3.0 asks of a GPU, and of a torch newer than 2.13, is answered here.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch._utils
import torch.distributed as dist

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
WORDS = tuple("abcdefghijklmnopqrs")
LAST = 2  # words that decide the next one


def assets(folder: Path) -> list[str]:
    """A tokenizer and a text in `folder`, which the wheel leaves out; and the arguments that name
    them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    ids = {word: n for n, word in enumerate(["<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    named = {"eos_token": "<eos>", "bos_token": "<eos>"}
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(named))
    draw = torch.Generator().manual_seed(1)
    lines = []
    for _ in range(200):
        at = [int(n) for n in torch.randint(len(WORDS), (LAST,), generator=draw)]
        for _ in range(300):
            noise = int(torch.randint(2, (1,), generator=draw))
            at.append((3 * at[-1] + at[-2] + noise) % len(WORDS))
        lines.append(json.dumps({"text": " ".join(WORDS[n] for n in at)}))
    (folder / "text").mkdir()
    (folder / "text/data.json").write_text("\n".join(lines))
    return [
        f"--hf_assets_path={folder / 'tokenizer'}",
        f"--dataloader.dataset_path={folder / 'text'}",
    ]


def on_cpu() -> None:
    """Before torchtitan is imported."""
    for name, value in {**ALONE, "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    kind: Any = types.ModuleType("torch.cpu, with the names of torch.cuda")
    kind.__getattr__ = lambda name: getattr(torch.cpu, name)
    kind.is_available = lambda: True
    kind.device_count = lambda: int(os.environ["WORLD_SIZE"])
    kind.get_device_name = lambda *_: "CPU"
    kind.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34, name="CPU")
    kind.memory_stats = lambda *_: {}
    kind.reset_peak_memory_stats = kind.empty_cache = lambda *_: None
    kind.max_memory_allocated = kind.memory_allocated = kind.memory_reserved = lambda *_: 0
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: kind  # type: ignore[assignment]

    barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **named: barrier(*args, **named)  # gloo: none
    if not hasattr(dist, "set_timeout"):  # of a newer torch
        dist.set_timeout = lambda *_, **__: None  # type: ignore[attr-defined]

    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor

    def by_sum(self: Any, factor: float) -> None:  # gloo has no PREMUL_SUM
        self.set_force_sum_reduction_for_comms(True)
        divide(self, factor)

    FSDPModule.set_gradient_divide_factor = by_sum  # type: ignore[method-assign]


def plain_attention() -> None:
    """FlexAttention has no backward on CPUs; documents of a batch then see each other."""
    from torchtitan.models.common.attention import FlexAttention

    def plain(q: Any, k: Any, v: Any, *, scale: Any, enable_gqa: bool, **_: Any) -> Any:
        how: Any = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how), None

    FlexAttention._compiled_flex_attn = staticmethod(plain)


def train(arguments: list[str], cpu: bool = True) -> list[float]:
    """The losses of all steps."""
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger

    init_logger()
    if cpu:
        plain_attention()
    config = ConfigManager().parse_args(arguments)
    trainer = config.build()
    losses: list[float] = []
    if config.checkpoint.create_seed_checkpoint:
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        log = trainer.metrics_processor.log

        def logged(step: int, average: float, *rest: Any, **named: Any) -> Any:
            losses.append(float(average))
            return log(step, average, *rest, **named)

        step = trainer.optimizers.step

        def checked(*args: Any, **named: Any) -> Any:
            for part in trainer.model_parts:
                for name, weight in part.named_parameters():
                    assert weight.grad is not None, f"no gradient of {name}"
            return step(*args, **named)

        trainer.optimizers.step = checked
        trainer.metrics_processor.log = logged
        trainer.train()
    trainer.close()
    return losses


def main() -> None:
    out, *arguments = sys.argv[1:]
    on_cpu()
    losses = train(arguments)
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
