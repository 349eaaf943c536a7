"""Start every rank from the same variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.shared_names import is_shared
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.naming import operation_names, unwrapped
from qsgd_hpc.tensorflow.ops._autograph import without_autograph
from qsgd_hpc.tensorflow.ops._broadcast import broadcast_all

__all__ = ["broadcast_global_variables", "broadcast_variables"]


@without_autograph
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Replace every variable by root_rank's; all ranks must pass the same variables.

    Args:
        variables: variables of TensorFlow or Keras, such as ``model.variables`` and
            ``optimizer.variables``. A model or an optimizer that is not built yet has none. The
            states of Keras's random generators, as of Dropout, stay each rank's own.
        root_rank: the rank of the job whose values are copied.
        process_set: the participating ranks; default: all.
        inplace: accepted for compatibility.
    Returns:
        In a TF1 graph, an operation to run; in eager mode, no useful value.
    """
    chosen = [unwrapped(variable) for variable in variables if is_shared(variable)]
    if not chosen:
        return tf.group()
    number = process_set.process_set_id
    prefix = f"variable.set{number}." if number else "variable."
    received = broadcast_all(chosen, root_rank, operation_names(prefix, chosen), process_set)
    pairs = zip(chosen, received, strict=True)
    return tf.group(*[tf.compat.v1.assign(variable, value) for variable, value in pairs])


def broadcast_global_variables(root_rank: int) -> Any:
    """Return an operation that replaces all variables of the graph by root_rank's.

    Raises:
        UsageError: in eager mode, in which no graph collects variables.
    """
    if tf.executing_eagerly():
        raise UsageError(
            "broadcast_global_variables() is for graphs of TF1; pass the variables: "
            "hvd.broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)
