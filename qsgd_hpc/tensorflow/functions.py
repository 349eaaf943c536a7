"""Start every rank from the same variables and Python objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.shared_names import is_shared
from qsgd_hpc.runtime import objects
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.ops import broadcast_all
from qsgd_hpc.tensorflow.ops._names import name_of, operation_names, unwrapped
from qsgd_hpc.tensorflow.ops._run import without_autograph

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return root_rank's ``obj`` on every rank of the set; pickle or cloudpickle sends it.

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
    """Return every rank's ``obj``, in rank order; pickle or cloudpickle sends them.

    ``session`` is accepted for compatibility.
    """
    return objects.allgather_object(obj, name, process_set)


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
    Raises:
        UsageError: not variables, such as a model.
    """
    given = list(variables) if isinstance(variables, Iterable) else None
    if given is None or not all(hasattr(each, "assign") for each in given):
        raise UsageError(
            f"broadcast_variables({type(variables).__name__}): pass a list of variables, such as "
            "model.variables"
        )
    chosen = [unwrapped(variable) for variable in given if is_shared(variable)]
    if not chosen:
        return tf.group()
    number = process_set.process_set_id
    prefix = f"variable.set{number}." if number else "variable."
    names = operation_names(prefix, [*map(name_of, chosen)])
    received = broadcast_all(chosen, root_rank, names, process_set)
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


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A hook that broadcasts root_rank's variables after a session has set or restored them.

    Args:
        root_rank: the rank whose values are copied.
        device: the device of the operations; default: that of the variables.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        self._root_rank = root_rank
        self._device = device
        self._broadcast: Any = None

    def begin(self) -> None:
        """Add the broadcast to the graph, once for each graph."""
        if self._broadcast is None or self._broadcast.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self._device or None):
                self._broadcast = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcast; called on every rank, each with its own session."""
        session.run(self._broadcast)
