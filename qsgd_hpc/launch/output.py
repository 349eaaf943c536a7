"""The ranks' output and ends, read from mpiexec's merged stream.

Output is written by complete lines and to files; ends are explained by the first cause.
"""

from __future__ import annotations

import binascii
import json
import re
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from qsgd_hpc.errors import EXIT_RESUBMIT, UsageError
from qsgd_hpc.launch.mpi import raise_file_limit
from qsgd_hpc.launch.supervise import END, ERR, MARK, NETWORK, OUT, START

__all__ = [
    "Decoder",
    "Ended",
    "Ledger",
    "LineSink",
    "Links",
    "Output",
    "RankFiles",
    "Raw",
    "Started",
    "describe_early_end",
    "explain",
    "list_ranks",
    "status_text",
]


@dataclass(frozen=True)
class Started:
    """A rank has started on a host."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True)
class Output:
    """Bytes that a rank wrote, in order; not necessarily complete lines."""

    rank: int
    is_stderr: bool
    data: bytes


@dataclass(frozen=True)
class Ended:
    """A rank has ended: its exit code, or minus the signal that killed it."""

    rank: int
    status: int


@dataclass(frozen=True)
class Links:
    """The keeper's measurements of the hosts' links."""

    facts: dict[str, Any]


@dataclass(frozen=True)
class Raw:
    """Bytes outside of frames: mpiexec's own output."""

    data: bytes


Event = Started | Output | Ended | Links | Raw


class Decoder:
    """A decoder of one run's frames, from a byte stream that arrives in arbitrary pieces."""

    def __init__(self, token: str) -> None:
        self._mark = MARK + token.encode()
        self._head = re.compile(rb"([%b])(\d+):" % (START + OUT + ERR + END + NETWORK))
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the frames that the bytes complete."""
        data = self._rest + data
        at = 0
        while True:
            start = data.find(self._mark, at)
            if start < 0:
                break
            end = data.find(b"\n", start)
            if start > at:
                yield Raw(data[at:start])
            at = start
            if end < 0:
                break
            yield self._event(data[start : end + 1])
            at = end + 1
        # Hold back an incomplete frame, or a possible beginning of its mark.
        keep = at if data.startswith(self._mark, at) else max(at, _possible_mark(data, self._mark))
        if keep > at:
            yield Raw(data[at:keep])
        self._rest = data[keep:]

    def finish(self) -> Iterator[Event]:
        """Yield the remaining bytes at the end of the stream."""
        if self._rest:
            yield Raw(self._rest)
        self._rest = b""

    def _event(self, line: bytes) -> Event:
        head = self._head.match(line, len(self._mark))
        if head is None:
            return Raw(line)
        try:
            payload = binascii.a2b_base64(line[head.end() :])
            kind, rank = head[1], int(head[2])
            if kind == START:
                pid, _, host = payload.decode().partition(" ")
                return Started(rank, host, int(pid))
            if kind == NETWORK:
                return Links(json.loads(payload))
            if kind == END:
                return Ended(rank, int(payload))
            return Output(rank, kind == ERR, payload)
        except ValueError:
            return Raw(line)


def _possible_mark(data: bytes, mark: bytes) -> int:
    """Return the start of a truncated mark at the end of the data, else the data's length."""
    for length in range(min(len(mark) - 1, len(data)), 0, -1):
        if data.endswith(mark[:length]):
            return len(data) - length
    return len(data)


HELD_BYTES = 1 << 20  # a longer line is written in parts; the other ranks wait for its end
PROMPT_S = 0.2  # on a terminal, a partial line (progress bar, prompt) is shown after this pause
YIELD_S = 1.0  # on a terminal, a line that is incomplete for this long ends for the next rank
COLOURS = (36, 33, 35, 32, 34, 31)


class LineSink:
    """A merger of the ranks' output into one stream, which never mixes two ranks in a line.

    Bytes are not changed. A newline is added only if a rank ended within a line (or,
    on a terminal, paused within a line for a second) and another rank's line follows.

    Args:
        stream: unbuffered binary stream.
        prefix: put ``[rank] `` before every line.
        timestamps: put date and time, and the rank, before every line.
        clock: seconds, monotonic; replaced in tests.
    """

    def __init__(
        self,
        stream: BinaryIO,
        *,
        prefix: bool = False,
        timestamps: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._prefix = prefix or timestamps
        self._timestamps = timestamps
        self._tty = stream.isatty()
        self._clock = clock
        self._held: dict[int, bytearray] = {}
        self._since_s: dict[int, float] = {}
        self._open: int | None = None  # rank whose incomplete line was written last
        self._open_since_s = 0.0
        self._closed: set[int] = set()

    def write(self, owner: int, data: bytes) -> None:
        """Accept bytes from a rank (-1: mpiexec) and write complete lines."""
        self._held.setdefault(owner, bytearray()).extend(data)
        self._since_s[owner] = self._clock()
        self._closed.discard(owner)
        if self._flush(owner) and self._open is None:
            for other in [rank for rank in self._held if rank != owner]:
                self._flush(other)

    def tick(self) -> None:
        """Show partial lines on a terminal; call this several times a second."""
        if not self._tty:
            return
        now_s = self._clock()
        for owner, held in list(self._held.items()):
            if now_s - self._since_s[owner] >= PROMPT_S and self._free_for(owner):
                self._emit(owner, len(held))

    def close(self, owner: int) -> None:
        """Write a rank's last, incomplete line after its end."""
        self._closed.add(owner)
        if self._free_for(owner):
            self._emit(owner, len(self._held.get(owner, b"")))
            for other in [rank for rank in self._held if rank != owner]:
                self._flush(other)

    def finish(self) -> None:
        """Write all bytes held back."""
        for owner in list(self._held):
            self._closed.add(owner)
            self._break_line(owner)
            self._emit(owner, len(self._held[owner]))

    def _flush(self, owner: int) -> bool:
        held = self._held[owner]
        count = held.rfind(b"\n") + 1
        if owner in self._closed or len(held) - count > HELD_BYTES:
            count = len(held)
        if not count or not self._free_for(owner):
            return False
        self._emit(owner, count)
        return True

    def _free_for(self, owner: int) -> bool:
        if self._open is None or self._open == owner or self._open in self._closed:
            return True
        return self._tty and self._clock() - self._open_since_s >= YIELD_S

    def _break_line(self, owner: int) -> None:
        if self._open is not None and self._open != owner and self._held.get(owner):
            _write_all(self._stream, b"\n")
            self._open = None

    def _emit(self, owner: int, count: int) -> None:
        held = self._held.get(owner)
        if not held or not count:
            return
        self._break_line(owner)
        data = bytes(held[:count])
        del held[:count]
        if not held:  # later calls visit only ranks with bytes held back
            del self._held[owner]
        begun = self._open == owner
        _write_all(self._stream, self._labelled(owner, data, begun) if self._prefix else data)
        self._open = None if data.endswith(b"\n") else owner
        self._open_since_s = self._clock()

    def _labelled(self, owner: int, data: bytes, begun: bool) -> bytes:
        if owner < 0:
            return data
        label = b"[%d] " % owner
        if self._tty:
            label = b"\x1b[%dm[%d]\x1b[0m " % (COLOURS[owner % len(COLOURS)], owner)
        if self._timestamps:
            label = time.strftime("%Y-%m-%d %H:%M:%S ").encode() + label
        lines = _lines(data)
        return b"".join(line if begun and i == 0 else label + line for i, line in enumerate(lines))


def _lines(data: bytes) -> list[bytes]:
    """Split at newlines only: a carriage return redraws the current line."""
    parts = [part + b"\n" for part in data.split(b"\n")]
    last = parts.pop()[:-1]
    return [*parts, last] if last else parts


def _write_all(stream: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        count = stream.write(view)
        if count is None:  # a full terminal that another program has set to non-blocking
            select.select([], [stream], [])
        else:
            view = view[count:]


class RankFiles:
    """``FOLDER/rank.N/stdout`` and ``stderr``, N padded with zeros so that folders sort by rank.

    Args:
        folder: created if needed; files of an earlier run are overwritten.
        ranks: number of ranks.

    Raises:
        UsageError: the folder or a file in it cannot be written.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._files: dict[tuple[int, bool], BinaryIO] = {}
        width = len(str(ranks - 1))
        raise_file_limit(2 * ranks)
        try:
            for rank in range(ranks):
                own = folder / f"rank.{rank:0{width}}"
                own.mkdir(parents=True, exist_ok=True)
                for is_stderr, name in ((False, "stdout"), (True, "stderr")):
                    self._files[rank, is_stderr] = (own / name).open("wb", buffering=0)
        except OSError as error:
            raise UsageError(f"--output-filename {folder}: {error.strerror or error}") from None

    def write(self, rank: int, is_stderr: bool, data: bytes) -> None:
        """Append bytes that a rank wrote."""
        self._files[rank, is_stderr].write(data)

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            file.close()


_USUAL_CAUSES = {
    signal.SIGKILL: "out of memory is the usual cause; see dmesg, or ask for more memory",
    signal.SIGSEGV: "a crash in compiled code; PYTHONFAULTHANDLER=1 shows where",
    signal.SIGBUS: "a full /dev/shm or a truncated mapped file are the usual causes",
    signal.SIGABRT: "a failed check in compiled code; its message is above",
    signal.SIGILL: "code built for another kind of processor",
    signal.SIGTERM: "a user or the scheduler ended it",
    signal.SIGXCPU: "the CPU time limit",
}


# On a busy node, the report of a crash may be late: other ranks see the crashed rank's connections
# close, and their ends may be reported earlier. A crash that is reported within this time after the
# first failure is therefore taken as the cause.
_CRASHES = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
)
_CRASH_REPORT_S = 1.0
# In a RankFailedError of the other ranks. The rank that it names waits for them before it exits, so
# its end is reported after theirs.
_LEFT = re.compile(rb"\brank (\d+) left the job \(")


@dataclass
class Ledger:
    """Events of the ranks so far, in the order of arrival."""

    ranks: int
    started: dict[int, Started] = field(default_factory=dict)
    ends: list[Ended] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)  # the ranks of ends
    overdue: tuple[int, ...] = ()  # still running at the end of the grace period
    first_failure: Ended | None = None
    """The first failure, or its cause if that is reported later; None: no failure."""
    _failed_at_s: float = 0.0
    _left: int | None = None  # the rank that others name as the first to leave

    def note(self, stderr: bytes) -> None:
        """Note the rank that another one's error names as the first to leave the job."""
        if named := _LEFT.search(stderr):
            self._left = int(named[1])

    def record(self, end: Ended, now_s: float) -> None:
        """Record the end of a rank."""
        self.ends.append(end)
        self.ended.add(end.rank)
        if end.status == 0:
            return
        first = self.first_failure
        if first is None:
            self.first_failure, self._failed_at_s = end, now_s
        elif end.rank == self._left:
            self.first_failure = end
        elif first.rank == self._left:
            return
        elif now_s < self._failed_at_s + _CRASH_REPORT_S and _crashed(end) > _crashed(first):
            self.first_failure = end

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks that have started but not ended."""
        return tuple(sorted(set(self.started) - self.ended))

    def exit_code(self, mpiexec_code: int) -> int:
        """Return the first failing rank's exit code (128 + signal), else mpiexec's."""
        failure = self.first_failure
        code = mpiexec_code if failure is None else failure.status
        if code == 0 and (self.running or len(self.started) < self.ranks):
            return 1
        return code if code >= 0 else 128 - code


def _crashed(end: Ended) -> bool:
    return -end.status in _CRASHES


def status_text(status: int) -> str:
    """Return a description of how a process ended."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    cause = _USUAL_CAUSES.get(-status)  # type: ignore[call-overload]
    return f"was killed by {name}" + (f" ({cause})" if cause else "")


def list_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 1, 3``; for 17 or more, the number and the first few."""
    numbers = list(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 16:
        return f"{len(numbers)} ranks ({', '.join(map(str, numbers[:8]))}, ...)"
    return f"ranks {', '.join(map(str, numbers))}"


def describe_early_end(ledger: Ledger, waited_s: float) -> str:
    """Return the warning about ranks that still run long after the first one has succeeded."""
    first, running = ledger.ends[0], ledger.running
    verb, them = ("runs", "it waits") if len(running) == 1 else ("run", "they wait")
    return (
        f"warning: rank {first.rank} exited with code 0 {waited_s:g} s ago, but "
        f"{list_ranks(running)} still {verb}. If {them} for it, in init_process_group() or in a "
        f"collective, end the run (Ctrl-C), and let all ranks execute the same steps"
    )


def explain(ledger: Ledger, mpiexec_code: int, grace_s: float) -> str | None:
    """Return the message about a failed run; None if every rank succeeded."""
    failure = ledger.first_failure
    if failure is None:
        return _explain_without_cause(ledger, mpiexec_code)
    if stopped_at_checkpoint(ledger):
        return f"the training stopped at a checkpoint (exit code {EXIT_RESUBMIT})"
    start = ledger.started.get(failure.rank)
    where = f" on host {start.host} (pid {start.pid})" if start else ""
    text = f"rank {failure.rank}{where} {status_text(failure.status)}"
    failed = {end.rank for end in ledger.ends if end.status != 0} - {failure.rank}
    followers = sorted((failed | set(ledger.running)) - set(ledger.overdue))
    if followers:
        text += f"; {list_ranks(followers)} ended after it"
    if ledger.overdue:
        were = "were" if len(ledger.overdue) > 1 else "was"
        text += f"; {list_ranks(ledger.overdue)} {were} still running {grace_s:g} s later and "
        text += f"{were} ended"
    return text


def stopped_at_checkpoint(ledger: Ledger) -> bool:
    """Return whether every rank has ended, and some by ``exit_for_resubmit``."""
    codes = {end.status for end in ledger.ends}
    return EXIT_RESUBMIT in codes and codes <= {0, EXIT_RESUBMIT} and not ledger.running


def _explain_without_cause(ledger: Ledger, mpiexec_code: int) -> str | None:
    absent = sorted(set(range(ledger.ranks)) - set(ledger.started))
    how = "ended" if mpiexec_code == 0 else f"mpiexec {status_text(mpiexec_code)}"
    if absent and not ledger.started:
        return f"{how} before any rank had started; its message is above"
    if ledger.running:
        hosts = sorted({ledger.started[rank].host for rank in ledger.running})
        return (
            f"{how} while {list_ranks(ledger.running)} ran on {', '.join(hosts)}: a rank called "
            "MPI_Abort (its message is above), or the connection to a host was lost"
        )
    if absent:
        return f"{list_ranks(absent)} never started; {how}"
    return None if mpiexec_code == 0 else how
