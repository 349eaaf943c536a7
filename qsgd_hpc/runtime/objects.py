"""Collectives over Python objects, which are pickled."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["allgather_object", "broadcast_object"]

_NOTHING = np.empty(0, dtype=np.uint8)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return root_rank's ``obj`` on every rank of the set; pickle or cloudpickle sends it.

    ``root_rank`` is a rank of the job, whatever the set.

    Raises:
        UsageError: root_rank could not pickle it; that rank raises the original error.
    """
    text = ops.label("object", name, process_set)
    mine = basics.rank() == root_rank
    data, failure = _pickled(obj) if mine else (_NOTHING, None)
    length = np.array([data.size], dtype=np.int64)
    _broadcast_array(length, root_rank, f"{text}.length", process_set)
    if length[0] == 0:
        raise failure or _not_picklable("broadcast_object", root_rank)
    if not mine:
        data = np.empty(int(length[0]), dtype=np.uint8)
    _broadcast_array(data, root_rank, f"{text}.data", process_set)
    return obj if mine else pickle.loads(data.tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's ``obj``, in rank order; pickle or cloudpickle sends them.

    Raises:
        UsageError: another rank could not pickle its object; that rank raises the original error.
    """

    def unpickled(received: ops.Received) -> list[Any]:
        ends = np.cumsum(received.rows)
        ranks = process_set.ranks or range(len(received.rows))
        for rank, rows in zip(ranks, received.rows, strict=True):
            if rows == 0:
                raise failure or _not_picklable("allgather_object", rank)
        return [
            pickle.loads(received.data[end - rows : end].tobytes())
            for rows, end in zip(received.rows, ends, strict=True)
        ]

    text = ops.label("object", name, process_set)
    data, failure = _pickled(obj)
    everyone: list[Any] = ops.exchange(
        "allgather", ops.buffer_of(data), name=text, process_set=process_set, result=unpickled
    ).wait()
    return everyone


def _pickled(obj: Any) -> tuple[NDArray[np.uint8], Exception | None]:
    """Return an object's pickle; if it has none, nothing, to be sent all the same, and the error.

    The other ranks would otherwise wait for this one.
    """
    try:
        return np.frombuffer(_dumps(obj), dtype=np.uint8), None
    except Exception as error:  # objects run code of their own
        return _NOTHING, error


def _dumps(obj: Any) -> bytes:
    try:
        return pickle.dumps(obj)
    except Exception:  # the error's type depends on the object
        import cloudpickle  # 50 ms of every rank's start, which most scripts never need

        # By value: lambdas, such as those of a scheduler or a defaultdict, and local classes.
        by_value: bytes = cloudpickle.dumps(obj)
        return by_value


def _not_picklable(operation: str, rank: int) -> UsageError:
    return UsageError(
        f"{operation}: rank {rank} could not pickle its object; that rank's own error says why"
    )


def _broadcast_array(
    array: NDArray[Any], root_rank: int, name: str, process_set: ProcessSet
) -> None:
    ops.broadcast(
        ops.buffer_of(array),
        root_rank=root_rank,
        name=name,
        process_set=process_set,
        result=lambda: None,
    ).wait()
