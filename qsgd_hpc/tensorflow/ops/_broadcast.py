"""``broadcast``: copies one rank's tensor to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.ops._autograph import without_autograph
from qsgd_hpc.tensorflow.ops._names import full_name
from qsgd_hpc.tensorflow.ops._run import run

__all__ = ["broadcast", "broadcast_"]


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
        "qsgd_broadcast", operations, tensors=[tf.convert_to_tensor(t) for t in tensors]
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
