"""Collectives over Python objects, which are pickled."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return root_rank's ``obj`` on every rank of the set; it must be picklable.

    ``root_rank`` is a rank of the job, whatever the set.
    """
    text = ops.label("object", name, process_set)
    mine = basics.rank() == root_rank
    data = _pickled(obj) if mine else None
    length = np.array([0 if data is None else data.size], dtype=np.int64)
    _broadcast_array(length, root_rank, f"{text}.length", process_set)
    if data is None:
        data = np.empty(int(length[0]), dtype=np.uint8)
    _broadcast_array(data, root_rank, f"{text}.data", process_set)
    return obj if mine else pickle.loads(data.tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's ``obj``, in rank order; they must be picklable."""

    def unpickled(received: ops.Received) -> list[Any]:
        ends = np.cumsum(received.rows)
        return [
            pickle.loads(received.data[end - rows : end].tobytes())
            for rows, end in zip(received.rows, ends, strict=True)
        ]

    text = ops.label("object", name, process_set)
    source = _buffer(_pickled(obj))
    everyone: list[Any] = ops.exchange(
        "allgather", source, name=text, process_set=process_set, result=unpickled
    ).wait()
    return everyone


def _pickled(obj: Any) -> NDArray[np.uint8]:
    return np.frombuffer(pickle.dumps(obj), dtype=np.uint8)


def _buffer(array: NDArray[Any]) -> ops.Buffer:
    return ops.Buffer(array.ctypes.data, array.shape, str(array.dtype), array)


def _broadcast_array(
    array: NDArray[Any], root_rank: int, name: str, process_set: ProcessSet
) -> None:
    ops.broadcast(
        _buffer(array),
        root_rank=root_rank,
        name=name,
        process_set=process_set,
        result=lambda: None,
    ).wait()
