"""``hvd.callbacks``: callbacks of ``fit`` for several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from qsgd_hpc import arrays
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.shared_names import is_shared
from qsgd_hpc.keras._synchronized import broadcast_values, is_local, name_of, unequal
from qsgd_hpc.keras.optimizer import synchronization_of
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.runtime.stopping import should_stop

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "StopBeforeWalltimeCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """A callback that broadcasts the model's and the optimizer's variables of one rank.

    This happens before the first batch, or after it if the first batch builds the model. The states
    of random generators are not changed, so that dropout differs between ranks. Before the first
    batch, the epoch to which ``BackupAndRestore`` has returned on that rank is broadcast, too.

    Args:
        root_rank: the rank whose values are copied, such as one that has restored a checkpoint.
        device: accepted for compatibility.
        local_variables: variables that may differ between ranks, as may their optimizer state.
        process_set: the participating ranks; default: all.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Iterable[Any] | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = {name_of(v) for v in local_variables or ()}
        self._process_set = process_set
        self._done = False

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable from the broadcast."""
        self._local.add(name_of(variable))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, if every rank's model is built."""
        if self._done or not self._process_set.included():
            return
        model = self.model
        if all(arrays.allgather_object(bool(model.built), process_set=self._process_set)):
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            self._broadcast()
            restored = getattr(model, "_initial_epoch", None)
            model._initial_epoch = arrays.broadcast_object(
                restored, self.root_rank, process_set=self._process_set
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast the variables that the first batch has built."""
        if not self._done and self._process_set.included():
            self._broadcast()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Check that every rank has the same epoch, number of batches and learning rate.

        Raises:
            UsageError: on every rank.
        """
        if not self._process_set.included() or getattr(self.model, "optimizer", None) is None:
            return
        optimizer = self.model.optimizer
        # With accumulation, ranks whose numbers of batches differ may reduce equally often.
        batches = None if _accumulates(optimizer) else (self.params or {}).get("steps")
        mine = (epoch + 1, batches, _rates(optimizer))
        found = unequal(mine, self._process_set, "begins an epoch")
        for rank, theirs, first_rank, expected in found:
            (at, count, rate), (first_at, first_count, first) = theirs, expected
            if at != first_at:
                raise UsageError(
                    f"rank {rank} begins epoch {at} and rank {first_rank} begins epoch {first_at}. "
                    "Pass the same initial_epoch on every rank. BackupAndRestore is needed on "
                    f"rank {self.root_rank} only, before BroadcastGlobalVariablesCallback"
                )
            if count != first_count and None not in (count, first_count):
                raise UsageError(
                    f"epoch {at} has {count} batches on rank {rank} and {first_count} on rank "
                    f"{first_rank}. Every rank needs equally many: pass steps_per_epoch to fit, or "
                    "shorten the data of some ranks"
                )
            if self._done and rate != first:
                raise UsageError(
                    f"before epoch {at} the learning rate of rank {rank} is {rate} and "
                    f"that of rank {first_rank} is {first}. Callbacks that change it "
                    "(ReduceLROnPlateau, LearningRateScheduler) are needed on every rank, "
                    "after hvd.callbacks.MetricAverageCallback()"
                )

    def _broadcast(self) -> None:
        self._done = True
        model = self.model
        own = [] if model.optimizer is None else model.optimizer.variables
        synchronization = synchronization_of(model.optimizer)
        variables = [*model.weights, *own]
        if synchronization is not None:
            synchronization.begun = True
            variables = synchronization.shared(variables)
        chosen = [v for v in variables if is_shared(v) and not is_local(v, self._local)]
        broadcast_values(chosen, self.root_rank, self._process_set)


class MetricAverageCallback(keras.callbacks.Callback):
    """A callback that averages metrics over the ranks at the end of each epoch.

    Place it before callbacks that use metrics: ``ReduceLROnPlateau``, ``EarlyStopping``,
    checkpoints, TensorBoard. All ranks need the same metrics.

    Args:
        device: accepted for compatibility.
        process_set: the ranks that average; default: all.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace every number in the logs by its average.

        Raises:
            UsageError: the ranks have unequal metrics; on every rank.
        """
        if not self._process_set.included():
            return
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        self._require_equal(names)
        if logs is None or not names:
            return
        mine = np.array([float(logs[name]) for name in names], np.float64)
        averages = arrays.allreduce(mine, name="metrics", process_set=self._process_set)
        logs.update(zip(names, averages.tolist(), strict=True))

    def _require_equal(self, mine: list[str]) -> None:
        for rank, names, first_rank, first in unequal(mine, self._process_set, "averages metrics"):
            only = sorted(set(names) ^ set(first))
            raise UsageError(
                f"MetricAverageCallback: rank {rank} has the metrics {names}, rank "
                f"{first_rank} has {first}; {only} are not on both. Compile the model "
                "equally on every rank, pass validation_data on every rank or on none, and "
                "place callbacks that log on one rank only after this one"
            )


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """A callback that multiplies the learning rate in a range of epochs.

    Args:
        initial_lr: the learning rate to multiply; of a variable, its present value.
        multiplier: a number, or a function of the epoch.
        start_epoch: the first epoch of the range.
        end_epoch: the first epoch after the range; None: no end.
        staircase: whether the rate changes at the beginning of an epoch only, and the function
            gets integers; a constant multiplier does not change within an epoch.
        momentum_correction: whether to rescale the momentum of SGD and RMSprop, which contains
            steps with the old rate, when the rate changes (Goyal et al., 2017, section 3).
        steps_per_epoch: number of batches per epoch, if ``fit`` cannot determine it.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: float = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        try:  # a variable, such as the optimizer's rate, would change with the rate that is set
            rate = float(keras.ops.convert_to_numpy(initial_lr))
        except (TypeError, ValueError):
            raise UsageError(f"initial_lr={initial_lr!r}: choose a number above 0") from None
        if not rate > 0:
            raise UsageError(f"initial_lr={rate!r}: choose a number above 0")
        self._initial_lr = rate
        self._multiplier = multiplier if callable(multiplier) else float(multiplier)
        self._start_epoch, self._end_epoch = start_epoch, end_epoch
        self._staircase = staircase or not callable(multiplier)
        self._momentum_correction = momentum_correction
        self._steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def _steps(self) -> int | None:
        return self._steps_per_epoch or (self.params or {}).get("steps")

    def _rate_for(self, batch: int) -> float | None:
        """Return the rate to set before a batch, or None to leave it as it is.

        Raises:
            UsageError: the number of steps of an epoch is unknown, and the rate changes within it.
        """
        epoch: float = self._epoch
        ended = self._end_epoch is not None and epoch >= self._end_epoch
        if epoch < self._start_epoch or ended or (self._staircase and batch):
            return None
        if not self._staircase:
            steps = self._steps()
            if not steps:
                raise UsageError(
                    "the number of batches per epoch is unknown, and the learning rate changes "
                    "with each batch: pass steps_per_epoch= to the callback (or to fit), or "
                    "staircase=True"
                )
            epoch += batch / steps
        factor = self._multiplier(epoch) if callable(self._multiplier) else self._multiplier
        return self._initial_lr * factor

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate for this batch."""
        rate = self._rate_for(batch)
        if rate is not None:
            _set_rate(self.model.optimizer, rate, self._momentum_correction)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate."""
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """A callback that increases the learning rate per batch, from one rank's rate to the total.

    Args:
        initial_lr: the rate to reach: one rank's rate times the number of ranks.
        warmup_epochs: number of epochs after which it is reached.
        momentum_correction: see :class:`LearningRateScheduleCallback`.
        steps_per_epoch: number of batches per epoch, if ``fit`` cannot determine it.
        verbose: 1 to log on rank 0 when it is reached.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        self._ranks = basics.size()
        if not warmup_epochs > 0:
            raise UsageError(f"warmup_epochs={warmup_epochs!r}: choose more than 0")
        self._warmup_epochs = warmup_epochs
        super().__init__(
            initial_lr,
            self._share,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._last = -(-warmup_epochs // 1) - 1
        self._verbose = verbose

    def _share(self, epoch: float) -> float:
        """Return the part of the rate to reach: 1/ranks at first, 1 in the warm-up's last batch.

        Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.2.
        """
        done = min(1.0, (epoch + 1 / (self._steps() or 1)) / self._warmup_epochs)
        return (1 + done * (self._ranks - 1)) / self._ranks

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate and the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == self._last and self._verbose and basics.rank() == 0:
            rate = _rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: the learning rate is warmed up to {rate:g}")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """A callback that saves the model whenever it is the best so far, on rank 0 only.

    Args:
        monitor: the metric to use; put a :class:`MetricAverageCallback` before this callback.
        verbose: 1 to log when a model is saved.
        mode: ``"min"``, ``"max"``, or ``"auto"``, which depends on the metric's name.
        save_freq: ``"epoch"``, or a number of batches.
        filepath: the file; it ends in ``.keras``.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str = "best_model.keras",
    ) -> None:
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
        )

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if basics.rank() == 0:
            super()._save_model(*args, **kwargs)


def _rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _rates(optimizer: Any) -> str:
    """Return the learning rate as text; for several optimizers, all rates."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return ", ".join(f"{_rate(each):g}" for each in getattr(inner, "optimizers", [optimizer]))


def _accumulates(optimizer: Any) -> bool:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return bool(getattr(inner, "gradient_accumulation_steps", None))


def _set_rate(optimizer: Any, rate: float, momentum_correction: bool) -> None:
    before = _rate(optimizer)
    optimizer.learning_rate = rate
    if momentum_correction and before and rate != before:
        # Equivalent to multiplying the momentum coefficient by this ratio for one step, but also
        # works in compiled steps, in which the coefficient is a constant.
        for velocity in _velocities(getattr(optimizer, "inner_optimizer", optimizer)):
            velocity.assign(velocity * (rate / before))


def _velocities(optimizer: Any) -> list[Any]:
    if not optimizer.built or not getattr(optimizer, "momentum", 0):
        return []
    if isinstance(optimizer, keras.optimizers.SGD):
        return [v for v in optimizer.momentums if v is not None]
    if isinstance(optimizer, keras.optimizers.RMSprop):
        return [v for v in optimizer._momentums if v is not None]
    return []


class BatchCounter(keras.callbacks.Callback):
    """Base class of callbacks that act after a number of batches.

    With ``steps_per_execution``, Keras calls ``on_train_batch_end`` for the last of several batches
    only.
    """

    _last = -1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start counting batches from 0, as ``fit`` does."""
        self._last = -1

    def advance(self, batch: int) -> int:
        """Return the batch of the call before, -1 in the first of an epoch; remember this one."""
        last, self._last = self._last, batch
        return last


class StopBeforeWalltimeCallback(BatchCounter):
    """A callback that ends ``fit`` on all ranks, after a batch, if the job is about to end.

    If ``stopped`` is true after ``fit``, the script saves its checkpoint and calls
    ``qsgd_hpc.exit_for_resubmit()``.

    Args:
        every: number of batches between two checks, each of which is one small allreduce.
    """

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        if every < 1:
            raise UsageError(f"every={every}: choose at least 1")
        self.every = every
        self.stopped = False
        """Whether the callback has ended ``fit``."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Check whether to stop."""
        due = batch // self.every > self.advance(batch) // self.every
        if due and should_stop():
            self.stopped = self.model.stop_training = True
