"""Stop a training at a checkpoint before its job is ended.

    for step in range(first, last):
        train(step)
        if qsgd_hpc.should_stop():
            save(step)
            qsgd_hpc.exit_for_resubmit()

A job of ``qsgd-hpc submit`` has the time at which to stop before its walltime ends
(``$QSGD_JOB_DIR/stop_at``), and can be requested to stop earlier (``$QSGD_JOB_DIR/stop``, created
by ``qsgd-hpc cancel --at-checkpoint``, or after SIGUSR1 to the job script). SIGTERM, which
schedulers send before they preempt a job, is also a stop request.
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

# Two signals within this time count as one: a scheduler may signal every process of a job,
# including the launcher, which forwards the signal.
SAME_SIGNAL_S = 1.0
CHECK_EVERY_S = 2.0  # spares a parallel file system a request per step


class _Watch:
    """The stop requests that this process has seen."""

    def __init__(self) -> None:
        self.wanted = False
        self._signal_s: float | None = None
        self._next_check_s = 0.0
        self._listens = False

    def look(self, folder: Path | None) -> bool:
        """Return whether to stop; checks the file system periodically."""
        self._listen()
        if self.wanted or folder is None or time.monotonic() < self._next_check_s:
            return self.wanted
        self._next_check_s = time.monotonic() + CHECK_EVERY_S
        self.wanted = (folder / "stop").exists() or time.time() >= _stop_at(folder)
        return self.wanted

    def _listen(self) -> None:
        """Treat the first SIGTERM as a stop request, unless the script has its own handler."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal_s is None:
            self.wanted, self._signal_s = True, time.monotonic()
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _STOPPING)
        elif time.monotonic() > self._signal_s + SAME_SIGNAL_S:
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
    # Only rank 0 reads the files, so that thousands of ranks do not load the file system.
    looks = folder is not None and (not initialised or basics.rank() == 0)
    wanted = _watch.look(Path(folder) if looks else None)
    if not initialised or basics.size() == 1:
        return wanted
    flag = np.array([wanted], np.int32)
    ops.reduce_array(flag, "qsgd_hpc.should_stop", ops.Max)
    return bool(flag[0])


def exit_for_resubmit() -> NoReturn:
    """End this rank, after all ranks have called this, so that the job is submitted again.

    ``sys.exit(85)`` has the same effect if the launcher returns the exit code. Many launchers kill
    the other ranks when the first ends with a code other than 0, and return that of the kill.
    Therefore, one rank first creates the file ``resubmit`` for the job script.

    Raises:
        SystemExit: with code 85.
    """
    together = basics.is_initialized() and basics.size() > 1
    if together:
        ops.barrier()
    folder = env.get("QSGD_JOB_DIR")
    if folder is not None and (not basics.is_initialized() or basics.rank() == 0):
        with contextlib.suppress(OSError):  # the exit code alone may suffice
            Path(folder, "resubmit").touch()
    if together:
        ops.barrier()
    sys.exit(EXIT_RESUBMIT)
