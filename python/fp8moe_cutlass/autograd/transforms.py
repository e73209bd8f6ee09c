"""torch.func and forward-mode AD, which would lose a gradient or run into FP8."""

from __future__ import annotations

from typing import Any

from fp8moe_cutlass.ops import _torch


def refuse_transforms(op: str, *tensors: Any) -> None:
    """RuntimeError inside torch.func.grad, vmap, jvp and their kind, and for a tensor with a
    tangent."""
    if _torch.compiling():
        return
    got = None
    if _torch.transforms_active():
        got = "a torch.func transform (grad, vmap, jvp)"
    elif _torch.dual() and any(map(_torch.has_tangent, tensors)):
        got = "a tensor with a tangent (forward-mode AD)"
    if got is not None:
        raise RuntimeError(
            f"[{op}] has a gradient by backward() and torch.autograd.grad alone; got {got}"
        )
