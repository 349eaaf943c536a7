"""Which gradients are ready to be reduced, and which reductions are under way."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from qsgd_hpc.errors import HorovodInternalError, UsageError

__all__ = ["PendingGradients"]


class PendingGradients:
    """Counts backward passes per parameter and keeps the handles of started reductions.

    Args:
        passes: backward passes whose gradients add up before one reduction.
        start: starts the reduction of a parameter's gradient and returns its handle.
    """

    def __init__(self, *, passes: int, start: Callable[[Any], Any]) -> None:
        if passes < 1:
            raise UsageError(f"backward_passes_per_step={passes}: choose at least 1")
        self._passes = passes
        self._start = start
        self._seen: dict[Hashable, int] = {}
        self._handles: dict[Any, Any] = {}

    def ready(self, key: Hashable) -> None:
        """Note that a backward pass has completed this parameter's gradient.

        Raises:
            UsageError: more backward passes than promised since the last step.
        """
        seen = self._seen.get(key, 0) + 1
        if seen > self._passes:
            raise UsageError(
                f"a gradient was computed {seen} times since the last step(), but "
                f"backward_passes_per_step is {self._passes}; call optimizer.step() (or "
                "synchronize()) in between, or pass the number of passes to DistributedOptimizer"
            )
        self._seen[key] = seen
        if seen == self._passes:
            self._handles[key] = self._start(key)

    def finish(self, keys: list[Any], missing: Callable[[Any], None]) -> None:
        """Start what no backward pass has started, then wait for everything.

        Args:
            keys: all parameters that take part, in an order that is equal on every rank.
            missing: called for a parameter whose reduction no backward pass has started (an
                unused branch of the model): other ranks may have a gradient, so this one takes
                part, with zeros if it has none.
        Raises:
            HorovodInternalError: the first reduction that failed; all were waited for.
        """
        failure: HorovodInternalError | None = None
        try:
            for key in keys:
                if key not in self._handles:
                    missing(key)
                    self._handles[key] = self._start(key)
            for handle in self._handles.values():
                try:
                    handle.wait()
                except HorovodInternalError as error:
                    failure = failure or error
        finally:
            self._handles.clear()
            self._seen.clear()
        if failure is not None:
            raise failure

    @property
    def any(self) -> bool:
        """Whether a reduction has started that nobody has waited for."""
        return bool(self._handles)
