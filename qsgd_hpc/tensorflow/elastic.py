"""``hvd.elastic`` for TensorFlow; see :mod:`qsgd_hpc.elastic` for its use in batch jobs.

::

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < epochs:
            while state.batch < batches:
                step(...)
                state.batch += 1
                if state.batch % 100 == 0:
                    state.commit()
            state.epoch, state.batch = state.epoch + 1, 0
            state.commit()

    train(state)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from qsgd_hpc.elastic import HostsUpdatedInterrupt, ObjectState, State, run
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.parts import Part, require_variables
from qsgd_hpc.frameworks.shared_names import is_shared
from qsgd_hpc.tensorflow.functions import broadcast_variables
from qsgd_hpc.tensorflow.ops._names import unwrapped

__all__ = [
    "HostsUpdatedInterrupt",
    "ObjectState",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


class _Variables(Part):
    """Variables that are looked up again at each use: a function returns them in a fixed order."""

    def capture(self) -> Any:
        """Return the values as numpy arrays."""
        return [unwrapped(variable).numpy() for variable in self.value()]

    def put_back(self, captured: Any) -> None:
        """Assign captured values; variables created since then keep their values."""
        variables = self.value()
        require_variables(captured, variables)
        for variable, values in zip(variables, captured, strict=False):
            unwrapped(variable).assign(values)

    def sync(self) -> None:
        """Broadcast the values of rank 0."""
        broadcast_variables(self.value(), 0)


class _SessionVariables(Part):
    """Variables of a TF1 session.

    Args:
        variables: the variables, in the same order on every rank.
        session: the session in which they are initialised.
    """

    def __init__(self, variables: Sequence[Any], session: Any) -> None:
        super().__init__(list(variables))
        self._session = session
        with session.graph.as_default():
            self._inputs = [tf.compat.v1.placeholder(v.dtype.base_dtype) for v in self.value]
            pairs = zip(self.value, self._inputs, strict=True)
            self._assign = [tf.compat.v1.assign(v, new, validate_shape=False) for v, new in pairs]
            self._broadcast = broadcast_variables(self.value, 0)

    def capture(self) -> Any:
        """Return the values as numpy arrays."""
        return self._session.run(self.value)

    def put_back(self, captured: Any) -> None:
        """Assign captured values."""
        feeds = dict(zip(self._inputs, captured, strict=True))
        self._session.run([assign.op for assign in self._assign], feeds)

    def sync(self) -> None:
        """Broadcast the values of rank 0."""
        self._session.run(self._broadcast)


class TensorFlowState(State):
    """Variables, and other state of a training.

    Args:
        variables: ``tf.Variable`` or Keras's; by default the global ones of the session's graph.
        session: a TF1 session; none is needed eagerly.
        attributes: epochs, batches...; each becomes an attribute.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **attributes: Any
    ) -> None:
        if session is None:
            chosen = list(variables or [])
            part: Part = _Variables(lambda: chosen)
        else:
            with session.graph.as_default():
                part = _SessionVariables(variables or tf.compat.v1.global_variables(), session)
        super().__init__(**attributes, variables=part)


class TensorFlowKerasState(State):
    """A Keras model, its optimizer, and other state of a training.

    Args:
        model: a Keras model, already built, so that it has its variables.
        optimizer: an optimizer; default: that of the compiled model.
        backend: accepted for compatibility.
        attributes: epochs, batches...; each becomes an attribute.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **attributes: Any
    ) -> None:
        if not model.built:
            raise UsageError(
                "TensorFlowKerasState: the model is not built, so its variables are not known; "
                "call it on a batch first"
            )
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(**attributes, variables=_Variables(self._variables))

    def _variables(self) -> list[Any]:
        own = [] if self.optimizer is None else self.optimizer.variables
        return [*filter(is_shared, self.model.variables), *own]
