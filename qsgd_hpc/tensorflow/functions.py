"""Collectives over Python objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qsgd_hpc.runtime import objects
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn"]


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return root_rank's ``obj`` on every rank of the set; it must be picklable.

    ``root_rank`` is a rank of the job, whatever the set. ``session`` is accepted for
    compatibility; objects are not sent through TensorFlow.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return ``broadcast_object`` as a function of the object alone."""
    return lambda obj: objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return every rank's ``obj``, in rank order; they must be picklable.

    ``session`` is accepted for compatibility.
    """
    return objects.allgather_object(obj, name, process_set)
