"""Gives the extension torch, where torch is installed."""

from __future__ import annotations

from fp8moe_cutlass import _C, version

try:
    import torch

    from fp8moe_cutlass.ops import _values  # noqa: F401  (registers them)
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = None  # type: ignore[assignment]

version.require_same()

if torch is not None:
    _C.attach_torch(torch)


def loadable(*kinds: type) -> None:
    """torch.load takes these classes by default."""
    if torch is not None:
        torch.serialization.add_safe_globals(list(kinds))
