"""Which gradients are ready to be reduced, and which reductions are under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from qsgd_hpc.errors import UsageError

__all__ = ["PendingGradients"]


class PendingGradients:
    """Counts backward passes per parameter and keeps the handles of started reductions.

    Args:
        keys: one per parameter, in an order that is equal on every rank.
        passes: backward passes whose gradients add up before one reduction.
        start: starts the reduction of a parameter's gradient and returns its handle.
    """

    def __init__(self, keys: Iterable[Any], *, passes: int, start: Callable[[Any], Any]) -> None:
        if passes < 1:
            raise UsageError(f"backward_passes_per_step={passes}: choose at least 1")
        self._keys = list(keys)
        self._passes = passes
        self._start = start
        self._seen = dict.fromkeys(self._keys, 0)
        self._handles: dict[Any, Any] = {}

    def ready(self, key: Any) -> None:
        """Note that a backward pass has completed this parameter's gradient.

        Raises:
            UsageError: more backward passes than promised since the last step.
        """
        self._seen[key] += 1
        if self._seen[key] > self._passes:
            raise UsageError(
                f"a gradient was computed {self._seen[key]} times since the last step(), but "
                f"backward_passes_per_step is {self._passes}; call optimizer.step() (or "
                "synchronize()) in between, or pass the number of passes to DistributedOptimizer"
            )
        if self._seen[key] == self._passes:
            self._handles[key] = self._start(key)

    def finish(self, missing: Callable[[Any], None]) -> None:
        """Start what no backward pass has started, then wait for everything.

        ``missing(key)`` is called for a parameter without a gradient on this rank (an unused
        branch of the model): other ranks may have one, so it must take part with zeros.
        """
        try:
            for key in self._keys:
                if key not in self._handles:
                    missing(key)
                    self._handles[key] = self._start(key)
            for handle in self._handles.values():
                handle.wait()
        finally:
            self.reset()

    @property
    def any(self) -> bool:
        """Whether a reduction has started that nobody has waited for."""
        return bool(self._handles)

    def reset(self) -> None:
        """Forget all handles and counts."""
        self._handles.clear()
        self._seen = dict.fromkeys(self._keys, 0)
