"""Processes that run a function together, as the ranks of a process group."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

# Of the processes of a world of 8, who is in the group of each size: no group but the last is the
# world, and no rank of a smaller one is its rank in the world.
MEMBERS = {1: [5], 2: [1, 6], 3: [2, 3, 7], 4: [1, 4, 6, 7], 8: list(range(8))}


class Failure(Exception):
    """What a rank raised: the type's name, the message and the traceback."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind = kind
        self.message = message


class Pool:
    """`size` processes in one group; members: {key: ranks} of its further groups. backend: "gloo",
    or "nccl" with a GPU a rank. preload: modules that the processes share."""

    def __init__(
        self,
        size: int,
        members: dict[int, list[int]],
        timeout: float = 60.0,
        backend: str = "gloo",
        preload: tuple[str, ...] = ("moe_problem",),
    ) -> None:
        # One server that has imported everything, from which every process is forked.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fp8moe_cutlass.nn", "torch.distributed", *preload])
        store = Path(tempfile.mkdtemp()) / "store"
        self.members = members
        self.pipes: list[Connection] = []
        self.processes = []
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # the server's, hence theirs
        for rank in range(size):
            here, there = context.Pipe()
            args = (there, backend, rank, size, members, timeout, str(store))
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before

    def run(
        self,
        key: int,
        function: Callable[..., Any],
        *args: Any,
        wait_for: Collection[int] | None = None,
    ) -> list[Any]:
        """function(group, *args) on every rank of a group; what each returned, or its Failure.

        wait_for: the ranks whose answers are awaited, where others give none.
        """
        ranks = self.members[key]
        for rank in ranks:
            self.pipes[rank].send_bytes(pickle.dumps((key, function, args)))
        return [
            _received(self.pipes[rank]) for rank in ranks if wait_for is None or rank in wait_for
        ]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def pool(size: int, members: dict[int, list[int]] | None = None, **options: Any) -> Any:
    """A module's fixture: a Pool, by default of one group. Over NCCL it needs a GPU per rank."""

    @pytest.fixture(scope="module")
    def made() -> Iterator[Pool]:
        if options.get("backend") == "nccl":
            import torch

            if torch.cuda.device_count() < size:
                pytest.skip(f"needs {size} GPUs")
        processes = Pool(size, members or {size: list(range(size))}, **options)
        yield processes
        processes.close()

    return made


def results(found: list[Any]) -> list[Any]:
    """What the ranks returned; raises the first Failure."""
    for one in found:
        if isinstance(one, Failure):
            raise one
    return found


def _received(pipe: Connection) -> Any:
    if not pipe.poll(120):
        return Failure("TimeoutError", "no answer within 120 s", "")
    try:
        ok, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return Failure("EOFError", "the process has ended", "")
    return value if ok else Failure(*value)


def _serve(
    pipe: Connection,
    backend: str,
    rank: int,
    size: int,
    members: dict[int, list[int]],
    timeout: float,
    store: str,
) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # a rank that dies says where
    torch.set_num_threads(1)
    wait = timedelta(seconds=timeout)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{store}", wait, rank=rank, world_size=size)
    groups = {
        key: dist.group.WORLD if len(who) == size else dist.new_group(who, timeout=wait)
        for key, who in members.items()
    }
    while True:
        try:
            key, function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            answer: Any = (True, function(groups[key], *args))
        except Exception as error:
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        pipe.send_bytes(pickle.dumps(answer))
