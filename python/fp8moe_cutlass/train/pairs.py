"""What telemetry.snr needs of the layers of a model in a training step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fp8moe_cutlass import telemetry
from fp8moe_cutlass.nn import MoEExperts

TOKENS = 2048  # the first ones alone
Pairs = dict[str, tuple[MoEExperts, tuple[Tensor, ...]]]


@contextmanager
def seen_by_layers(module: nn.Module) -> Iterator[Pairs]:
    """In the scope: of every FP8 MoEExperts, by its name, the layer and (x, topk_idx, topk_weights,
    dout) of its last forward whose backward has run."""
    found: Pairs = {}
    arguments = inspect.signature(MoEExperts.forward)

    def looker(name: str) -> Any:
        def look(layer: Any, args: Any, kwargs: Any, out: Tensor) -> None:
            if not out.requires_grad:
                return
            given = arguments.bind(layer, *args, **kwargs).arguments
            inputs = [given[n].detach() for n in ("x", "topk_idx", "topk_weights")]
            inputs[0] = inputs[0].to(out.dtype)  # what it computed in, which autocast chooses

            def take(dout: Tensor) -> None:  # with its own forward's inputs, in any order
                four = (t.flatten(0, -2)[:TOKENS] for t in (*inputs, dout))
                found[name] = layer, tuple(four)

            out.register_hook(take)  # type: ignore[no-untyped-call]

        return look

    hooks = [
        layer.register_forward_hook(looker(name), with_kwargs=True)
        for name, layer in telemetry.fp8_layers(module).items()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
