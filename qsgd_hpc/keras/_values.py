"""Collectives for plain values: numbers, arrays, or tensors of any framework."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from qsgd_hpc import arrays
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.runtime.ops import Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = ["allgather", "allreduce", "broadcast", "broadcast_global_variables", "reducescatter"]


class Value(np.ndarray):
    """An array with the method of TensorFlow's tensors, which is what Horovod returns."""

    def numpy(self) -> Any:
        """Return the values as a plain array or, without dimensions, a number."""
        return np.asarray(self)[()]


def _array(value: Any) -> NDArray[Any]:
    return np.asarray(keras.ops.convert_to_numpy(value))


def _value(array: NDArray[Any]) -> Value:
    return array.view(Value)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | None = None,
    compression: Any = NoneCompressor,
    process_set: ProcessSet = global_process_set,
) -> Value:
    """Return the average (or ``op``) of every rank's value, as a numpy array.

    Args:
        value: a number, an array or a tensor; shapes must be equal.
        name: pairs the calls of the ranks; default: by order.
        average: deprecated: ``op=hvd.Average`` (True) or ``op=hvd.Sum`` (False).
        prescale_factor: multiplies every rank's value before the sum.
        postscale_factor: multiplies the result.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        compression: one of ``qsgd_hpc.arrays.Compression``.
        process_set: the participating ranks; default: all.
    """
    reduced = arrays.allreduce(
        _array(value),
        average=average,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
        process_set=process_set,
    )
    return _value(reduced)


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Value:
    """Return the rows of all ranks, concatenated in rank order; their numbers may differ."""
    return _value(arrays.allgather(_array(value), name=name, process_set=process_set))


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Value:
    """Return root_rank's value on every rank; shapes must be equal."""
    return _value(arrays.broadcast(_array(value), root_rank, name=name, process_set=process_set))


def reducescatter(
    value: Any,
    name: str | None = None,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
) -> Value:
    """Return this rank's part of the rows of the average (or ``op``) of every rank's value."""
    return _value(arrays.reducescatter(_array(value), name=name, op=op, process_set=process_set))


def broadcast_global_variables(root_rank: int) -> Any:
    """Return an operation that replaces all variables of a TF1 graph by root_rank's.

    Raises:
        UsageError: not in a TF1 graph, so there is no collection of all variables.
    """
    if keras.backend.backend() != "tensorflow":
        raise UsageError(
            "broadcast_global_variables() is for graphs of TF1; pass "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank) to fit"
        )
    from qsgd_hpc.tensorflow.functions import broadcast_global_variables as of_tensorflow

    return of_tensorflow(root_rank)
