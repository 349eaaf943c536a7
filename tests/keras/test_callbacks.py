"""What the callbacks, values, saved models and elastic states of ``qsgd_hpc.keras`` promise."""

from __future__ import annotations

import signal

import keras
import numpy as np
import pytest

import qsgd_hpc.keras as hvd
from qsgd_hpc.runtime import stopping
from tests.keras.training import (
    BATCH,
    ROWS,
    compiled,
    fit,
    flat,
    network,
    replicas_are_identical,
    rows,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras's own
hvd.init()
several_ranks = pytest.mark.skipif(hvd.size() < 2, reason="needs 2 ranks or more")
STEPS = 4


def rate_of(model):
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


class Rates(keras.callbacks.Callback):
    """Notes the learning rate of each batch."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(rate_of(self.model))


def rates_with(callback, epochs):
    model, rates = compiled(keras.optimizers.SGD(1e-3)), Rates()
    history = fit(model, epochs=epochs, callbacks=[callback, rates])
    return rates.rates, history.history["lr"]


def test_warmup_leads_batch_by_batch_from_one_ranks_rate_to_all_ranks():
    size = hvd.size()
    callback = hvd.callbacks.LearningRateWarmupCallback(1e-3 * size, warmup_epochs=2)
    rates, logged = rates_with(callback, epochs=3)
    done = [min(1.0, (i + 1) / (2 * STEPS)) for i in range(3 * STEPS)]
    assert np.allclose(rates, [1e-3 * (1 + d * (size - 1)) for d in done], rtol=1e-4)
    assert np.allclose(logged, rates[STEPS - 1 :: STEPS])


class AsksToStop(keras.callbacks.Callback):
    """Asks the job to stop after two batches, on rank 0 alone."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and hvd.rank() == 0:
            (self.folder / "stop").touch()


def test_fit_ends_at_the_same_batch_on_all_ranks_when_the_job_shall_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("QSGD_JOB_DIR", str(tmp_path))
    monkeypatch.setattr(stopping, "_watch", stopping._Watch())
    monkeypatch.setattr(stopping, "CHECK_EVERY_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    stop, rates = hvd.callbacks.StopBeforeWalltimeCallback(), Rates()
    try:
        model = compiled(keras.optimizers.SGD(1e-3))
        fit(model, epochs=2, callbacks=[AsksToStop(tmp_path), stop, rates])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.stopped
    assert len(rates.rates) == 2


def test_the_job_is_asked_every_so_many_batches_also_with_several_per_execution(monkeypatch):
    asked = []
    monkeypatch.setattr(hvd.callbacks, "should_stop", lambda: asked.append(batch))
    stop = hvd.callbacks.StopBeforeWalltimeCallback(every=4)
    for per_execution, expected in [(1, [0, 4, 8]), (2, [1, 5, 9]), (3, [2, 5, 8]), (9, [8])] * 2:
        asked.clear()
        stop.on_epoch_begin(0)
        for batch in range(per_execution - 1, 10, per_execution):
            stop.on_train_batch_end(batch)
        assert asked == expected


def test_schedules_of_several_epochs_follow_each_other():
    between = {"start_epoch": 1, "end_epoch": 3}
    callback = hvd.callbacks.LearningRateScheduleCallback(
        0.5, lambda epoch: 10.0**-epoch, **between
    )
    rates, _ = rates_with(callback, epochs=4)
    assert np.allclose(rates[::STEPS], [1e-3, 0.05, 0.005, 0.005])
    constant = hvd.callbacks.LearningRateScheduleCallback(0.5, 0.1, start_epoch=1)
    assert np.allclose(rates_with(constant, epochs=2)[0][::STEPS], [1e-3, 0.05])


def test_a_rate_that_changes_within_unknown_epochs_is_answered_with_the_remedy():
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: epoch, staircase=False)
    callback.on_epoch_begin(1)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        callback.on_train_batch_begin(2)


def test_the_rate_to_multiply_does_not_follow_the_optimizers_variable():
    model, rates = compiled(keras.optimizers.SGD(0.4)), Rates()
    initial_lr = model.optimizer.learning_rate
    halved = hvd.callbacks.LearningRateScheduleCallback(initial_lr, lambda epoch: 0.5**epoch)
    fit(model, epochs=3, callbacks=[halved, rates])
    assert np.allclose(rates.rates[::STEPS], [0.4, 0.2, 0.1])


@pytest.mark.parametrize("every", [0, -1])
def test_a_check_needs_a_number_of_batches(every):
    with pytest.raises(ValueError, match=f"every={every}: choose at least 1"):
        hvd.callbacks.StopBeforeWalltimeCallback(every)


@pytest.mark.parametrize("rate", [None, 0.0, "x"])
def test_a_schedule_needs_a_rate_to_multiply(rate):
    with pytest.raises(ValueError, match=f"initial_lr={rate!r}: choose a number above 0"):
        hvd.callbacks.LearningRateWarmupCallback(rate)


def test_momentum_follows_the_rate():
    """One step after the change equals one step with the momentum's factor times the ratio."""
    x, y = np.ones((1, 6), "float32"), np.ones((1, 3), "float32")
    before, after, momentum = 0.01, 0.1, 0.9
    model = compiled(keras.optimizers.SGD(before, momentum=momentum))
    by_hand = compiled(keras.optimizers.SGD(before, momentum=momentum))
    callback = hvd.callbacks.LearningRateScheduleCallback(after, 1.0, start_epoch=1)
    fit(model, (x, y), epochs=2, callbacks=[callback])
    fit(by_hand, (x, y), epochs=1)
    faster = compiled(keras.optimizers.SGD(after, momentum=momentum))
    faster.set_weights(by_hand.get_weights())
    faster.optimizer.build(faster.trainable_variables)
    old = [np.array(v.value) * after / before for v in by_hand.optimizer.momentums]
    for velocity, value in zip(faster.optimizer.momentums, old, strict=True):
        velocity.assign(value)
    fit(faster, (x, y), epochs=1)
    assert np.allclose(flat(model.get_weights()), flat(faster.get_weights()), atol=1e-6)


def test_metrics_are_averaged_before_later_callbacks_see_them():
    seen = []
    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: logs.update(own=hvd.rank())),
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: seen.append(dict(logs))),
    ]
    fit(compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))), callbacks=callbacks)
    assert [each["own"] for each in seen] == [(hvd.size() - 1) / 2] * 2
    assert len({tuple(sorted(each.items())) for each in hvd.allgather_object(seen[-1])}) == 1


class Logs(keras.callbacks.Callback):
    """Logs a metric of its own."""

    def on_epoch_end(self, epoch, logs=None):
        logs["mine"] = 1.0


@several_ranks
def test_metrics_that_some_ranks_lack_are_named():
    average = hvd.callbacks.MetricAverageCallback()
    callbacks = [Logs(), average] if hvd.rank() == 1 else [average]
    with pytest.raises(hvd.UsageError, match=r"rank 1 has .*'loss', 'mine'.*\['mine'\] are not on"):
        fit(compiled(hvd.DistributedOptimizer("sgd")), callbacks=callbacks)


@several_ranks
def test_a_learning_rate_that_one_rank_changes_is_noticed_before_the_next_epoch():
    epochs = []
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=lambda e, _: epochs.append(e)))
    if hvd.rank() == hvd.size() - 1:
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1e6)
        callbacks.append(plateau)
    with pytest.raises(
        hvd.UsageError, match=r"before epoch 3 .*\(ReduceLROnPlateau, .* every rank"
    ):
        fit(compiled(hvd.DistributedOptimizer("sgd")), epochs=5, callbacks=callbacks)
    assert epochs == [0, 1]


@several_ranks
def test_a_checkpoint_of_one_rank_becomes_every_ranks():
    root = hvd.size() - 1
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.0)), seed=hvd.rank())
    expected = flat(network(root).get_weights())
    fit(model, epochs=1, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(root)])
    assert np.array_equal(flat(model.get_weights()), expected)


@several_ranks
def test_an_epoch_of_fewer_batches_on_some_rank_raises_before_its_first_step():
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    mine = [each[: ROWS - BATCH * (hvd.rank() == 1)] for each in rows([hvd.rank()])]
    with pytest.raises(hvd.UsageError, match="epoch 1 has 3 batches on rank 1 and 4 on rank 0"):
        fit(model, mine, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


@several_ranks
def test_ranks_need_not_all_know_their_number_of_batches():
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(compiled(hvd.DistributedOptimizer("sgd")))
    callback.set_params({"steps": 4 if hvd.rank() == 0 else None})
    callback.on_train_begin()
    callback.on_epoch_begin(0)


@several_ranks
def test_a_rank_that_ends_fit_epochs_before_another_is_named():
    model = compiled(hvd.DistributedOptimizer("sgd"))
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(ValueError, match=r"rank 1 begins an epoch while rank 0 ends fit.*Metric"):
        fit(model, epochs=1 + (hvd.rank() == 1), callbacks=[broadcast])


@several_ranks
@pytest.mark.parametrize("first", [True, False])
def test_ranks_continue_at_the_epoch_of_the_rank_that_restores_a_backup(tmp_path, first):
    def trained(epochs):
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        if hvd.rank() == 0:
            backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
            callbacks.insert(0 if first else 1, backup)
        model = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), seed=hvd.rank())
        return fit(model, epochs=epochs, callbacks=callbacks).epoch

    trained(1)
    if first:
        assert trained(3) == [1, 2]
    else:
        with pytest.raises(hvd.UsageError, match="rank 1 begins epoch 1 and rank 0 begins epoch 2"):
            trained(3)


@several_ranks
def test_a_model_that_fit_builds_begins_alike_after_the_first_batch():
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(3)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert replicas_are_identical(model)


@several_ranks
def test_dropout_differs_from_rank_to_rank():
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([*network().layers, keras.layers.Dropout(0.5)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    states = [np.array(v.value) for v in model.layers[-1].variables]
    assert len({each[0].tobytes() for each in hvd.allgather_object(states)}) == hvd.size()
    assert replicas_are_identical(model)


def test_the_best_model_is_saved_by_one_rank(tmp_path):
    file = tmp_path / "best.keras"
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(file))
    fit(compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))), callbacks=[best])
    assert file.exists() == (hvd.rank() == 0)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_saved_model_loads_as_the_plain_optimizer_and_trains_on(tmp_path, passes):
    optimizer = keras.optimizers.Adam(0.02)
    distributed = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
    assert isinstance(distributed, keras.optimizers.Adam)
    model = compiled(distributed)
    fit(model)
    model.save(tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    assert type(plain.optimizer) is type(keras.optimizers.Adam(0.1))
    for mine, theirs in zip(optimizer.variables, plain.optimizer.variables, strict=True):
        assert np.array_equal(np.array(mine.value), np.array(theirs.value))
    again = hvd.load_model(tmp_path / "model.keras", backward_passes_per_step=passes)
    for each in (model, again):
        fit(each)
    assert replicas_are_identical(again)
    assert np.allclose(flat(again.get_weights()), flat(model.get_weights()), atol=1e-6)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="Horovod's is TensorFlow's")
def test_scripts_find_it_in_the_module_of_tensorflow():
    import qsgd_hpc.tensorflow as of_tensorflow

    assert of_tensorflow.keras.callbacks is hvd.callbacks


def test_values_travel():
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(size))
    assert hvd.allreduce(float(rank)) == pytest.approx(total / size)
    assert hvd.allreduce([rank, 1], op=hvd.Sum).tolist() == [total, size]
    assert hvd.allreduce(keras.ops.ones((2, 2)), average=False).tolist() == [[size] * 2] * 2
    assert hvd.allgather(np.full((rank + 1, 1), rank)).shape == (size * (size + 1) // 2, 1)
    # As from an eager tensor.
    assert hvd.allreduce(float(rank)).numpy() == pytest.approx(total / size)
    assert type(hvd.broadcast([rank], root_rank=0).numpy()) is np.ndarray
    assert hvd.broadcast(np.array([rank]), size - 1).tolist() == [size - 1]
    assert hvd.reducescatter(np.ones((size, 2)), op=hvd.Sum).tolist() == [[size] * 2]
    with pytest.raises(ValueError, match="TF1"):
        hvd.broadcast_global_variables(0)


class Batches(keras.callbacks.Callback):
    """Notes what a state says after each batch."""

    def __init__(self, state, seen):
        super().__init__()
        self.state, self.seen = state, seen

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.state.batch)


def test_an_elastic_state_goes_back_to_its_commit_and_counts_on():
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)))
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    seen = []
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        Batches(state, seen),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
    ]
    fit(model, callbacks=callbacks)
    assert (state.epoch, state.batch) == (2, 0)
    assert seen == [1, 2, 3, 4] * 2
    committed = flat(model.get_weights())
    fit(model, epochs=1)
    state.restore()
    assert np.array_equal(flat(model.get_weights()), committed)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 2 * STEPS
    state.sync()
    assert replicas_are_identical(model)


def test_a_restored_state_includes_the_random_generators_of_the_rank():
    """With JAX, a step that failed leaves its error in their states, as in every variable."""
    model = keras.Sequential([network(0), keras.layers.GaussianNoise(0.1)])
    model.compile("sgd", "mse")
    fit(model)
    state = hvd.elastic.KerasState(model)
    (generator,) = [v for v in model.variables if v.path.endswith("seed_generator_state")]
    committed = keras.ops.convert_to_numpy(generator).copy()
    fit(model)
    assert not np.array_equal(keras.ops.convert_to_numpy(generator), committed)
    state.restore()
    assert np.array_equal(keras.ops.convert_to_numpy(generator), committed)


class StopAfter(keras.callbacks.Callback):
    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training = self.left <= 0


@pytest.mark.parametrize(("batches", "counted"), [(STEPS + 2, (1, 2)), (2 * STEPS, (2, 0))])
def test_an_epoch_that_was_stopped_in_the_middle_is_not_counted(batches, counted):
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    callbacks = [
        StopAfter(batches),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
    ]
    fit(model, epochs=3, callbacks=callbacks)
    assert (state.epoch, state.batch) == counted


@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="Keras has no steps_per_execution on torch"
)
def test_commits_count_batches_also_with_several_per_execution():
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), steps_per_execution=2)
    state, committed = hvd.elastic.KerasState(model, batch=0), []
    state.commit = lambda: committed.append(state.batch)
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=STEPS),
    ]
    fit(model, epochs=2, callbacks=callbacks)
    assert committed == [STEPS, 0] * 2
