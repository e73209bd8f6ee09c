"""What all tests share: where a Hopper GPU is missing, tests marked gpu are skipped and say why."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from fp8moe_cutlass import slow_path
from on_device import ops


def why_no_gpu() -> str | None:
    """The reason GPU tests cannot run on this machine; None where they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs compute capability 9.0; {torch.cuda.get_device_name()} has {capability}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thin", type=int, default=1, help="run every N-th case of each test")


def pytest_itemcollected(item: pytest.Item) -> None:
    if {"pool", "deep_pool"} & set(getattr(item, "fixturenames", ())):  # processes of several ranks
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = why_no_gpu()
    # compute-sanitizer makes a case take up to a hundred times as long: a few of each test then,
    # the first always. Every 5th, say, meets all values of parameters that have 2, 3 or 4.
    seen: dict[str, int] = {}
    kept, left_out = [], []
    for item in items:
        gpu = item.get_closest_marker("gpu") is not None
        if reason and gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
        test = f"{item.nodeid.split('[')[0]} {gpu}"
        seen[test] = seen.get(test, -1) + 1
        (left_out if seen[test] % config.getoption("--thin") else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of on_device.ops: a suite that uses this runs once on each."""
    ops.device = torch.device(request.param)
    yield ops.device
    ops.device = torch.device("cpu")


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
