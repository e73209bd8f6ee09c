"""SlowPathWarning: what runs right, but not on the fast path, says so once."""

from __future__ import annotations

import sys
import warnings

_LIBRARIES = {"fp8moe_cutlass", "torch", "transformers", "accelerate", "peft", "trl", "megatron"}
_LIBRARIES |= {"torchtitan"}
_said: set[str] = set()  # causes, of this process


class SlowPathWarning(UserWarning):
    """A call takes a path that is not the fast one, and the caller can change that. Once per cause
    and process; filter it as any warning."""


def slow_path(cause: str, message: str) -> None:
    """Warn of `cause`, unless that has been done, at the line outside of these libraries that led
    to it."""
    if cause not in _said:
        _said.add(cause)
        frame, level = sys._getframe(), 1
        while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
            frame, level = frame.f_back, level + 1
        warnings.warn(message, SlowPathWarning, stacklevel=level)
