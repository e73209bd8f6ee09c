"""Asks torch, which has no public word for it, whether it traces and what a backward is for.

The only file with torch's private names, and with `is_compiling`.

- torch._C._len_torch_dispatch_stack: whether a dispatch mode looks on. A function mode does not
  count: `with torch.device(...)` is one.
- torch._C._current_graph_task_id: whether this thread runs a backward.
- torch._C._will_engine_execute_node: which gradients the backward that runs is for.
- torch._C._are_functorch_transforms_active: whether a torch.func transform runs.
- torch.autograd.forward_ad._current_level: whether tensors may have tangents.
- torch.Tensor._make_wrapper_subclass and torch._C._disabled_torch_function_impl: what torch's
  notes on subclasses make them with.

Without one of them the answer is the careful or plain one: watched, no backward, all gradients, no
transform, no tangents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

compiling = torch.compiler.is_compiling
_jit_tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]
_dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_graph_task: Any = getattr(torch._C, "_current_graph_task_id", None)
_will_run: Any = getattr(torch._C, "_will_engine_execute_node", None)
# Inside torch.func.grad, vmap, jvp and their kind.
transforms_active: Any = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)

# Of tensor subclasses: a tensor without memory of its own, and a __torch_function__ that leaves
# results plain tensors.
wrapper_tensor: Any = torch.Tensor._make_wrapper_subclass
no_torch_function: Any = torch._C._disabled_torch_function_impl


def watched() -> bool:
    """Whether torch.compile, make_fx, jit.trace or a dispatch mode has to see what runs now."""
    return (  # dynamo, which takes this apart, sees the first alone
        compiling() or _dispatch_modes is None or _dispatch_modes() > 0 or _jit_tracing()
    )


def in_backward() -> bool:
    """Whether this thread runs a backward, as a checkpointed forward does when it runs again."""
    return not compiling() and _graph_task is not None and _graph_task() != -1


def runs(node: Any) -> tuple[bool, bool]:
    """Whether the backward that runs goes on to `node`, an input's, and whether autograd.grad was
    asked for this very leaf, so that its gradient is to be returned: the engine says so by an
    error."""
    if node is None or _will_run is None:
        return node is not None, False
    try:
        return _will_run(node), False
    except RuntimeError:
        return True, True


def refuse_transforms(op: str, *tensors: Any) -> None:
    """RuntimeError inside torch.func.grad, vmap, jvp and their kind, and for a tensor with a
    tangent: a gradient would be lost, or run into FP8."""
    if compiling():
        return
    got = None
    if transforms_active():
        got = "a torch.func transform (grad, vmap, jvp)"
    elif getattr(forward_ad, "_current_level", -1) >= 0 and any(map(has_tangent, tensors)):
        got = "a tensor with a tangent (forward-mode AD)"
    if got is not None:
        raise RuntimeError(
            f"[{op}] has a gradient by backward() and torch.autograd.grad alone; got {got}"
        )


def has_tangent(t: Any) -> bool:
    """Whether t has a tangent of forward-mode AD."""
    if not isinstance(t, torch.Tensor):
        return False
    return forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]
