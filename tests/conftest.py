"""What all tests share: where a Hopper GPU is missing, tests marked gpu are skipped and say why."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from fp8moe_cutlass import slow_path


def why_no_gpu() -> str | None:
    """The reason GPU tests cannot run on this machine; None where they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs compute capability 9.0; {torch.cuda.get_device_name()} has {capability}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_gpu()
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def slow_paths_are_silent() -> Iterator[None]:
    """But where a test expects one (pytest.warns); each test is told of each cause anew."""
    slow_path._said.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", slow_path.SlowPathWarning)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
