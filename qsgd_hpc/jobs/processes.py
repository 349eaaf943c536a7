"""Identify processes, although their numbers are reused, and end process trees."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from qsgd_hpc.launch.supervise import catches, runs_a_job

__all__ = ["adopt_orphans", "alive", "end_all", "identity", "members"]

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
KILL_GRACE_S = 5.0  # between SIGTERM and SIGKILL
STOP_S = 33.0  # the same while ranks of a job handle SIGTERM; the launcher ends them after 32


def identity(pid: int) -> str | None:
    """Return text that identifies this process uniquely, or None if it has ended.

    The number of a process is reused after some time and after a reboot; its start time
    together with the boot id is not.
    """
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{fields[19]}"


def alive(pid: int | None, known_identity: str | None) -> bool:
    """Return whether the process with this identity still runs."""
    return pid is not None and known_identity is not None and identity(pid) == known_identity


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; the name before may hold any text."""
    try:
        return (_PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent dies, so that :func:`members` finds it.

    Launchers put ranks into separate sessions, which a signal to the job's group does not reach.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def members(root: int, *, session: bool = False) -> list[int]:
    """Return the living descendants of ``root``; with ``session``, the members of its session."""
    children: dict[int, list[int]] = {}
    same: list[int] = []
    for entry in _PROC.glob("[0-9]*"):
        pid = int(entry.name)
        fields = _stat(pid)
        if not fields or fields[0] in "ZX":
            continue
        children.setdefault(int(fields[1]), []).append(pid)
        if int(fields[3]) == root:
            same.append(pid)
    if session:
        return same
    found: list[int] = []
    queue = [root]
    while queue:
        below = [pid for pid in children.get(queue.pop(), []) if not runs_a_job(pid)]
        found += below
        queue += below
    return found


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_all(root: int, *, session: bool = False, handlers_s: float = KILL_GRACE_S) -> None:
    """End every member (see :func:`members`): SIGTERM, five seconds of grace, SIGKILL.

    Members are searched repeatedly, so that processes left by a dying launcher are also found.

    Args:
        root: process whose members end.
        session: whether they are the members of its session.
        handlers_s: grace while a member has a handler for SIGTERM.
    """
    _send(members(root, session=session), signal.SIGTERM)
    begun_s = time.monotonic()
    while left := members(root, session=session):
        spent_s = time.monotonic() - begun_s
        if spent_s > max(handlers_s, KILL_GRACE_S) + KILL_GRACE_S:
            break  # stuck in the kernel; nothing more can be done
        if spent_s > (handlers_s if any(_handles(pid, root) for pid in left) else KILL_GRACE_S):
            _send(left, signal.SIGKILL)
        _reap(root)
        time.sleep(0.05)
    _reap(root)


def _handles(pid: int, root: int) -> bool:
    """Return whether a process below the job's script, which has a trap, handles SIGTERM."""
    fields = _stat(pid)
    return fields is not None and int(fields[1]) != root and catches(pid, signal.SIGTERM)


def _reap(root: int) -> None:
    """Reap ended children, so that they do not remain as zombies."""
    with suppress(ChildProcessError):
        while root == os.getpid() and os.waitpid(-1, os.WNOHANG)[0]:
            pass
