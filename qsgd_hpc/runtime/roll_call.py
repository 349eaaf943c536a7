"""Report which ranks have not called ``init``, while the others wait for them inside MPI."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qsgd_hpc.runtime.job_settings import Settings, is_logged

if TYPE_CHECKING:
    from qsgd_hpc.launch.seat import Seat

__all__ = ["waiting"]


@contextlib.contextmanager
def waiting(settings: Settings, *, every_rank: bool) -> Iterator[None]:
    """Return a context in which missing ranks of the launch are reported.

    Args:
        settings: of the job; QSGD_STALL_WARNING_S and QSGD_STALL_SHUTDOWN_S also limit this wait.
        every_rank: whether all ranks of the launch must call ``init``; if not, nothing is reported.
    """
    from qsgd_hpc.launch.seat import seat_of

    seat = seat_of(os.environ) if every_rank else None
    warning_s = settings["QSGD_STALL_WARNING_S"] if is_logged("warning") else 0.0
    shutdown_s = settings["QSGD_STALL_SHUTDOWN_S"]
    if seat is None or seat.ranks < 2 or not (warning_s or shutdown_s):
        yield
        return
    watch = _watch(seat, warning_s, shutdown_s)
    try:
        yield
    finally:
        watch.end()


def _watch(seat: Seat, warning_s: float, shutdown_s: float) -> Any:
    # The core's thread needs no GIL, which MPI_Init holds while it waits.
    import qsgd_hpc._core as _core

    return _core.RollCall(
        launch=seat.launch,
        host=socket.gethostname(),
        rank=seat.rank,
        ranks=seat.ranks,
        local_rank=seat.local_rank,
        local_size=seat.local_size,
        warning_s=warning_s,
        shutdown_s=shutdown_s,
    )
