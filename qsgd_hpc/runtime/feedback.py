"""Save and restore what coding keeps from step to step: what it owes, and where its noise is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.objects import broadcast_object

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "error_feedback_state",
    "load_error_feedback_state",
    "load_rounding_state",
    "rounding_state",
]

_PREFIX = "allreduce."


def error_feedback_state() -> dict[str, NDArray[np.float32]]:
    """Return what coding has left unsent so far; every rank calls it, between two steps.

    Add it to a checkpoint, whose training then continues without loss on any number of ranks.

    Returns:
        by tensor name, float32 of shape (elements,): what the results of all reductions so far
        lack in sum, in units of a result. The same on every rank. Empty without error feedback.
    Raises:
        UsageError: reductions are in flight.
    """
    import numpy as np

    engine = basics.context().engine
    state = {}
    # Rank 0's list, so that ranks that have restored different things cannot wait for each other.
    for name, count in broadcast_object(engine.owed_counts()).items():
        share = engine.owed_share(name)
        if share.size != count:
            share = np.zeros(count, np.float32)
        buffer = ops.Buffer(share.ctypes.data, share.shape, "float32", share)
        key = name.removeprefix(_PREFIX)
        ops.allreduce(
            buffer, buffer, name=f"owed.{key}", op=ops.Sum, result=lambda: None, lasting=False
        ).wait()
        state[key] = share
    return state


def load_error_feedback_state(state: Mapping[str, NDArray[np.float32]]) -> None:
    """Replace what error feedback owes by a saved state; every rank passes the same.

    What the state owes a tensor is shared out among the ranks when the tensor is next reduced; a
    tensor that is not compressed then is paid at once.

    Raises:
        UsageError: reductions are in flight, or the state is not by name and one-dimensional.
    """
    for name, values in state.items():
        if getattr(values, "ndim", None) != 1:
            raise UsageError(
                f"error feedback of {name!r} is not a one-dimensional array; pass what "
                "error_feedback_state() returned"
            )
    basics.context().engine.restore_owed({_PREFIX + name: v for name, v in state.items()})


def rounding_state() -> dict[str, int]:
    """Return how often each tensor was coded, by name; the same on every rank.

    The noise of stochastic rounding follows from it, from QSGD_SEED and from the rank. A training
    that restores it with its checkpoint takes the very steps that it would have taken without the
    interruption, on the same number of ranks.

    Raises:
        UsageError: reductions are in flight.
    """
    steps = basics.context().engine.coded_steps()
    return {name.removeprefix(_PREFIX): count for name, count in steps.items()}


def load_rounding_state(state: Mapping[str, int]) -> None:
    """Replace how often each tensor was coded by a saved state; every rank passes the same.

    Raises:
        UsageError: reductions are in flight.
    """
    steps = {_PREFIX + name: count for name, count in state.items()}
    basics.context().engine.restore_coded_steps(steps)
