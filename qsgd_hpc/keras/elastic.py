"""``hvd.elastic`` for Keras; see :mod:`qsgd_hpc.elastic` for its use in batch jobs.

::

    state = hvd.elastic.KerasState(model, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(data, epochs=epochs, initial_epoch=state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ])

    train(state)
"""

from __future__ import annotations

from typing import Any

import keras

from qsgd_hpc.elastic import HostsUpdatedInterrupt, State
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.parts import Part, require_variables
from qsgd_hpc.frameworks.shared_names import is_shared
from qsgd_hpc.keras._backend import BACKEND
from qsgd_hpc.keras._synchronized import broadcast_values, value_of
from qsgd_hpc.keras.callbacks import BatchCounter

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

run = BACKEND.elastic_run


class _VariablesPart(Part):
    """A model or an optimizer."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._own: list[tuple[Any, Any]] = []  # random generators of this rank, and their states

    def _variables(self) -> list[Any]:
        if hasattr(self.value, "jax_state_sync"):
            self.value.jax_state_sync()
        model = isinstance(self.value, keras.Model)
        variables = self.value.weights if model else self.value.variables
        return [v for v in variables if is_shared(v)]

    def capture(self) -> Any:
        """Return copies of the variables' values; keep those that only this rank has."""
        captured = [value_of(v) for v in self._variables()]
        self._own = [(v, value_of(v)) for v in self.value.variables if not is_shared(v)]
        return captured

    def put_back(self, captured: Any) -> None:
        """Set the variables; those created since then keep their values."""
        variables = self._variables()
        require_variables(captured, variables)
        # With JAX, a step that failed leaves its error in every variable.
        for variable, value in [*zip(variables, captured, strict=False), *self._own]:
            variable.assign(value)

    def sync(self) -> None:
        """Broadcast the values of rank 0."""
        broadcast_values(self._variables(), 0)


class KerasState(State):
    """A model, its optimizer, and other state of a training.

    Args:
        model: a model, built and compiled.
        optimizer: its optimizer; default: that of ``compile``.
        backend: accepted for compatibility.
        attributes: samplers, epochs, batches...; each becomes an attribute.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **attributes: Any
    ) -> None:
        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and model.built and not optimizer.built:
            optimizer.build(model.trainable_variables)
        own = {} if optimizer is None else {"optimizer": optimizer}
        super().__init__(model=model, **own, **attributes)

    def _part(self, value: Any) -> Part:
        if isinstance(value, keras.Model | keras.optimizers.Optimizer):
            return _VariablesPart(value)
        return super()._part(value)


class CommitStateCallback(BatchCounter):
    """A callback that commits a state after a number of batches, and at the end of each epoch.

    Place it after callbacks that change the state.

    Args:
        state: the state to commit.
        batches_per_commit: number of batches that may be lost.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise UsageError(f"batches_per_commit={batches_per_commit}: choose at least 1")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._uncommitted = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit after every ``batches_per_commit`` batches."""
        self._uncommitted += batch - self.advance(batch)
        if self._uncommitted >= self.batches_per_commit:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit."""
        self._commit()

    def _commit(self) -> None:
        self._uncommitted = 0
        self.state.commit()


class _EpochWatch(BatchCounter):
    """Base class of callbacks that must not take an epoch that was stopped early for a whole one.

    Keras calls ``on_epoch_end`` also if a callback has stopped the training after a batch.
    """

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count."""
        self.advance(batch)

    @property
    def complete(self) -> bool:
        """Whether the epoch that ends has had all its batches."""
        steps = (self.params or {}).get("steps")
        return not (self.model.stop_training and steps is not None and self._last + 1 < steps)


class UpdateBatchStateCallback(_EpochWatch):
    """A callback that stores the number of finished batches of the epoch in ``state.batch``."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state
        self._before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Continue counting from the state."""
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the batch."""
        super().on_train_batch_end(batch, logs)
        self.state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reset the count, unless the epoch was stopped before its end."""
        if self.complete:
            self.state.batch = self._before = 0


class UpdateEpochStateCallback(_EpochWatch):
    """A callback that stores the number of finished epochs in ``state.epoch``.

    Both ``fit(epochs=n - state.epoch)`` and ``fit(epochs=n, initial_epoch=state.epoch)`` resume.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the epoch, unless it was stopped before its end."""
        if self.complete:
            self.state.epoch += 1
