"""Messages to users: notices of a command, for its listener, and lines that a rank prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["listening", "muted", "report", "tell", "warn"]

_Listener = Callable[[str], object]
_LISTENER: ContextVar[_Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: _Listener | None) -> Iterator[None]:
    """Call ``listener`` with each notice within the block; None drops notices."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def muted(yes: bool) -> Iterator[None]:
    """Drop notices within the block if ``yes``, because they would be repetitions."""
    with listening(None if yes else _LISTENER.get()):
        yield


def tell(text: str) -> None:
    """Pass a notice to the listener: one sentence, in lower case, without a full stop."""
    if (listener := _LISTENER.get()) is not None:
        listener(text)


def report(text: str) -> None:
    """Print a line on this process's standard error, at once."""
    print(f"qsgd-hpc: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning; unlike one of Python, it cannot become an error on one rank (-W error)."""
    report(f"warning: {text}")
