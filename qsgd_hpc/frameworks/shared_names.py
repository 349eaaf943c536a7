"""Variables by name: those of each rank alone, and those that would share a residual."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from qsgd_hpc._core import Coding
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.process_sets import ProcessSet

__all__ = ["is_shared", "warn_of_shared_residual"]

# The last variable of each name, by process set and name.
_users: dict[tuple[int | None, str], weakref.ref[Any]] = {}


def is_shared(variable: Any) -> bool:
    """Return whether Keras's variable must be equal on all ranks: not a random generator's state.

    With equal states, all ranks would drop out the same units.
    """
    name = getattr(variable, "path", None) or getattr(variable, "name", None)
    return not str(name).partition(":")[0].endswith("seed_generator_state")


def warn_of_shared_residual(
    name: str, variable: Any, coding: Coding | None, process_set: ProcessSet
) -> None:
    """Warn if another variable's gradient has used this name, and error feedback is on.

    Args:
        name: name of the gradient's operation.
        variable: the variable; the same object in every step.
        coding: coding of the gradient; None: it is not coded.
        process_set: the ranks that reduce it, of which the first warns.
    """
    if coding is None or not coding.error_feedback:
        return
    key = process_set.process_set_id, name
    last = _users[key]() if key in _users else None
    if last is variable:
        return
    _users[key] = weakref.ref(variable)
    if last is not None and basics.rank() == (process_set.ranks or [0])[0]:
        warnings.warn(
            f"the gradients of two variables are both reduced as {name!r}, so that each gets the "
            "other's error feedback. Name the models, layers or variables differently, pass "
            "DistributedGradientTape(name=), wrap an optimizer for each model, or compress without "
            "error feedback",
            stacklevel=3,
        )
