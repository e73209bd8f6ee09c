"""Fixtures of the GPU tests. Without a Hopper GPU every test here is skipped, and says why."""

from __future__ import annotations

import pytest
import torch

HERE = str(__file__).rsplit("/", 1)[0]


def why_not() -> str | None:
    """The reason GPU tests cannot run on this machine; None where they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs compute capability 9.0; {torch.cuda.get_device_name()} has {capability}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
