"""Broadcast variables to all ranks, and check that they are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from qsgd_hpc import arrays
from qsgd_hpc.errors import UsageError
from qsgd_hpc.keras._backend import BACKEND
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = ["broadcast_values", "name_of", "require_equal", "unequal", "value_of"]

REMEDY = (
    "Either gradients bypass the DistributedOptimizer (a train_step that changes variables by "
    "itself), or a callback has changed weights or the learning rate on some ranks only, or the "
    "ranks began with unequal values: pass hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit"
)


def name_of(variable: Any) -> str:
    """Return the name of a variable, equal on every rank."""
    return str(getattr(variable, "path", None) or variable.name)


def value_of(variable: Any) -> NDArray[Any]:
    """Return a copy of a variable's value."""
    native = variable.value if isinstance(variable, keras.Variable) else variable
    return np.array(keras.ops.convert_to_numpy(native), order="C")


def broadcast_values(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Set variables to their values on root_rank; shapes must be equal.

    Raises:
        UsageError: the ranks have other variables; on every rank.
    """
    with BACKEND.outside_of_graphs():
        _require_equal_names([name_of(v) for v in variables], process_set)
        values = [value_of(v) for v in variables]
        handles = [
            arrays.broadcast_async_(value, root_rank, f"variable.{i}.{name_of(v)}", process_set)
            for i, (v, value) in enumerate(zip(variables, values, strict=True))
        ]
        for variable, handle in zip(variables, handles, strict=True):
            variable.assign(handle.wait())


def unequal(mine: Any, process_set: ProcessSet, doing: str) -> Iterator[tuple[int, Any, int, Any]]:
    """Compare a value over the ranks of the set; collective.

    Args:
        mine: this rank's value, which can be pickled.
        process_set: the ranks.
        doing: what this rank does, for the error if another rank compares a value elsewhere.
    Yields:
        For each rank whose value is another than the first rank's: the rank and its value, the
        first rank and its value.
    Raises:
        UsageError: the ranks are at different places of the script; on every rank.
    """
    everyone = arrays.allgather_object((doing, mine), process_set=process_set)
    ranks = process_set.ranks or []
    place, first = everyone[0]
    for rank, (other_place, _) in zip(ranks, everyone, strict=True):
        if other_place != place:
            raise UsageError(
                f"rank {rank} {other_place} while rank {ranks[0]} {place}. Every rank needs the "
                "same number of epochs and the callbacks of qsgd_hpc; EarlyStopping stops all "
                "ranks alike after hvd.callbacks.MetricAverageCallback()"
            )
    for rank, (_, theirs) in zip(ranks, everyone, strict=True):
        if theirs != first:
            yield rank, theirs, ranks[0], first


def _require_equal_names(names: list[str], process_set: ProcessSet) -> None:
    for rank, theirs, first_rank, first in unequal(names, process_set, "broadcasts"):
        pairs = zip(theirs, first, strict=False)
        here, there = next((p for p in pairs if p[0] != p[1]), (len(theirs), len(first)))
        what = "name of a variable" if isinstance(here, str) else "number of variables"
        raise UsageError(
            f"the {what} to broadcast is {here!r} on rank {rank} and {there!r} on rank "
            f"{first_rank}. Create the model and its optimizer in the same way on every rank. To "
            "continue from a file, load it on every rank: Keras may name a loaded model's "
            "variables differently"
        )


def require_equal(variables: Sequence[Any], process_set: ProcessSet = global_process_set) -> None:
    """Check that variables are the same on every rank of the set, bit for bit; collective.

    Raises:
        UsageError: on every rank; it names a variable and a rank.
    """
    mine = [(name_of(v), _digest(v)) for v in variables]
    for rank, theirs, first_rank, first in unequal(mine, process_set, "ends fit"):
        pairs = zip(theirs, first, strict=False)
        names = [name for (name, digest), (_, expected) in pairs if digest != expected]
        what = f"variable {names[0]!r}" if names else "the number of variables"
        raise UsageError(
            f"after training, {what} of rank {rank} differs from that of rank {first_rank} "
            f"({len(names)} of {len(mine)} variables do). {REMEDY}"
        )


def _digest(variable: Any) -> bytes:
    return hashlib.blake2b(value_of(variable).tobytes(), digest_size=16).digest()
