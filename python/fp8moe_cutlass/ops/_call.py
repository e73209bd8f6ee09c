"""The one way to call an operator: operator(name)(*fields), in the order of include/fp8moe/ops.h.

_C refuses what requires grad while grad mode is on, and tells the outputs that it has written.
Their versions are counted up here, as torch's in-place operations do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8moe_cutlass import _C, version
from fp8moe_cutlass.ops._outputs import scratch

try:
    import torch
    from torch.autograd.graph import increment_version

    from fp8moe_cutlass.ops import _torch, _values  # noqa: F401  (registers them)
    from fp8moe_cutlass.tensor import Fp8Tensor
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = None  # type: ignore[assignment]

version.require_same()

if torch is not None:
    _C.attach_torch(torch.Tensor, torch.is_grad_enabled)


def loadable(*kinds: type) -> None:
    """torch.load takes these classes by default."""
    if torch is not None:
        torch.serialization.add_safe_globals(list(kinds))


def operator(name: str) -> Callable[..., None]:
    """The function of an operator's fields. A workspace that is None is allocated. fresh=True:
    nobody else has the outputs yet, so that no version need count."""
    direct = with_workspace(name, getattr(_C, name))
    if torch is None:
        return lambda *given, fresh=False: direct(*given)

    def call(*given: Any, fresh: bool = False) -> None:
        if _torch.dual():
            _refuse_tangents(name, given)
        if (written := direct(*given)) is not None and not fresh:
            increment_version(written)

    return call


def _refuse_tangents(name: str, given: tuple[Any, ...]) -> None:
    for (field, *_), arg in zip(_C.operators()[name], given, strict=False):
        for t in (arg.data, arg.scale_inv) if isinstance(arg, Fp8Tensor) else (arg,):
            if _torch.has_tangent(t):
                raise ValueError(
                    f"[{name}] {field} must not have a tangent, which would be lost: ops have no "
                    "forward-mode AD"
                )


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
