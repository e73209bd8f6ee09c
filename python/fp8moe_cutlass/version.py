"""The version, this one place of it, and whether the compiled extension is of the same."""

from __future__ import annotations

from fp8moe_cutlass import _C

__version__ = "0.2.0"


class VersionMismatch(ImportError):
    """The compiled extension is of another version than the package that calls it."""


def require_same() -> None:
    """VersionMismatch unless the extension was built from this version."""
    built = _C.build_info()["version"]
    if built != __version__:
        raise VersionMismatch(
            f"fp8moe_cutlass {__version__} needs its extension of the same version; got {built} in "
            f"{_C.__file__}: run pip install --force-reinstall fp8moe-cutlass, and look for a "
            "second copy on PYTHONPATH"
        )
