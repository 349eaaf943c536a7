"""Stop a training at a checkpoint before its job is ended.

    for step in range(first, last):
        train(step)
        if qsgd_hpc.should_stop():
            save(step)
            qsgd_hpc.exit_for_resubmit()

A job of ``qsgd-hpc submit`` knows when its walltime is near (``$QSGD_JOB_DIR/stop_at``), and can be
asked to stop (``$QSGD_JOB_DIR/stop``: ``qsgd-hpc cancel --at-checkpoint``, or SIGUSR1 to the job
script). SIGTERM, which schedulers send before they preempt a job, is a stop request, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np

from qsgd_hpc import env
from qsgd_hpc.errors import EXIT_RESUBMIT
from qsgd_hpc.runtime import basics, ops

__all__ = ["EXIT_RESUBMIT", "exit_for_resubmit", "should_stop"]

# A scheduler that signals every process of a job signals the launcher too, which passes it on.
SAME_SIGNAL_S = 1.0
LOOK_EVERY_S = 2.0  # a parallel file system should not be asked at every step


class _Watch:
    """The stop requests that this process has seen."""

    def __init__(self) -> None:
        self.wanted = False
        self._told_s: float | None = None
        self._look_at_s = 0.0
        self._listens = False

    def look(self, folder: Path | None) -> bool:
        """Return whether to stop; checks the file system periodically."""
        self._listen()
        if self.wanted or folder is None or time.monotonic() < self._look_at_s:
            return self.wanted
        self._look_at_s = time.monotonic() + LOOK_EVERY_S
        self.wanted = (folder / "stop").exists() or time.time() >= _stop_at(folder)
        return self.wanted

    def _listen(self) -> None:
        """Take the first SIGTERM as a stop request, unless the script has its own handler."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._told_s is None:
            self.wanted, self._told_s = True, time.monotonic()
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _STOPPING)
        elif time.monotonic() > self._told_s + SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process
            os.kill(os.getpid(), number)


_STOPPING = b"qsgd-hpc: SIGTERM; stopping at the next checkpoint\n"
_watch = _Watch()


def _stop_at(folder: Path) -> float:
    try:
        return float((folder / "stop_at").read_text())
    except (OSError, ValueError):
        return float("inf")


def should_stop() -> bool:
    """Return whether to write a checkpoint and exit with code 85 now; equal on all ranks.

    Collective if the job has more than one rank: every rank must call it at the same step. It costs
    one small allreduce; in a loop of very short steps, call it only at every tenth step. Without
    ``hvd.init()``, and outside of a job, it checks this process only.

    Raises:
        RankFailedError: a rank has died.
    """
    initialised = basics.is_initialized()
    folder = env.get("QSGD_JOB_DIR")
    # One rank looks, so that thousands do not ask the file system for the same two files.
    looks = folder is not None and (not initialised or basics.rank() == 0)
    wanted = _watch.look(Path(folder) if looks else None)
    if not initialised or basics.size() == 1:
        return wanted
    flag = np.array([wanted], np.int32)
    buffer = ops.Buffer(flag.ctypes.data, flag.shape, "int32", flag)
    ops.allreduce(
        buffer, buffer, name="qsgd_hpc.should_stop", op=ops.Max, result=lambda: None
    ).wait()
    return bool(flag[0])


def exit_for_resubmit() -> NoReturn:
    """End this rank, after all ranks have called this, so that the job is submitted again.

    ``sys.exit(85)`` has the same effect if the launcher returns the exit code. Many launchers kill
    the other ranks when the first ends with a code other than 0, and report the kill instead.
    Therefore one rank first leaves a note for the job script.

    Raises:
        SystemExit: with code 85.
    """
    together = basics.is_initialized() and basics.size() > 1
    if together:
        ops.barrier()
    folder = env.get("QSGD_JOB_DIR")
    if folder is not None and (not basics.is_initialized() or basics.rank() == 0):
        with contextlib.suppress(OSError):  # the exit code is left to tell
            Path(folder, "resubmit").touch()
    if together:
        ops.barrier()
    sys.exit(EXIT_RESUBMIT)
