"""A script as N processes of this machine: it becomes torchrun."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(minutes=5)


@contextmanager
def processes(count: int, device: torch.device) -> Iterator[torch.device]:
    """For a scope this is one of `count` processes of this script, and yields its device. GPUs talk
    by NCCL, hosts by gloo; an exchange that takes five minutes is an error."""
    _become(count)
    cuda = device.type == "cuda"
    if cuda:
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"each process needs a GPU of this machine; got {local + 1} or more processes, "
                f"and {torch.cuda.device_count()} GPUs"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    yield device
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone


def _become(count: int) -> None:
    """Under torchrun: check that it started as many. Else become torchrun, with this command line
    as what it runs, on this machine."""
    if count < 1:
        raise ValueError(f"the number of processes must be at least 1; got {count}")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no name to resolve
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])
    if int(os.environ["WORLD_SIZE"]) != count:
        raise ValueError(
            f"the number of processes must be what torchrun started, {os.environ['WORLD_SIZE']}; "
            f"got {count}"
        )
