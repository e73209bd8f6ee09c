"""ReuseCallback: FP8 weights quantized once per optimizer step of a Trainer.

integrations.transformers exports it. docs/how-to/hugging-face.md.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from transformers import TrainerCallback

from fp8moe_cutlass.integrations.transformers_check import check
from fp8moe_cutlass.nn import reuse_fp8_weights
from fp8moe_cutlass.nn.expert_block import blocks_of


class ReuseCallback(TrainerCallback):
    """Quantizes FP8 weights once per optimizer step for all its microbatches, by
    nn.reuse_fp8_weights, in a Trainer with gradient_accumulation_steps.

        with ReuseCallback() as reuse:
            Trainer(model, arguments, train_dataset=data, callbacks=[reuse]).train()

    `with` ends the reuse where train() raises: Trainer tells its callbacks of no exception. A
    train() outside of it is refused by RuntimeError, and a model without experts in FP8 by
    ValueError. check: as of nn.reuse_fp8_weights.
    """

    def __init__(self, check: bool = False) -> None:
        self._check = check
        self._scope: ExitStack | None = None  # inside `with`

    def __enter__(self) -> ReuseCallback:
        self._scope = ExitStack()
        return self

    def __exit__(self, *raised: Any) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(*raised)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        scope, model = self._inside(), given["model"]
        if not blocks_of(model):
            _refuse(model)
        with suppress(InterruptedError), scope:  # of a train() before this one that raised
            raise InterruptedError

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        scope = self._inside()
        scope.close()
        scope.enter_context(reuse_fp8_weights(given["model"], check=self._check))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._inside().close()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._inside().close()

    def _inside(self) -> ExitStack:
        if self._scope is None:
            raise RuntimeError(
                "[ReuseCallback] train() must run inside `with ReuseCallback() as reuse:`, which "
                "ends the reuse after an exception; got train() outside of it"
            )
        return self._scope


def _refuse(model: Any) -> NoReturn:
    runs = sorted({e.runs for e in check(model)}) or "no experts modules"
    raise ValueError(
        "[ReuseCallback] model must have experts in FP8: swap it, or register a name and give it "
        f"by set_experts_implementation; got {type(model).__name__}, which runs {runs}"
    )
