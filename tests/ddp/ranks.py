"""Ranks of torch.distributed that stay for all tests: starting them takes seconds."""

from __future__ import annotations

import datetime
import functools
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE = 4
BACKENDS = {"host": "gloo", "device": "cpu:gloo,cuda:nccl"}
PRELOAD = ["torch.distributed", "torch._dynamo", "qsgd_hpc.torch.ddp", "tests.ddp.ranks"]


class Ranks:
    """SIZE processes that run functions together.

    Args:
        place: "host", or "device" for ranks that compute on GPUs and share them where there are
            fewer.
    """

    def __init__(self, folder: Path, place: str = "host") -> None:
        self.place = place
        # Modules are loaded once, in the server that the ranks are forked from.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipes, self._processes = [], []
        for rank in range(SIZE):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, place, str(folder / "store"), there)
            )
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], *args: Any, size: int = SIZE) -> list[Any]:
        """Return what ``work(group, *args)`` returns on each rank of a group of ``size``.

        Raises:
            AssertionError: it raised on some rank; the message has the traceback.
        """
        for pipe in self._pipes:
            pipe.send((work, args, size))
        answers = [pipe.recv() for pipe in self._pipes]
        faults = [f"rank {r}: {text}" for r, (text, _) in enumerate(answers) if text]
        assert not faults, "\n".join(faults)
        return [result for _, result in answers[:size]]

    def close(self) -> list[int | None]:
        """End the processes; returns their exit codes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(60)
            process.kill()
            process.join()
        return [process.exitcode for process in self._processes]


def here() -> Any:
    """Return the device that this process keeps its tensors on."""
    import torch

    return torch.device(os.environ.get("RANKS_DEVICE", "cpu"))


@functools.cache
def _group(size: int, backend: str | None) -> Any:
    """Return a group of the first ranks; all ranks must have made the same ones, in one order."""
    import torch.distributed as dist

    return dist.new_group(range(size), backend=backend)


def gloo_beside(group: Any) -> Any:
    """Return a group of the same ranks that takes a GPU's tensors by gloo."""
    return _group(group.size(), "gloo")


def _take_device(rank: int) -> None:
    import torch

    number = rank % torch.cuda.device_count()
    torch.cuda.set_device(number)
    os.environ["RANKS_DEVICE"] = f"cuda:{number}"
    if torch.cuda.device_count() < SIZE:
        # NCCL takes no GPU twice on one host. On a host each, ranks meet over sockets.
        os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def _serve(rank: int, place: str, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if place == "device":
        _take_device(rank)
    dist.init_process_group(
        BACKENDS[place],
        init_method=f"file://{store}",
        rank=rank,
        world_size=SIZE,
        timeout=datetime.timedelta(seconds=60),
    )
    while (task := pipe.recv()) is not None:
        work, args, size = task
        try:
            mine = _group(size, None)
            if place == "device":
                _group(size, "gloo")
            pipe.send(("", work(mine, *args) if rank < size else None))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()
