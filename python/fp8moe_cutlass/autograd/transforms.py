"""torch.func and forward-mode AD, which would lose a gradient or run into FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

# Private, for want of a public form; without it torch's own message says less.
_transforms_active: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def refuse_transforms(op: str, *tensors: Any) -> None:
    """RuntimeError inside torch.func.grad, vmap, jvp and their kind, and for a tensor with a
    tangent."""
    if torch.compiler.is_compiling():
        return
    got = None
    if _transforms_active():
        got = "a torch.func transform (grad, vmap, jvp)"
    elif getattr(forward_ad, "_current_level", -1) >= 0 and any(map(_has_tangent, tensors)):
        got = "a tensor with a tangent (forward-mode AD)"
    if got is not None:
        raise RuntimeError(
            f"[{op}] has a gradient by backward() and torch.autograd.grad alone; got {got}"
        )


def _has_tangent(t: Any) -> bool:
    if not isinstance(t, torch.Tensor):
        return False
    return forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]
