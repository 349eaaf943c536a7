"""Ranks and sizes as tensors, read when a graph runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.process_sets import ProcessSet, process_set_ids_and_ranks
from qsgd_hpc.tensorflow.ops._run import run, without_autograph

__all__ = [
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]


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
