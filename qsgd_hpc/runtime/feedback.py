"""Save and restore the state of compression: the residuals, and the position in the noise."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.objects import broadcast_object

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# What `from ... import *` adds to every framework module; elastic training uses more of this one.
__all__ = [
    "error_feedback_state",
    "load_error_feedback_state",
    "load_rounding_state",
    "rounding_state",
]

_PREFIX = "allreduce."
_OF_SET = re.compile(r"set(\d+)/")
_loads = 0  # number of calls of load_error_feedback_state
# Residuals without an owner: their job, the value of _loads when they were last used, their names.
_ownerless: list[tuple[weakref.ref[basics.Context], int, frozenset[str]]] = []


def error_feedback_state() -> dict[str, NDArray[np.float32]]:
    """Return the residuals of error feedback; every rank must call it, between two steps.

    Save it in a checkpoint, so that a training on any number of ranks resumes without loss.

    Returns:
        by tensor name, float32 of shape (elements,): the accumulated error of all reductions so
        far, in units of a result. Names of tensors of process set 1 begin with ``set1/``. The same
        on every rank. Empty without error feedback.
    Raises:
        UsageError: reductions are in flight.
    """
    return sum_of_shares(own_shares())


Shares = dict[int, "dict[str, NDArray[np.float32]]"]
"""A rank's part of the residuals, by the process set's number and the operation's name."""


def own_shares() -> Shares:
    """Return a copy of this rank's part of the residuals; not collective.

    Raises:
        UsageError: reductions are in flight.
    """
    engine = basics.context().engine
    return {
        number: {name: engine.owed_share(name, number) for name in engine.owed_counts(number)}
        for number in _sets()
    }


def sum_of_shares(shares: Shares) -> dict[str, NDArray[np.float32]]:
    """Return the residuals as :func:`error_feedback_state` does; every rank must call it."""
    import numpy as np

    state = {}
    for number, first in _sets().items():
        own = shares.get(number, {})
        # All ranks use one rank's list: ranks that restored different states would deadlock.
        counts = broadcast_object({name: share.size for name, share in own.items()}, first)
        for name, count in counts.items():
            share = own.get(name, np.empty(0, np.float32)).copy()
            if share.size != count:  # as on ranks outside of the set
                share = np.zeros(count, np.float32)
            key = _of_set(number) + name.removeprefix(_PREFIX)
            ops.reduce_array(share, f"owed.{key}", ops.Sum, lasting=False)
            state[key] = share
    return state


def _sets() -> dict[int, int]:
    """Return the first rank of each process set, by the set's number, in an equal order."""
    others = basics.context().process_sets
    return {0: 0} | {number: (others[number].ranks or [0])[0] for number in sorted(others)}


def _of_set(number: int) -> str:
    """Return the prefix of the names of a process set's tensors in a state."""
    return f"set{number}/" if number else ""


def parts_of(name: str) -> tuple[int, str]:
    """Return the number of the process set of a name in a state, and the tensor's own name."""
    of_set = _OF_SET.match(name)
    return (int(of_set[1]), name[of_set.end() :]) if of_set else (0, name)


class Ownership:
    """The residuals of one variable or optimizer, which are forgotten after it.

    Those that were loaded since it was last used are kept, because they may be the next owner's.

    Args:
        names: names of the owner's operations, without the kind.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = set(names)
        self.use()

    def use(self) -> None:
        """Note that the owner's gradients are being reduced."""
        self._job, self._loads = weakref.ref(basics.context()), _loads

    def end(self) -> None:
        """Note that the owner has been deleted; the garbage collector may call this at any time."""
        _ownerless.append((self._job, self._loads, frozenset(self.names)))

    def forget(self) -> None:
        """Set the residuals to zero; every rank calls it at the same step."""
        _forget(self.names)


def forget_ownerless() -> None:
    """Free the residuals whose owners are gone, before another owner's first reduction."""
    names: set[str] = set()
    while _ownerless:
        job, loads, own = _ownerless.pop()
        if job() is basics.context() and loads == _loads:
            names |= own
    _forget(names)


def _forget(names: Iterable[str]) -> None:
    if owed := [_PREFIX + name for name in names]:
        basics.context().engine.forget_owed(owed)


def load_error_feedback_state(state: Mapping[str, NDArray[np.float32]]) -> None:
    """Replace the residuals by a saved state; every rank must pass the same.

    Process sets must have been added, with the same numbers. A residual is distributed among the
    ranks when its tensor is next reduced. If the tensor is not compressed then, its residual is
    added completely. Optimizers on one rank reduce no gradients, so a job of one rank only keeps
    the residuals for its checkpoints, and warns.

    Raises:
        UsageError: reductions are in flight, the state is not by name and one-dimensional, or it
            is of a process set that does not exist.
    """
    by_set: dict[int, dict[str, NDArray[np.float32]]] = {number: {} for number in _sets()}
    for name, values in state.items():
        if getattr(values, "ndim", None) != 1:
            raise UsageError(
                f"error feedback of {name!r} is not a one-dimensional array; pass what "
                "error_feedback_state() returned"
            )
        number, own = parts_of(name)
        if number not in by_set:
            raise UsageError(
                f"error feedback of {name!r}: there is no process set {number}; add the sets of "
                "the run that saved it first, in the same order"
            )
        by_set[number][_PREFIX + own] = values
    for number, owed in by_set.items():
        basics.context().engine.restore_owed(owed, number)
    global _loads
    _loads += 1
    if state and basics.size() == 1:
        warnings.warn(
            f"error feedback of {len(state)} tensor(s) was loaded, but an optimizer on one rank "
            "reduces no gradients and does not add it; it is kept for the checkpoints of this job, "
            "and a job of several ranks adds it",
            stacklevel=2,
        )


def rounding_state() -> dict[str, int]:
    """Return the number of times that each tensor was coded, by name; equal on every rank.

    Tensors of process sets are not included.

    These counts, QSGD_SEED and the rank determine the noise of stochastic rounding. A training that
    restores them from its checkpoint repeats the steps of an uninterrupted training, on the same
    number of ranks.

    Raises:
        UsageError: reductions are in flight.
    """
    steps = basics.context().engine.coded_steps()
    return {name.removeprefix(_PREFIX): count for name, count in steps.items()}


def load_rounding_state(state: Mapping[str, int]) -> None:
    """Replace the counts of codings by a saved state; every rank must pass the same.

    Raises:
        UsageError: reductions are in flight.
    """
    steps = {_PREFIX + name: count for name, count in state.items()}
    basics.context().engine.restore_coded_steps(steps)
