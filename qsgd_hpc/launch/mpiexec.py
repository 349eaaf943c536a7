"""Set-up of an mpiexec process, for both the launcher and the keeper of emulated hosts."""

from __future__ import annotations

import ctypes
import signal

__all__ = ["end_with_parent", "prepare_mpiexec"]

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def prepare_mpiexec() -> None:
    """Prepare a forked process for the exec of mpiexec."""
    # The ranks' supervisors inherit this: MPICH's mpiexec reports a death by SIGUSR1, which may
    # arrive before a supervisor has a handler.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    end_with_parent()
