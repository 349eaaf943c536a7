"""``allgather``: the rows of all ranks, concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Average, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.ops._autograph import without_autograph
from qsgd_hpc.tensorflow.ops._reduction import names_and_group
from qsgd_hpc.tensorflow.ops._run import run
from qsgd_hpc.tensorflow.ops._shapes import with_unknown_rows

__all__ = ["allgather", "grouped_allgather"]


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
    sources = [tf.convert_to_tensor(t) for t in tensors]
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
