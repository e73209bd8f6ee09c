"""Megatron-Core: experts and MoE layer in FP8, and the functions of its token dispatcher.

    from fp8moe_cutlass.integrations import megatron

    spec = megatron.swap(spec)              # the experts, on Megatron's own dispatchers
    spec = megatron.swap(spec, layer=True)  # the whole layer: tokens travel in FP8, too

`swap` takes the spec of a model and returns another one. `Experts` and `MoELayer` are what it puts
in; their parameters have Megatron's names, and `keep_together()` keeps their memory together.
`replace_permutation()` leaves the model as it is and moves its tokens. These need
megatron-core, written against 0.19.2, and are loaded when first asked for; the functions of
moe_utils.py need only this library. docs/how-to/megatron-core.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8moe_cutlass.integrations.megatron.moe_utils import (
    permute,
    sort_chunks_by_idxs,
    topk_routing_with_score_function,
    unpermute,
)

if TYPE_CHECKING:
    from fp8moe_cutlass.integrations.megatron.buffers import keep_together
    from fp8moe_cutlass.integrations.megatron.experts import Experts
    from fp8moe_cutlass.integrations.megatron.layer import MoELayer
    from fp8moe_cutlass.integrations.megatron.permutation import replace_permutation
    from fp8moe_cutlass.integrations.megatron.spec import swap

__all__ = [
    "Experts",
    "MoELayer",
    "keep_together",
    "permute",
    "replace_permutation",
    "sort_chunks_by_idxs",
    "swap",
    "topk_routing_with_score_function",
    "unpermute",
]

_ROOMS = {
    "Experts": "experts",
    "MoELayer": "layer",
    "keep_together": "buffers",
    "replace_permutation": "permutation",
    "swap": "spec",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        room = import_module(f"{__name__}.{_ROOMS[name]}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise ImportError(
            f"[megatron] {name} needs megatron-core, written against 0.19.2 (Python 3.12 or "
            f"newer): {error}"
        ) from error
    return getattr(room, name)
