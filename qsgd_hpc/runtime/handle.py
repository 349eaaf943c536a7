"""Handles: callers wait on one pending operation, or on several that belong together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from qsgd_hpc.errors import NonFiniteGradientError

__all__ = ["Handle"]

_PENDING = object()


class Handle:
    """An operation in flight.

    The core keeps the tensors until the operation is done, so a handle can be dropped.

    Args:
        cores: the core's handles; the operation is done when all of them are.
        result: creates the result, once, after all have succeeded.
    """

    def __init__(self, cores: Sequence[Any], result: Callable[[], Any]) -> None:
        self._cores = tuple(cores)
        self._make = result
        self._result: Any = _PENDING
        self._lock = threading.Lock()

    @classmethod
    def together(cls, handles: Sequence[Handle]) -> Handle:
        """Return one handle for several, whose result is the list of theirs."""
        cores = [core for handle in handles for core in handle._cores]
        return cls(cores, lambda: [handle._value() for handle in handles])

    def done(self) -> bool:
        """Return whether ``wait`` would return immediately."""
        return all(core.done() for core in self._cores)

    def wait(self) -> Any:
        """Return the result; every call returns the same.

        Raises:
            NonFiniteGradientError: a gradient is not finite. Its reduction is still delivered:
                it is not finite on any rank, so all ranks can continue equally.
            HorovodInternalError: the ranks disagree, or a rank died.
        """
        not_finite: NonFiniteGradientError | None = None
        for core in self._cores:
            try:
                core.wait()
            except NonFiniteGradientError as error:
                not_finite = not_finite or error
        value = self._value()
        if not_finite is not None:
            raise not_finite
        return value

    def __call__(self) -> Any:
        """Return the result: in Horovod the handle of a sparse allreduce is a function."""
        return self.wait()

    def _value(self) -> Any:
        with self._lock:  # a callback and the script may call this concurrently
            if self._result is _PENDING:
                self._result = self._make()
                del self._make  # frees the tensors that only it referenced
        return self._result

    def then(self, convert: Callable[[Any], Any]) -> Handle:
        """Return this handle with its result converted; call it before the first wait."""
        make = self._make
        self._make = lambda: convert(make())
        return self

    def add_done_callback(self, call: Callable[[Handle], object]) -> None:
        """Call ``call(handle)`` when the operation has ended, or immediately if it has.

        It runs on the engine's thread and blocks it: be brief, and do not wait for another
        operation there. An exception is reported and dropped.
        """
        left = len(self._cores)
        if not left:
            call(self)
            return
        lock = threading.Lock()

        def core_done() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                call(self)

        for core in self._cores:
            core.add_done_callback(core_done)

    def future(self) -> Future[Any]:
        """Return a ``concurrent.futures.Future`` of the result, for asyncio and thread pools."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def complete(handle: Handle) -> None:
            try:
                future.set_result(handle.wait())
            except Exception as error:
                future.set_exception(error)

        self.add_done_callback(complete)
        return future
