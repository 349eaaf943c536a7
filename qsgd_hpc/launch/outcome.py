"""Outcome of a run, and its first cause: pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from qsgd_hpc.errors import EXIT_RESUBMIT
from qsgd_hpc.launch.output import Ended, Started

__all__ = ["Ledger", "describe_early_end", "explain", "list_ranks", "status_text"]

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
        return tuple(sorted(set(self.started) - {end.rank for end in self.ends}))

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
