"""Allgather, broadcast, alltoall, and the ranks as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.ops import Average, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set, process_set_ids_and_ranks
from qsgd_hpc.tensorflow.ops._names import full_name, names_and_group
from qsgd_hpc.tensorflow.ops._run import (
    as_rows,
    as_tensor,
    run,
    with_unknown_rows,
    without_autograph,
)

__all__ = [
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]


@without_autograph
def gather_all(
    tensors: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    *,
    grouped: bool,
    op: Op = Average,
) -> list[tf.Tensor]:
    """Gather tensors in one operation.

    Args:
        op: the reduction of the ranks' gradients: Average, as scripts of this API expect, or Sum,
            if the gather is part of a reduction.
    """
    sources = [as_tensor(t) for t in tensors]
    rows = [tf.reshape(t, [1]) if t.shape.rank == 0 else t for t in sources]
    names, group = names_and_group("allgather", name, len(rows), grouped=grouped)
    operations = [ops.operation("allgather", n, process_set, op=op, group=group) for n in names]
    made = run("qsgd_allgather", operations, tensors=rows)
    return [with_unknown_rows(g, like=t) for g, t in zip(made.gathered, rows, strict=True)]


@without_autograph
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return every rank's ``tensor``, concatenated in rank order.

    Its gradient is this rank's rows of the mean of the ranks' output gradients.

    Args:
        tensor: any dtype of fixed size; ranks may differ in the first dimension only. Scalars
            count as one row each.
        name: pairs the calls of the ranks; default: by order, or in a graph by their position.
        ignore_name_scope: accepted for compatibility; names have no scope here.
        process_set: the participating ranks; default: all.
    Raises:
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    return gather_all([tensor], name, process_set, grouped=False)[0]


@without_autograph
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gather several tensors, which complete or fail together; see :func:`allgather`."""
    return gather_all(tensors, name, process_set, grouped=True) if tensors else []


@without_autograph
def broadcast_all(
    tensors: Sequence[Any], root_rank: int, names: Sequence[str | None], process_set: ProcessSet
) -> list[tf.Tensor]:
    """Return root_rank's tensors, in one operation; each has a separate name."""
    operations = [
        ops.operation("broadcast", full_name("broadcast", name), process_set, root=root_rank)
        for name in names
    ]
    received: list[tf.Tensor] = run(
        "qsgd_broadcast", operations, tensors=[as_tensor(t) for t in tensors]
    )
    return received


@without_autograph
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return root_rank's ``tensor``; shapes must be equal.

    Its gradient is the mean of the ranks' output gradients on the root, zeros on the others.

    Args:
        tensor: any dtype of fixed size; unchanged.
        root_rank: a rank of the job that is in the process set.
        name: pairs the calls of the ranks; default: by order, or in a graph by their position.
        ignore_name_scope: accepted for compatibility; names have no scope here.
        process_set: the participating ranks; default: all.
    Raises:
        UsageError: root_rank is not in the set.
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    return broadcast_all([tensor], root_rank, [name], process_set)[0]


@without_autograph
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Replace variables by root_rank's; see :func:`broadcast`.

    Returns:
        The variables, or in a graph the operations that assign to them.
    """
    group = list(variables)
    if not group:
        return []
    names = [name and f"{name}.{i}" for i in range(len(group))]
    received = broadcast_all(group, root_rank, names, process_set)
    return [v.assign(value) for v, value in zip(group, received, strict=True)]


@without_autograph
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some rows of ``tensor`` to each rank; return the received rows, in rank order.

    Its gradient is the output gradient, sent back to the ranks of the rows.

    Args:
        tensor: at least one dimension; ranks may differ in the first one only.
        splits: number of rows for each rank of the process set, as a list or tensor; None
            sends the same number to each.
        name: pairs the calls of the ranks; default: by order, or in a graph by their position.
        ignore_name_scope: accepted for compatibility; names have no scope here.
        process_set: the participating ranks; default: all.
    Returns:
        The rows and, if ``splits`` were passed, the number of rows from each rank, as int32.
    Raises:
        UsageError: the sum of splits is not the number of rows (a ValueError, on this rank).
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    source = as_rows(as_tensor(tensor), "alltoall")
    parts = _whole_numbers(() if splits is None else splits)
    operations = [ops.operation("alltoall", full_name("alltoall", name), process_set)]
    made = run("qsgd_alltoall", operations, tensors=[source], splits=parts)
    received = with_unknown_rows(made.received[0], like=source)
    if splits is None:
        return received
    return received, tf.cast(made.rows[0], tf.int32)


def _whole_numbers(splits: Any) -> tf.Tensor:
    # TensorFlow takes the type of an empty list for float32.
    empty = isinstance(splits, Sequence) and not splits
    numbers = tf.convert_to_tensor(splits, tf.int64 if empty else None)
    if not numbers.dtype.is_integer:
        raise UsageError(f"alltoall with splits= of type {numbers.dtype.name}: pass integers")
    return tf.cast(numbers, tf.int64)


@without_autograph
def join() -> tf.Tensor:
    """Announce that this rank has no more data; return the last rank (int32) when all have joined.

    Until then it contributes zeros to the others' allreduces, which count in averages.
    Other collectives raise on the ranks that have not joined.
    """
    if tf.executing_eagerly():
        return tf.constant(ops.join(), tf.int32)
    last: tf.Tensor = run("qsgd_join", [ops.operation("join", "")])
    return last


def _op(fact: Callable[[], int], name: str | None) -> tf.Tensor:
    result: tf.Tensor = tf.numpy_function(lambda: np.int32(fact()), [], tf.int32, name=name)
    result.set_shape([])
    return result


@without_autograph
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank in the job, from 0, as an int32 scalar."""
    return _op(basics.rank, name)


@without_autograph
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank on its node, from 0, as an int32 scalar."""
    return _op(basics.local_rank, name)


@without_autograph
def size_op(process_set_id: int | ProcessSet = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of processes of the job, or of a process set, as an int32 scalar."""
    return _op(lambda: len(_ranks(process_set_id)), name)


@without_autograph
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of processes on this node, as an int32 scalar."""
    return _op(basics.local_size, name)


@without_autograph
def process_set_included_op(
    process_set_id: int | ProcessSet = 0, name: str | None = None
) -> tf.Tensor:
    """Return 1 if this rank is in the process set, else 0, as an int32 scalar."""
    return _op(lambda: int(basics.rank() in _ranks(process_set_id)), name)


def _ranks(process_set: int | ProcessSet) -> list[int]:
    known = process_set_ids_and_ranks()
    number = process_set if isinstance(process_set, int) else process_set.process_set_id
    if number not in known:
        raise UsageError(f"process set {number} is not registered; known sets: {sorted(known)}")
    return known[number]
