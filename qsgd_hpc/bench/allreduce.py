"""``qsgd-hpc bench allreduce`` on the ranks of a launched job."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from qsgd_hpc import __version__
from qsgd_hpc.bench import explain, table
from qsgd_hpc.bench.contestants import (
    Contestant,
    Data,
    engine,
    gloo_peers,
    mpi_peer,
    ours,
    time_all,
)
from qsgd_hpc.bench.table import Row, Timing, compare, row_json
from qsgd_hpc.bench.words import AUTO, FLOAT_BYTES, PLAIN_BITS
from qsgd_hpc.compression import KINDS, has_choice_of_bits
from qsgd_hpc.env import ALGORITHMS, COMPRESSED
from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics, planning

if TYPE_CHECKING:
    from qsgd_hpc._core import CodecSpec, Machine

__all__ = ["Request", "run"]


@dataclass(frozen=True)
class Request:
    """Options of the benchmark."""

    sizes: Sequence[int]
    bits: Sequence[int | str]
    schemes: Sequence[str] = ("qsgd",)
    """Schemes of the codes; each has a choice of bits."""
    algorithms: Sequence[str] = (AUTO,)
    peers: bool = False
    explain: bool = False
    """Print the plan per size and its reasons instead of measuring."""
    trial: bool = False
    """With explain: also measure every choice, and print it with its prediction."""
    json_path: Path | None = None
    bandwidth_gbps: float | None = None
    """Rate of a rank's link in Gb/s; None: as measured."""
    rounds: int | None = None
    seconds: float = 2.0
    threads: int = 1


class Bench:
    """The job's communicators and machine."""

    def __init__(self, request: Request, mpi: Any, communicator: Any) -> None:
        self.request, self.mpi, self.communicator = request, mpi.module, communicator
        self.comm = communicator.comm
        self.is_root = self.comm.Get_rank() == 0
        self.screen = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
        self.key = planning.key_of(
            mpi.module, communicator.nodes, self.comm.Get_size(), request.threads
        )
        asked = [spec for bits in request.bits if bits != AUTO for spec in self.codecs(bits)]
        self.machine: Machine = planning.machine(communicator, self.comm, self.key, asked)

    def say(self, text: str | Text = "") -> None:
        """Print on rank 0."""
        if self.is_root:
            self.screen.print(text, soft_wrap=True)
            self.screen.file.flush()

    def introduce(self) -> None:
        """Print what is measured, and the machine."""
        m, key = self.machine, self.key
        nodes = m.ranks // m.ranks_per_node
        self.say(
            f"qsgd-hpc {__version__}, {key.mpi}: {m.ranks} ranks on {nodes} "
            f"node{'s' if nodes > 1 else ''}, {key.threads} "
            f"thread{'s' if key.threads > 1 else ''} each; float32 sums, in place"
        )
        alpha_s, beta_s = m.link
        self.say(
            f"link, measured: {alpha_s * 1e6:.1f} us per message, {1e-9 / beta_s:.3f} GB/s "
            f"({8e-9 / beta_s:.2f} Gb/s) per rank, all ranks sending"
        )
        if self.request.bandwidth_gbps:
            self.say(f"link, as given: {self.request.bandwidth_gbps:g} Gb/s, used for `limit`")

    @property
    def seconds_per_byte(self) -> float:
        """Seconds per byte on a rank's link, as given or measured."""
        given = self.request.bandwidth_gbps
        return 8e-9 / given if given else self.machine.link[1]

    def contestants(self, count: int, peers: Sequence[Contestant]) -> list[Contestant]:
        """Return all contestants at this size; ours in the order of the request."""
        found = []
        for bits in self.request.bits:
            if bits == AUTO:
                found.append(self.planned(count))
            elif bits == PLAIN_BITS:
                found += self.exact()
            else:
                for scheme in self.request.schemes:
                    found += self.coded(int(bits), scheme)
        return [*found, *(replace(peer, seconds=[]) for peer in peers)]

    def codecs(self, bits: int | str) -> list[CodecSpec]:
        """Return the codes for a number of bits; for auto, those of ``Compression.auto()``."""
        if bits == AUTO:
            return explain.open_codes()
        if bits == PLAIN_BITS:
            return []
        return [explain.spec_of(int(bits), scheme) for scheme in self.request.schemes]

    def planned(self, count: int) -> Contestant:
        """Return the planner's choice for a number of elements."""
        plan = explain.plan(self.machine, count, self.codecs(AUTO))
        entry = ours(self.communicator, plan.spec, plan.algorithm)
        entry.what = f"auto: {entry.what}"
        return entry

    def exact(self) -> list[Contestant]:
        """Return the contestants in float32, including the engine's."""
        names = fitting(self.request.algorithms, coded=False)
        found = [ours(self.communicator, None, self.named(name, coded=False)) for name in names]
        return [*found, engine(basics.context().engine)] if AUTO in names else found

    def coded(self, bits: int, scheme: str) -> list[Contestant]:
        """Return the contestants of a code; with error feedback, auto is the engine's allreduce."""
        spec, training = explain.spec_of(bits, scheme), explain.coding_of(bits, scheme)
        found = []
        for name in fitting(self.request.algorithms, coded=True):
            if name == AUTO and training.error_feedback:
                found.append(engine(basics.context().engine, training))
            else:
                found.append(ours(self.communicator, spec, self.named(name, coded=True)))
        return found

    def named(self, algorithm: str, coded: bool) -> str:
        """Return an algorithm's name, with auto resolved for this machine."""
        if algorithm != AUTO:
            return algorithm
        return self.machine.coded if coded else self.machine.exact

    def row(self, size_bytes: int, done: Contestant) -> Row:
        sent = done.wire_bytes
        return Row(
            size_bytes=size_bytes,
            what=done.what,
            algorithm=done.algorithm,
            timing=Timing.of(done.seconds),
            ranks=self.machine.ranks,
            is_peer=done.is_peer,
            is_exact=done.is_exact,
            wire_bytes=sent,
            limit_s=sent * self.seconds_per_byte if sent else None,
            nmse=done.nmse,
        )

    def time(self, contestants: Sequence[Contestant], count: int) -> None:
        """Time allreduces of this number of elements; collective."""
        data = Data(self.comm, self.mpi, count)
        time_all(contestants, data, self.request.rounds, self.request.seconds)

    def measure(self) -> list[Row]:
        """Measure every size and print its rows immediately."""
        # A row of the engine is what its title says: not float32, which the planner may prefer.
        asked = {"PLANNER": "off", "AUTOTUNE": "off", "THREADS": str(self.request.threads)}
        os.environ.update({f"QSGD_{name}": value for name, value in asked.items()})
        basics.init()
        peers = self.find_peers() if self.request.peers else []
        self.say()
        self.say(table.header())
        rows: list[Row] = []
        for size_bytes in self.request.sizes:
            count = size_bytes // FLOAT_BYTES
            contestants = self.contestants(count, peers)
            self.time(contestants, count)
            found = compare([self.row(size_bytes, done) for done in contestants])
            for number, row in enumerate(found):
                self.say(table.line(row, first=number == 0))
            rows += found
        self.say()
        for text in table.LEGEND:
            self.say(Text(text, style="dim"))
        return rows

    def find_peers(self) -> list[Contestant]:
        found, reason = gloo_peers(self.comm)
        if reason:
            self.say(f"gloo is left out: {reason}")
        return [mpi_peer(self.comm, self.mpi), *found]

    def write(self, path: Path, key: str, rows: Sequence[dict[str, Any]]) -> None:
        """Write the rows under this key, with their conditions."""
        record = {
            "mpi": self.key.mpi,
            "ranks": self.machine.ranks,
            "ranks_per_node": self.machine.ranks_per_node,
            "threads": self.key.threads,
            "bandwidth_gbps": self.request.bandwidth_gbps,
            "machine": planning.to_json(self.machine),
            key: list(rows),
        }
        self.say(table.write_json(path, record))


def fitting(algorithms: Sequence[str], coded: bool) -> list[str]:
    """Return the algorithms that compress (`coded`) or do not; auto is in both.

    Raises:
        UsageError: an unknown name.
    """
    unknown = [name for name in algorithms if name not in ALGORITHMS]
    if unknown:
        raise UsageError(f"--algorithm: {unknown[0]!r} is not one of {', '.join(ALGORITHMS)}")
    return [name for name in algorithms if name == AUTO or (name in COMPRESSED) == coded]


def check(request: Request) -> None:
    """Reject requests that cannot be measured.

    Raises:
        UsageError: an algorithm or a scheme is unknown, or none of them match.
    """
    rows = [bits for bits in request.bits if fitting(request.algorithms, bits != PLAIN_BITS)]
    if not rows:
        raise UsageError(
            f"--algorithm {','.join(request.algorithms)} suits none of --bits "
            f"{','.join(map(str, request.bits))}: {', '.join(COMPRESSED)} "
            "compress (1 to 8 bits), the others send float32 (32 bits)"
        )
    fixed = [scheme for scheme in request.schemes if not has_choice_of_bits(scheme)]
    if fixed:
        known = ", ".join(filter(has_choice_of_bits, KINDS))
        raise UsageError(f"--scheme: {fixed[0]!r} has no choice of bits; choose from {known}")
    if request.trial and not request.explain:
        raise UsageError("--trial measures the choices of --explain; add --explain")


def run(request: Request) -> None:
    """Measure on the ranks of this job; collective, rank 0 prints and writes.

    Raises:
        UsageError: the request is invalid, or there is only one rank.
    """
    from qsgd_hpc.runtime import direct, mpi_binding

    check(request)
    mpi = mpi_binding.start_mpi()
    world = mpi.module.COMM_WORLD
    if world.Get_size() == 1:
        raise UsageError(
            "one rank has nothing to reduce with; pass -np 2, or start it with mpiexec or "
            "qsgd-hpc run"
        )
    with direct.communicator(threads=request.threads) as communicator:
        bench = Bench(request, mpi, communicator)
        bench.introduce()
        if request.explain and request.trial:
            key, rows = "choices", explain.by_trial(bench)
        elif request.explain:
            key, rows = "plans", explain.by_prediction(bench)
        else:
            key, rows = "rows", [row_json(row) for row in bench.measure()]
        if request.json_path is not None and bench.is_root:
            bench.write(request.json_path, key, rows)
