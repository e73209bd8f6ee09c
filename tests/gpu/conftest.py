"""Every test here needs a Hopper GPU: tests/conftest.py skips what is marked so without one."""

from __future__ import annotations

import pytest
import torch

HERE = str(__file__).rsplit("/", 1)[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thin", type=int, default=1, help="run every N-th case of each test")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.gpu)
    # compute-sanitizer makes a case take up to a hundred times as long: a few of each test then,
    # the first always. Every 5th, say, meets all values of parameters that have 2, 3 or 4.
    seen: dict[str, int] = {}
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.split("[")[0]
        seen[test] = seen.get(test, -1) + 1
        (left_out if seen[test] % config.getoption("--thin") else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
