"""Every test here needs a Hopper GPU: tests/conftest.py skips what is marked so without one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import Pool

HERE = str(__file__).rsplit("/", 1)[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """A group of this process alone."""
    store = Path(tempfile.mkdtemp()) / "store"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """All GPUs, up to a power of two, each with a process."""
    size = max(n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count())
    if size == 1:
        pytest.skip("needs two GPUs")
    made = Pool(size, {size: list(range(size))}, backend="nccl")
    yield made
    made.close()
