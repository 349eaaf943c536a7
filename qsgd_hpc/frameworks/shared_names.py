"""Variables by name: those of each rank alone, and those that would share a residual."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any, NamedTuple

from qsgd_hpc._core import Coding
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.feedback import Ownership, forget_ownerless
from qsgd_hpc.runtime.process_sets import ProcessSet

__all__ = ["claim_residual", "is_shared", "warn_of_shared_residual"]

_Key = tuple[int | None, str]


class _User(NamedTuple):
    variable: weakref.ref[Any]
    owned: Ownership | None


# The last variable of each name, by process set and name.
_users: dict[_Key, _User] = {}
# A variable in use that shared its name: while it lives, collecting garbage is in vain, and slow.
_sharing: weakref.ref[Any] | None = None


def is_shared(variable: Any) -> bool:
    """Return whether Keras's variable must be equal on all ranks: not a random generator's state.

    With equal states, all ranks would drop out the same units.
    """
    name = getattr(variable, "path", None) or getattr(variable, "name", None)
    return not str(name).partition(":")[0].endswith("seed_generator_state")


def claim_residual(
    name: str, variable: Any, coding: Coding | None, process_set: ProcessSet
) -> None:
    """Make a variable the owner of the residual of a name, before its gradient is reduced.

    A residual ends with its variable, so that a later one of this name begins without. If the
    earlier one is still in use, this warns.

    Args:
        name: name of the gradient's operation.
        variable: the variable; the same object in every step.
        coding: coding of the gradient; None: it is not coded.
        process_set: the ranks that reduce it, of which the first warns.
    """
    if coding is None or not coding.error_feedback:
        return
    key = process_set.process_set_id, name
    user = _users.get(key)
    if user is not None and user.variable() is variable and user.owned is not None:
        user.owned.use()
        return
    is_in_use = _is_in_use_by_another(key, variable)
    forget_ownerless()
    owned = Ownership([name])

    def end(variable: weakref.ref[Any]) -> None:
        if key in _users and _users[key].variable is variable:
            del _users[key]
            owned.end()

    _users[key] = _User(weakref.ref(variable, end), owned)
    if is_in_use:
        _warn(name, process_set)


def warn_of_shared_residual(
    name: str, variable: Any, coding: Coding | None, process_set: ProcessSet
) -> None:
    """Warn as :func:`claim_residual` does, for a variable that each step replaces by another."""
    if coding is None or not coding.error_feedback:
        return
    key = process_set.process_set_id, name
    is_in_use = _is_in_use_by_another(key, variable)
    _users[key] = _User(weakref.ref(variable), None)
    if is_in_use:
        _warn(name, process_set)


def _is_in_use_by_another(key: _Key, variable: Any) -> bool:
    """Return whether the last variable of a name is another one that the program still uses."""
    global _sharing
    if _last(key) is None or _last(key) is variable:
        return False
    if _sharing is None or _sharing() is None:
        # Each rank's garbage collector runs at another time, but all ranks must forget the same.
        gc.collect()
        last = _last(key)
        _sharing = None if last is None else weakref.ref(last)
    return _last(key) is not None


def _last(key: _Key) -> Any:
    return _users[key].variable() if key in _users else None


def _warn(name: str, process_set: ProcessSet) -> None:
    if basics.rank() == (process_set.ranks or [0])[0]:
        warnings.warn(
            f"the gradients of two variables are both reduced as {name!r}, so that each gets the "
            "other's error feedback. Name the models, layers or variables differently, pass "
            "DistributedGradientTape(name=), wrap an optimizer for each model, or compress without "
            "error feedback",
            stacklevel=4,
        )
