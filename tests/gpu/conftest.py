"""Every test here needs a Hopper GPU: tests/conftest.py skips what is marked so without one."""

from __future__ import annotations

import pytest
import torch

HERE = str(__file__).rsplit("/", 1)[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
