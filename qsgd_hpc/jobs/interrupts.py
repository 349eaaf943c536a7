"""Steps that Ctrl-C must not interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from qsgd_hpc._notices import tell

__all__ = ["interrupts_deferred"]


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM until the end of the block.

    An interrupted submission could leave a job that is not recorded. Other threads than the main
    one get no signals, so there is nothing to defer in them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def defer(number: int, _frame: FrameType | None) -> None:
        if not arrived:
            tell(
                "this ends when the current submission is complete; interrupting it could "
                "leave a job that is not recorded"
            )
        arrived.append(number)

    before = {number: signal.signal(number, defer) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for first in arrived[:1]:
            signal.raise_signal(first)
