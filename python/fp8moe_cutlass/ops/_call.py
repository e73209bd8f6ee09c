"""The one way to call an operator: operator(name)(*fields), in the order of include/fp8moe/ops.h.

A call goes to torch.ops.fp8moe.<name> where something traces, intercepts or watches (torch.compile,
make_fx, torch.jit.trace, dispatch modes, the profiler, forward-mode AD), and else straight to _C.
Both refuse what requires grad while grad mode is on, and count up the versions of the outputs, as
torch's in-place operations do. Without torch, all calls go to _C.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from fp8moe_cutlass import _C, version
from fp8moe_cutlass.ops._outputs import scratch

try:
    import torch
    from torch.autograd import forward_ad, profiler
    from torch.autograd.graph import increment_version

    from fp8moe_cutlass.ops import _values  # noqa: F401  (registers them)
    from fp8moe_cutlass.ops._torch_op import register
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = None  # type: ignore[assignment]

T = TypeVar("T")
version.require_same()

if torch is not None:
    _C.attach_torch(torch.Tensor, torch.is_grad_enabled)
    _is_dynamo_compiling = torch.compiler.is_dynamo_compiling
    _is_tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]
    # Private, for want of a public form that is this thread's. Without one, every call is watched.
    _modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
    _PRIVATE = (profiler, "_is_profiler_enabled"), (forward_ad, "_current_level")
    KNOWN = _modes is not None and all(hasattr(*at) for at in _PRIVATE)


def loadable(*kinds: type) -> None:
    """torch.load takes these classes by default."""
    if torch is not None:
        torch.serialization.add_safe_globals(list(kinds))


class _Here(threading.local):
    """Of this thread: its caller has asked `watched` already, and nothing can change it."""

    unwatched = False


_here = _Here()


def watched() -> bool:
    """Whether something of torch's has to see the operators that run now."""
    return (  # dynamo, which takes this apart, sees the first alone
        _is_dynamo_compiling()
        or not KNOWN
        or _modes() > 0
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
        or _is_tracing()
    )


def watched_once(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, with one look at `watched` for all of it: no mode begins or ends inside."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> T:
        if watched() or _here.unwatched:
            return function(*args, **kwargs)
        _here.unwatched = True
        try:
            return function(*args, **kwargs)
        finally:
            _here.unwatched = False

    return run


def operator(name: str) -> Callable[..., None]:
    """The function of an operator's fields. A workspace that is None is allocated. fresh=True:
    nobody else has the outputs yet, so that no version need count."""
    direct = with_workspace(name, getattr(_C, name))
    if torch is None:
        return lambda *given, fresh=False: direct(*given)
    through_torch = register(name, with_workspace(name, _C.flat(name)), direct)

    def call(*given: Any, fresh: bool = False) -> None:
        if _is_dynamo_compiling() or (
            not _here.unwatched  # what follows is `watched`, without the time of a call
            and (
                _modes()
                or profiler._is_profiler_enabled
                or forward_ad._current_level >= 0
                or _is_tracing()
            )
        ):
            through_torch(given)
        elif (written := direct(*given)) is not None and not fresh:
            increment_version(written)

    return call if KNOWN else lambda *given, fresh=False: through_torch(given)


def with_workspace(name: str, run: Any) -> Any:
    """`run`, whose last argument is allocated where it is None and needed: here, where sizes are
    numbers. `run` then tells the bytes."""
    if not (role := _C.operators()[name][-1][2]).endswith("workspace"):
        return run

    def allocating(*given: Any) -> Any:
        written = run(*given)
        if not isinstance(written, int):
            return written
        like = next(array for array in given if array is not None)
        workspace = scratch(name, like, written, role == "zero_workspace")
        return run(*given[:-1], workspace)

    return allocating
