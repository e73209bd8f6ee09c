"""SlowPathWarning: what runs right, but not on the fast path, says so once."""

from __future__ import annotations

import warnings

_said: set[str] = set()  # causes, of this process


class SlowPathWarning(UserWarning):
    """A call takes a path that is not the fast one, and the caller can change that. Once per cause
    and process; filter it as any warning."""


def slow_path(cause: str, message: str) -> None:
    """Warn of `cause`, unless that has been done."""
    if cause not in _said:
        _said.add(cause)
        warnings.warn(message, SlowPathWarning, stacklevel=3)
