"""Contestants of ``bench allreduce``: this package's allreduces and peers, and their timing."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from qsgd_hpc._core import CodecSpec, Coding, Engine, Operation
    from qsgd_hpc.runtime.direct import Communicator

__all__ = [
    "Contestant",
    "Data",
    "engine",
    "gloo_peers",
    "mpi_peer",
    "ours",
    "start_gloo",
    "time_all",
    "title",
]

Floats = NDArray[np.float32]


@dataclass
class Contestant:
    """One way to sum a float32 array in place over all ranks."""

    what: str
    run: Callable[[Floats], int | None]
    """Sums in place; returns the bytes that this rank sent, None if unknown."""
    algorithm: str = ""
    is_peer: bool = False
    is_exact: bool = True
    seconds: list[float] = field(default_factory=list)
    wire_bytes: int | None = None
    nmse: float | None = None


def title(spec: CodecSpec | None) -> str:
    """Return the name of a code in a row: ``4 bit`` for QSGD, ``eden 3 bit``, or ``fp32``."""
    if spec is None:
        return "fp32"
    prefix = "" if spec.scheme in ("qsgd", "sign") else f"{spec.scheme} "
    return f"{prefix}{spec.bits} bit"


def ours(communicator: Communicator, spec: CodecSpec | None, name: str) -> Contestant:
    """Return this package's allreduce; ``name`` is its algorithm."""
    prepared: Callable[[], int] | None = None
    array: Floats | None = None

    def run(x: Floats) -> int:
        nonlocal prepared, array
        if prepared is None or array is not x:
            prepared, array = communicator.prepare([x], coding=spec, algorithm=name), x
        return prepared()

    return Contestant(title(spec), run, algorithm=name, is_exact=spec is None)


def engine(core: Engine, coding: Coding | None = None) -> Contestant:
    """Return an allreduce as in a training script: named and negotiated.

    Args:
        core: the core's engine of this job.
        coding: the coding; with error feedback, the engine stores the residuals. None sends
            float32.
    """
    what = "engine fp32" if coding is None else title(coding.spec)
    if coding is not None and coding.error_feedback:
        what += " feedback"
    operation: Operation | None = None
    array: Floats | None = None
    pointer = 0

    def run(x: Floats) -> int | None:
        nonlocal operation, array, pointer
        if operation is not None and array is x:
            core.start(operation, pointer, pointer, x, now=True).wait()
            return None
        operation, array, pointer = _sum_of(what, x, coding), x, x.ctypes.data
        before = _sent(core)
        run(x)
        return _sent(core) - before

    return Contestant(
        what, run, algorithm="" if coding is None else "engine", is_exact=coding is None
    )


def _sent(core: Engine) -> int:
    stats = core.stats()
    in_messages = stats["wire_bytes"] - stats["shared_memory_bytes"]
    return int(in_messages - (stats["control_bytes"] - stats["mailed_bytes"]))


def _sum_of(what: str, x: Floats, coding: Coding | None) -> Operation:
    from qsgd_hpc._core import Operation

    return Operation(
        kind="allreduce",
        name=f"bench.{what}.{x.size}",
        shape=[x.size],
        dtype="float32",
        coding=coding,
        lasting=True,
    )


def mpi_peer(comm: Any, mpi: Any) -> Contestant:
    """Return MPI_Allreduce of the MPI in use (mpi4py)."""

    def run(x: Floats) -> None:
        comm.Allreduce(mpi.IN_PLACE, x)

    return Contestant("MPI_Allreduce", run, is_peer=True)


def gloo_peers(comm: Any) -> tuple[list[Contestant], str]:
    """Return gloo's allreduce in float32 and float16, or none and the reason; collective."""
    try:
        import torch
        import torch.distributed as dist

        fault = "" if dist.is_gloo_available() else "this torch is built without gloo"
    except ImportError as error:
        fault = f"{error}; pip install 'qsgd-hpc[torch]'"
    faults = [f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(fault)) if text]
    if faults:
        return [], faults[0]
    fault = start_gloo(comm, dist)
    faults = [f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(fault)) if text]
    if faults:
        return [], f"{faults[0]}; GLOO_SOCKET_IFNAME names the network interface to use"

    def plain(x: Floats) -> None:
        dist.all_reduce(torch.from_numpy(x))

    def half(x: Floats) -> None:
        whole = torch.from_numpy(x)
        cast = whole.half()
        dist.all_reduce(cast)
        whole.copy_(cast)

    return [
        Contestant("gloo fp32", plain, is_peer=True),
        Contestant("gloo fp16", half, is_peer=True, is_exact=False),
    ], ""


def start_gloo(comm: Any, dist: Any) -> str:
    """Start gloo on the ranks of ``comm``; return the error, if any."""
    address = comm.bcast(_own_address() if comm.Get_rank() == 0 else None)
    port = comm.bcast(_free_port() if comm.Get_rank() == 0 else None)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=comm.Get_rank(),
            world_size=comm.Get_size(),
        )
    except (RuntimeError, ValueError, OSError) as error:
        return " ".join(str(error).split())[:300]
    return ""


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _own_address() -> str:
    """Return the address of rank 0 for the other ranks."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        return _address_of(interface)
    return socket.gethostname()


def _address_of(interface: str) -> str:
    import fcntl
    import struct

    get_address = 0x8915  # SIOCGIFADDR of linux/sockios.h
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(sock.fileno(), get_address, request)
        except OSError:
            return socket.gethostname()  # gloo's error will name the wrong interface
    return socket.inet_ntoa(answer[20:24])


BLOCK = 1 << 20  # elements after which the data repeats, so that its exact sum is cheap
SAMPLE_S = 2e-3  # a sample consists of as many calls as take this long together
MOST_CALLS = 100
LEAST_ROUNDS, MOST_ROUNDS = 5, 200
LARGEST_SUM = 1e30  # each result is the input of the next call, and must stay finite in float32


class Data:
    """Gaussian gradients, different on each rank, and their exact sum; collective."""

    def __init__(self, comm: Any, mpi: Any, count: int) -> None:
        self.comm, self.mpi = comm, mpi
        block = min(count, BLOCK)
        rng = np.random.default_rng([2017, comm.Get_rank()])
        own = rng.standard_normal(block).astype(np.float32)
        self._exact = own.astype(np.float64)
        comm.Allreduce(mpi.IN_PLACE, self._exact)
        self._source = np.resize(own, count)
        self.x: NDArray[np.float32] = np.empty_like(self._source)

    def reset(self) -> None:
        """Restore the gradients."""
        np.copyto(self.x, self._source)

    def nmse(self) -> float:
        """Return the squared error of ``x`` as the sum, over the exact sum's squared magnitude."""
        error = magnitude = 0.0
        for at in range(0, len(self.x), BLOCK):
            got = self.x[at : at + BLOCK]
            exact = self._exact[: len(got)]
            error += float(np.sum(np.square(got - exact)))
            magnitude += float(np.sum(np.square(exact)))
        return error / magnitude

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, for each."""
        found = np.asarray(values, dtype=np.float64)
        self.comm.Allreduce(self.mpi.IN_PLACE, found, op=self.mpi.MAX)
        return list(found)


def _sample_s(contestant: Contestant, data: Data, calls: int) -> float:
    data.reset()
    if calls > 1:
        contestant.run(data.x)  # not timed: the caches contain the previous contestant's data
    data.comm.Barrier()
    start_s = time.perf_counter()
    for _ in range(calls):
        contestant.run(data.x)
    return (time.perf_counter() - start_s) / calls


def _warm_up(contestants: Sequence[Contestant], data: Data) -> list[float]:
    """Run each several times; record bytes and errors. Return the seconds of a later run."""
    seconds = []
    for contestant in contestants:
        data.reset()
        sent = contestant.run(data.x)
        if not contestant.is_peer:
            contestant.nmse = data.nmse()
            contestant.wire_bytes = data.comm.allreduce(sent, op=data.mpi.MAX)
        seconds.append(_sample_s(contestant, data, 3))
    return data.slowest(seconds)


def time_all(
    contestants: Sequence[Contestant], data: Data, rounds: int | None, seconds: float
) -> None:
    """Fill in ``seconds``, ``wire_bytes`` and ``nmse`` of each; collective.

    A sample is the slowest rank's time between a barrier and its return, over the number of calls
    if they are short.

    Args:
        contestants: they alternate, so that disturbances of the machine affect all equally.
        data: the gradients to sum.
        rounds: exact number; None: determined by the time.
        seconds: for all contestants together.
    """
    estimates_s = _warm_up(contestants, data)
    most = min(MOST_CALLS, max(1, int(math.log(LARGEST_SUM) / math.log(data.comm.Get_size()))))
    calls = [max(1, min(most, int(SAMPLE_S / max(s, 1e-9)))) for s in estimates_s]
    if rounds is None:
        round_s = sum(n * s for n, s in zip(calls, estimates_s, strict=True))
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(seconds / max(round_s, 1e-9))))
    for number in range(rounds):
        for turn in range(len(contestants)):
            at = (turn + number) % len(contestants)
            sample_s = _sample_s(contestants[at], data, calls[at])
            contestants[at].seconds.append(sample_s)
    for contestant in contestants:
        contestant.seconds = data.slowest(contestant.seconds)
