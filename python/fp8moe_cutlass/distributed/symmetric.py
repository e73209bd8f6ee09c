"""Memory of equal size on every rank of a group, which all of them can address.

On a GPU it is torch's symmetric memory, of which only `empty`, `rendezvous` and `buffer_ptrs` are
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
    """A rank's share, and where this device has everyone's."""

    mine: Tensor  # [bytes] u8, zero at first
    addresses: list[int]
    keeps: Any  # what it lives by

    def peers(self, offset: int) -> Tensor:
        """[ranks] i64, on the device: the addresses of byte `offset`."""
        return torch.tensor([a + offset for a in self.addresses], device=self.mine.device)


def unavailable(device: torch.device, transport: str) -> str:
    """Why this process cannot have such memory; "": it can."""
    if device.type == "cpu":
        return "" if transport == "peer" else "is for GPUs"
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
    """`size` bytes on each rank, zero. Collective; RuntimeError on all ranks if one has no room."""
    make = _of_gpu if device.type == "cuda" else _of_files
    memory, error = None, ""
    try:
        memory = make(group, size, device)
    except (RuntimeError, OSError) as caught:
        error = str(caught)
    if not agree(group, device, memory is not None) or memory is None:
        raise RuntimeError(
            f"[MoEExperts] transport 'peer' needs {size} bytes that ranks share on each of them; "
            f"got {error or 'none on another rank'}; use transport='nccl'"
        )
    return memory


def _of_gpu(group: Any, size: int, device: torch.device) -> Memory:
    from torch.distributed import _symmetric_memory

    mine = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    handle = _symmetric_memory.rendezvous(mine, group)
    mine.zero_()
    addresses = list(handle.buffer_ptrs)
    begins = mine.data_ptr() - addresses[dist.get_rank(group)]  # the same on all ranks
    return Memory(mine, [a + begins for a in addresses], handle)


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
    begins = whole.data_ptr()
    return Memory(whole[rank * size :][:size], [begins + r * size for r in range(ranks)], whole)
