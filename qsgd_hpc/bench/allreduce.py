"""``qsgd-hpc bench allreduce`` on the ranks of a launched job, and the plans of ``--explain``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from qsgd_hpc import __version__
from qsgd_hpc.bench import table
from qsgd_hpc.bench.contestants import (
    Contestant,
    Data,
    engine,
    gloo_peers,
    mpi_peer,
    ours,
    time_all,
    title,
)
from qsgd_hpc.bench.table import Row, Timing, compare, row_json
from qsgd_hpc.bench.words import AUTO, FLOAT_BYTES, PLAIN_BITS, size_text, time_text
from qsgd_hpc.compression import KINDS, has_choice_of_bits
from qsgd_hpc.env import ALGORITHMS, COMPRESSED
from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics, planning

if TYPE_CHECKING:
    from qsgd_hpc._core import CodecSpec, Coding, Machine

__all__ = ["Choice", "Request", "Verdict", "judge", "run"]


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
            return open_codes()
        if bits == PLAIN_BITS:
            return []
        return [spec_of(int(bits), scheme) for scheme in self.request.schemes]

    def planned(self, count: int) -> Contestant:
        """Return the planner's choice for a number of elements."""
        plan = plan_of(self.machine, count, self.codecs(AUTO))
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
        spec, training = spec_of(bits, scheme), coding_of(bits, scheme)
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
        # An engine has its settings from the environment, and this process only measures.
        threads = str(self.request.threads)
        os.environ.update(QSGD_PLANNER="off", QSGD_AUTOTUNE="off", QSGD_THREADS=threads)
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


FAR = 3.0
"""Choices predicted slower than the fastest by more than this factor are not measured."""
CHOICE_COLUMNS = (("size", 8), ("code", 8), ("algorithm", 18), ("predicted", 9), ("measured", 9))
ERROR_WIDTH = 6
CHOICE_LEGEND = (
    "predicted: the planner's estimate from measurements of the machine",
    "error: measured / predicted - 1; planned: the planner's choice among these rows",
)


@dataclass(frozen=True)
class Choice:
    """One way to reduce one size."""

    code: str
    """Such as "fp32" or "4 bit"."""
    algorithm: str
    predicted_s: float
    measured_s: float | None = None
    """Median; None if it was not tried, because its prediction was much slower."""
    planned: bool = False


@dataclass(frozen=True)
class Verdict:
    """The quality of the plan at one size."""

    planned: Choice
    fastest: Choice
    """The fastest of the measured choices."""

    @property
    def miss(self) -> float:
        """Extra time of the plan relative to the fastest choice; 0 if it is the fastest."""
        assert self.planned.measured_s is not None
        assert self.fastest.measured_s is not None
        return self.planned.measured_s / self.fastest.measured_s - 1


def judge(choices: Sequence[Choice]) -> Verdict:
    """Compare the plan with the fastest choice; the plan must have been measured."""
    tried = [choice for choice in choices if choice.measured_s is not None]
    (planned,) = [choice for choice in tried if choice.planned]
    return Verdict(planned, min(tried, key=lambda choice: choice.measured_s or 0.0))


def choice_header() -> Text:
    """Return the names of the columns."""
    names = [f"{name:>{width}}" for name, width in CHOICE_COLUMNS]
    names[1:3] = [f"{name:<{width}}" for name, width in CHOICE_COLUMNS[1:3]]
    return Text("  ".join([*names, f"{'error':>{ERROR_WIDTH}}"]), style="bold")


def choice_lines(size_bytes: int, choices: Sequence[Choice]) -> list[Text]:
    """Return the rows of one size, the fastest first, untried ones last."""
    verdict = judge(choices)
    ordered = sorted(choices, key=lambda c: (c.measured_s is None, c.measured_s or c.predicted_s))
    found = [
        _choice_line(size_text(size_bytes) if number == 0 else "", choice, verdict)
        for number, choice in enumerate(ordered)
    ]
    return [*found, Text(f"{'':>10}{_sentence(verdict)}", style="italic"), Text()]


def _choice_line(size: str, choice: Choice, verdict: Verdict) -> Text:
    measured = "-" if choice.measured_s is None else time_text(choice.measured_s)
    error = choice.measured_s and f"{choice.measured_s / choice.predicted_s - 1:+.0%}"
    mark = "  planned" if choice is verdict.planned else ""
    cells = (
        f"{size:>8}  {choice.code:<8}  {choice.algorithm:<18}  "
        f"{time_text(choice.predicted_s):>9}  {measured:>9}  {error or '-':>{ERROR_WIDTH}}{mark}"
    )
    return Text(cells, style="green" if mark else "dim" if choice.measured_s is None else "")


def _sentence(verdict: Verdict) -> str:
    planned = f"{verdict.planned.code} by {verdict.planned.algorithm}"
    if verdict.planned is verdict.fastest:
        return f"planned: {planned}, which is the fastest"
    fastest = f"{verdict.fastest.code} by {verdict.fastest.algorithm}"
    return f"planned: {planned}, {verdict.miss:.1%} behind the fastest, {fastest}"


def choice_json(size_bytes: int, choice: Choice) -> dict[str, Any]:
    """Return a choice in its JSON form; times in seconds."""
    return {"size_bytes": size_bytes, **asdict(choice)}


def coding_of(bits: int, scheme: str, *, lasting: bool = True) -> Coding:
    """Return the coding for a number of bits, with bucket and norm from the environment.

    Args:
        bits: 1 to 8.
        scheme: a code with a choice of bits.
        lasting: as in training, with error feedback if training uses it; else each call separately.
    """
    return KINDS[scheme](bits).coding(lasting=lasting)  # type: ignore[call-arg]


def spec_of(bits: int, scheme: str) -> CodecSpec:
    """Return the code of a separate call."""
    return coding_of(bits, scheme, lasting=False).spec


def open_codes() -> list[CodecSpec]:
    """Return the codes between which ``Compression.auto()`` chooses."""
    from qsgd_hpc import _core

    return _core.open_codes(spec_of(8, "qsgd"), any_code=True)


def plan_of(machine: Machine, count: int, codecs: Sequence[CodecSpec]) -> Any:
    """Return the plan for a message with one tensor, in one of these codes or as float32."""
    from qsgd_hpc import _core

    return _core.plan(machine, count=count, codecs=codecs, any_algorithm=True)


def by_prediction(bench: Bench) -> list[dict[str, Any]]:
    """Print the plan of each size and number of bits, not measured; return them in JSON form."""
    plans = []
    for size_bytes in bench.request.sizes:
        for codecs in _alternatives(bench):
            found = plan_of(bench.machine, size_bytes // FLOAT_BYTES, codecs)
            bench.say(f"{size_text(size_bytes):>8}  {found.algorithm:18}  {found.reason}")
            plans.append(
                {
                    "size_bytes": size_bytes,
                    "code": title(found.spec),
                    "algorithm": found.algorithm,
                    "predicted_s": found.seconds,
                    "reason": found.reason,
                }
            )
    return plans


def _alternatives(bench: Bench) -> Iterator[list[CodecSpec]]:
    """Yield the codes of each plan: all open ones for auto, else each separately."""
    for bits in bench.request.bits:
        codecs = bench.codecs(bits)
        yield from [codecs] if bits in (AUTO, PLAIN_BITS) else [[spec] for spec in codecs]


def by_trial(bench: Bench) -> list[dict[str, Any]]:
    """Print every choice of each size, predicted and measured; return them in JSON form."""
    found: list[dict[str, Any]] = []
    bench.say()
    bench.say(choice_header())
    for size_bytes in bench.request.sizes:
        tried = _try_out(bench, size_bytes // FLOAT_BYTES)
        for row in choice_lines(size_bytes, tried):
            bench.say(row)
        found += [choice_json(size_bytes, choice) for choice in tried]
    for text in CHOICE_LEGEND:
        bench.say(Text(text, style="dim"))
    return found


def _ways(bench: Bench, count: int) -> list[tuple[CodecSpec | None, Choice]]:
    """Return all choices of the planner for a number of elements, each with its code."""
    from qsgd_hpc import _core

    machine, bits = bench.machine, bench.request.bits
    planned = plan_of(machine, count, [spec for b in bits for spec in bench.codecs(b)])
    asked: list[CodecSpec | None] = []
    for b in bits:
        plain = [None] if b in (AUTO, PLAIN_BITS) else []
        asked += [spec for spec in (*plain, *bench.codecs(b)) if spec not in asked]
    if planned.spec not in asked:  # the planner may decline all codes
        asked.insert(0, planned.spec)
    found = []
    for spec in asked:
        for name in machine.known(compressed=spec is not None):
            choice = Choice(
                code=title(spec),
                algorithm=name,
                predicted_s=_core.allreduce_s(machine, algorithm=name, count=count, coding=spec),
                planned=(name, spec) == (planned.algorithm, planned.spec),
            )
            found.append((spec, choice))
    return found


def _try_out(bench: Bench, count: int) -> list[Choice]:
    """Return the choices of a size with their measured times; collective."""
    ways = _ways(bench, count)
    longest_s = FAR * min(choice.predicted_s for _, choice in ways)
    tried = [way for way in ways if way[1].planned or way[1].predicted_s <= longest_s]
    contestants = [ours(bench.communicator, spec, choice.algorithm) for spec, choice in tried]
    bench.time(contestants, count)
    measured = [
        replace(choice, measured_s=Timing.of(contestant.seconds).median_s)
        for (_, choice), contestant in zip(tried, contestants, strict=True)
    ]
    return measured + [way[1] for way in ways if way not in tried]


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
            key, rows = "choices", by_trial(bench)
        elif request.explain:
            key, rows = "plans", by_prediction(bench)
        else:
            key, rows = "rows", [row_json(row) for row in bench.measure()]
        if request.json_path is not None and bench.is_root:
            bench.write(request.json_path, key, rows)
