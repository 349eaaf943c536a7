"""Gradients of the collectives, which are collectives; docs/horovod.md has the formulae.

They are registered for the library's operations, so that tapes, ``tf.gradients`` and saved
functions find them. The ranks build equal programs, so they compute gradients of the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from qsgd_hpc._core import Operation
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.reduction import CURVED
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.process_sets import process_set_ids_and_ranks
from qsgd_hpc.tensorflow.ops._names import derived_name
from qsgd_hpc.tensorflow.ops._run import operations_of, run

__all__: list[str] = []

Tensors = Sequence[Any]
Operations = Sequence[Operation]

_CURVED = {op.name for op in CURVED}


def _named(operations: Operations, what: str, **changes: Any) -> list[Operation]:
    """Return operations derived from others, such as their gradients.

    They form no group, because a script may differentiate the results separately.
    """
    return [o.replaced(name=derived_name(o.name, what), group=None, **changes) for o in operations]


def _of_each(derivatives: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return the gradient of an operation, from a function of its tensors that have a gradient."""

    def gradient(operation: Any, *gradients: Any) -> list[Any]:
        places = [i for i, given in enumerate(gradients) if given is not None]
        if not places:
            return [None] * len(gradients)
        parts = operations_of(operation), gradients, operation.inputs, operation.outputs
        made = derivatives(*([part[i] for i in places] for part in parts))
        found = dict(zip(places, made, strict=True))
        return [found.get(i) for i in range(len(gradients))]

    return gradient


def _ranks(operations: Operations) -> list[int]:
    """Return the ranks of the process set."""
    return process_set_ids_and_ranks()[operations[0].process_set]


@_of_each
def _of_allreduce(
    operations: Operations, given: Tensors, inputs: Tensors, outputs: Tensors
) -> list[Any]:
    op = operations[0].op
    if op == "adasum":
        raise UsageError("Adasum has no gradient; use tf.stop_gradient, or reduce by a sum")
    changes = {"op": "sum"} if op in _CURVED else {}
    made = run("qsgd_allreduce", _named(operations, "gradient", **changes), tensors=given)
    if op not in _CURVED:
        return list(made)
    slopes = _slopes(operations, inputs, outputs)
    return [total * slope for total, slope in zip(made, slopes, strict=True)]


def _slopes(operations: Operations, inputs: Tensors, outputs: Tensors) -> list[Any]:
    """Return the derivatives of a nonlinear operation's results by this rank's tensors.

    Ranks with equal extrema share the derivative.
    """
    if operations[0].op == "product":
        mine = _ranks(operations).index(basics.rank())
        rows = [tf.expand_dims(x, 0) for x in inputs]
        everyone = _gathered(operations, "factors", rows, op="sum")
        others = [tf.concat([x[:mine], x[mine + 1 :]], 0) for x in everyone]
        return [tf.reduce_prod(x, 0) for x in others]
    holds = [tf.cast(tf.equal(x, y), x.dtype) for x, y in zip(inputs, outputs, strict=True)]
    counting = _named(operations, "ties", kind="allreduce", op="sum")
    counts = run("qsgd_allreduce", counting, tensors=holds)
    return [h / tf.stop_gradient(n) for h, n in zip(holds, counts, strict=True)]


@_of_each
def _of_broadcast(operations: Operations, given: Tensors, *_: Tensors) -> list[Any]:
    """Return the mean of all ranks' gradients on the root, else 0."""
    averaging = _named(operations, "gradient", kind="allreduce", op="average")
    means = run("qsgd_allreduce", averaging, tensors=given)
    # Zeros that depend on the mean, so that a second derivative is collective as on the root.
    root = basics.rank() == operations[0].root
    return [tf.where(tf.fill(tf.shape(t), root), t, tf.zeros_like(t)) for t in means]


def _of_allgather(operation: Any, *gradients: Any) -> list[Any]:
    """Return the mean, or sum, over the ranks of the gradients of this rank's rows."""
    rows, operations = operation.outputs[-1], operations_of(operation)
    size = len(_ranks(operations))
    made: list[Any] = []
    for i, given in enumerate(gradients[:-1]):
        if given is None:
            made.append(None)
            continue
        sending = _named([operations[i]], "gradient", kind="alltoall", op="sum")
        sent = run("qsgd_alltoall", sending, tensors=[given], splits=rows[i])
        parts = tf.reshape(sent.received[0], tf.concat([[size], tf.shape(operation.inputs[i])], 0))
        averaged = operations[i].op == "average"
        made.append(tf.reduce_mean(parts, 0) if averaged else tf.reduce_sum(parts, 0))
    return made


def _of_alltoall(operation: Any, *gradients: Any) -> list[Any]:
    """Send the gradients back to the ranks of the rows."""
    if gradients[0] is None:
        return [None, None]
    back = _named(operations_of(operation), "gradient")
    rows = operation.outputs[-1][0]
    made = run("qsgd_alltoall", back, tensors=[gradients[0]], splits=rows)
    made.received[0].set_shape(operation.inputs[0].shape)
    return [made.received[0], None]


@_of_each
def _of_reducescatter(
    operations: Operations, given: Tensors, inputs: Tensors, outputs: Tensors
) -> list[Any]:
    """Return all ranks' shares of the gradient, times the derivative of a nonlinear operation."""
    op = operations[0].op
    if op in _CURVED:
        totals = _gathered(operations, "gradient", given, op="sum")
        whole = _gathered(operations, "results", outputs, op="sum")
        slopes = _slopes(operations, inputs, whole)
        return [total * slope for total, slope in zip(totals, slopes, strict=True)]
    factor = operations[0].prescale * operations[0].postscale
    factor *= len(_ranks(operations)) if op == "sum" else 1
    totals = _gathered(operations, "gradient", given, op="average")
    return [total * tf.cast(factor, total.dtype) for total in totals]


def _gathered(operations: Operations, what: str, tensors: Tensors, op: str) -> list[Any]:
    """Gather tensors; ``op`` is the reduction of the ranks' gradients."""
    plain = {"kind": "allgather", "op": op, "prescale": 1.0, "postscale": 1.0}
    gathers = _named(operations, what, **plain)
    made: list[Any] = run("qsgd_allgather", gathers, tensors=tensors).gathered
    return made


for _name, _gradient in {
    "QsgdAllreduce": _of_allreduce,
    "QsgdBroadcast": _of_broadcast,
    "QsgdAllgather": _of_allgather,
    "QsgdAlltoall": _of_alltoall,
    "QsgdReducescatter": _of_reducescatter,
}.items():
    tf.RegisterGradient(_name)(_gradient)
tf.no_gradient("QsgdJoin")
