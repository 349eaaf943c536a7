"""Notices of a command to its user; silent in a library without a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["listening", "muted", "tell"]

_Listener = Callable[[str], object]
_LISTENER: ContextVar[_Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: _Listener | None) -> Iterator[None]:
    """Have a function called with each notice within the block."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def muted(yes: bool) -> Iterator[None]:
    """Drop notices within the block: what they say has been told already."""
    with listening(None if yes else _LISTENER.get()):
        yield


def tell(text: str) -> None:
    """Pass on a notice: one sentence, lower case, without its end."""
    if (listener := _LISTENER.get()) is not None:
        listener(text)
