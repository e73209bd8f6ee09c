"""Memory of equal size on every rank of a group, which all of them can address.

On a GPU it is torch's symmetric memory, of which only `empty`, `rendezvous` and `get_buffer` are
used. On the CPU it is a file that the processes map, for tests of the protocol.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """Every rank's share, as this device addresses it."""

    of: list[Tensor]  # by rank, [bytes] u8, zero at first
    mine: Tensor
    keeps: Any  # what it lives by

    def peers(self, offset: int) -> Tensor:
        """[ranks] i64, on the device: the addresses of byte `offset`."""
        addresses = [share.data_ptr() + offset for share in self.of]
        return torch.tensor(addresses, device=self.mine.device)


class NoSharedMemory(RuntimeError):
    """The ranks cannot have memory that all of them address."""


def wanted(device: torch.device, transport: str) -> bool:
    """Whether ranks try to share memory. On the CPU that is for tests, which ask for it."""
    return transport == "peer" or (transport == "auto" and device.type == "cuda")


def unavailable(group: Any, device: torch.device) -> str:
    """Why this process cannot have such memory; "": it can."""
    if device.type == "cpu":
        return ""
    backend = group._get_backend(device).name()
    if backend != "nccl":
        return f"needs a group of NCCL's (got {backend})"
    try:
        from torch.distributed._symmetric_memory import empty, rendezvous  # noqa: F401
    except ImportError as error:
        return f"needs torch's symmetric memory ({error})"
    return ""


def agree(group: Any, device: torch.device, mine: bool) -> bool:
    """Whether it is so on all ranks, whose devices are idle then. Collective."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    all_of_them = torch.tensor([int(mine)], device=device)
    dist.all_reduce(all_of_them, dist.ReduceOp.MIN, group=group)
    return bool(all_of_them.item())


def allocate(group: Any, size: int, device: torch.device) -> Memory:
    """`size` bytes on each rank, zero. Collective; NoSharedMemory on all if one has no room."""
    make = _of_gpu if device.type == "cuda" else _of_files
    memory, error = None, ""
    try:
        memory = make(group, size, device)
    except (RuntimeError, OSError) as caught:
        error = str(caught)
    if not agree(group, device, memory is not None) or memory is None:
        raise NoSharedMemory(
            f"[MoEExperts] transport 'peer' needs {size} bytes that ranks share on each of them; "
            f"got {error or 'none on another rank'}; use transport='nccl'"
        )
    return memory


def _of_gpu(group: Any, size: int, device: torch.device) -> Memory:
    from torch.distributed import _symmetric_memory

    torch.cuda.empty_cache()  # it would not use what torch keeps for later
    mine, error = None, "none on another rank"
    try:
        mine = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as caught:
        error = str(caught)
    if not agree(group, device, mine is not None) or mine is None:
        raise RuntimeError(error)  # the others would wait for this rank at the rendezvous
    handle = _symmetric_memory.rendezvous(mine, group)
    mine.zero_()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    # What a handle's buffers begin with is the same on all ranks.
    begins = mine.data_ptr() - handle.get_buffer(rank, (1,), torch.uint8).data_ptr()
    of = [handle.get_buffer(r, (size,), torch.uint8, begins) for r in range(ranks)]
    return Memory(of, mine, handle)


def _of_files(group: Any, size: int, device: torch.device) -> Memory:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    path = [""]
    if rank == 0:
        file, path[0] = tempfile.mkstemp(prefix="fp8moe-")
        os.ftruncate(file, size * ranks)
        os.close(file)
    dist.broadcast_object_list(path, dist.get_global_rank(group, 0), group=group)
    whole = torch.from_file(path[0], shared=True, size=size * ranks, dtype=torch.uint8)
    agree(group, device, True)
    if rank == 0:
        os.unlink(path[0])
    of = list(whole.split(size))  # type: ignore[no-untyped-call]
    return Memory(of, of[rank], whole)
