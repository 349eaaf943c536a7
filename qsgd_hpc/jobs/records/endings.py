"""Descriptions of how jobs ended, and the failed nodes and ranks named in a job's output."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from qsgd_hpc.errors import EXIT_RESUBMIT

__all__ = [
    "NOT_MET",
    "NO_MEMORY",
    "PREEMPTED",
    "WALLTIME",
    "dead_node",
    "exit_words",
    "first_failed_rank",
    "node_words",
]

NOT_MET = "a job that it waited for did not complete"
NO_MEMORY = (
    "a node ran out of memory: use fewer --ranks-per-node, more --nodes or a smaller batch, or "
    "request more memory"
)
PREEMPTED = (
    "preempted by a job of higher priority: submit it again, or use --requeue to make "
    "the scheduler do so"
)
WALLTIME = "ended at its walltime: use a longer --walltime, or make it stop at a checkpoint"


def exit_words(code: int) -> str:
    """Return the cause for an exit code of the script; 128 + n stands for signal n."""
    if code == EXIT_RESUBMIT:
        return "it stopped at a checkpoint and asks to be submitted again"
    try:
        return f"ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"the script ended with exit code {code}"


def node_words(nodes: tuple[str, ...]) -> str:
    """Return why a job whose nodes failed ended; () if the nodes are unknown."""
    if not nodes:
        return "a node of the job failed"
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)} failed"


TAIL_BYTES = 65_536
# The MoM of the first node detects that another one no longer answers, writes that into the job's
# output and ends the job by SIGTERM. qstat then reports only that a signal ended the script.
# OpenPBS and Torque write "job die" or "job terminate". Code 1000 is a sister's own request to end
# the job, for a limit that it has exceeded on that node.
_DEAD = re.compile(
    r"=>> PBS: job killed: node \d+ \(([^()\s]+)\) requested job (?:die|terminate)\b"
    r"(?!.{0,40}?code 1000\b)"
)
# srun ends the others when one rank has failed (--kill-on-bad-exit), and reports each end.
_BY_SRUN = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+?)\s*$", re.MULTILINE)
_EXITED = re.compile(r"Exited with exit code (\d+)")


def dead_node(log: Path) -> str | None:
    """Return the failed node that PBS reports at the end of a job's output, or None."""
    found = _DEAD.findall(_tail(log))
    return found[-1] if found else None


def first_failed_rank(log: Path) -> tuple[int, str] | None:
    """Return exit code and cause of the first failure that srun reports, unless by a signal."""
    first = _BY_SRUN.search(_tail(log))
    code = first and _EXITED.fullmatch(first[3])
    if not first or not code:
        return None
    ranks = f"rank{'' if first[2].isdigit() else 's'} {first[2]}"
    return int(code[1]), f"{ranks} on {first[1]} ended with exit code {code[1]}; see the log"


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
