"""``alltoall``: exchanges rows between all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.ops._autograph import without_autograph
from qsgd_hpc.tensorflow.ops._names import full_name
from qsgd_hpc.tensorflow.ops._run import run
from qsgd_hpc.tensorflow.ops._shapes import as_rows, with_unknown_rows

__all__ = ["alltoall"]


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
    source = as_rows(tf.convert_to_tensor(tensor), "alltoall")
    parts = [] if splits is None else splits
    operations = [ops.operation("alltoall", full_name("alltoall", name), process_set)]
    made = run(
        "qsgd_alltoall",
        operations,
        tensors=[source],
        splits=tf.cast(tf.convert_to_tensor(parts, _integer(parts)), tf.int64),
    )
    received = with_unknown_rows(made.received[0], like=source)
    if splits is None:
        return received
    return received, tf.cast(made.rows[0], tf.int32)


def _integer(splits: Any) -> tf.DType | None:
    """Return the type to convert a list to, because TensorFlow cannot infer an empty list's."""
    return tf.int64 if isinstance(splits, list) else None
