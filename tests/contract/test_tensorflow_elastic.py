"""``hvd.elastic`` for TensorFlow: commits, and what survives a failure, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.full

tf = pytest.importorskip("tensorflow")

import qsgd_hpc.tensorflow as hvd  # noqa: E402

v1 = tf.compat.v1


@pytest.fixture(scope="module", autouse=True)
def world():
    hvd.shutdown()
    hvd.init()
    yield
    hvd.barrier()


def needs_ranks(least):
    """Skip a test on fewer ranks; init() is harmless and has to come first."""
    hvd.init()
    return pytest.mark.skipif(hvd.size() < least, reason=f"needs {least} ranks or more")


def keras_state(**attributes):
    model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(1)])
    model.layers[0].kernel.assign(tf.fill((3, 1), float(hvd.rank())))
    return hvd.elastic.TensorFlowKerasState(model, tf.keras.optimizers.SGD(0.5, 0.9), **attributes)


def train_step(state):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(state.model(tf.ones((1, 3)))) * (hvd.rank() + 1)
    tape = hvd.DistributedGradientTape(tape)
    variables = state.model.trainable_variables
    gradients = tape.gradient(loss, variables)
    state.optimizer.apply_gradients(zip(gradients, variables, strict=True))


def kernel(state):
    return state.model.layers[0].kernel.numpy()


@needs_ranks(2)
@pytest.mark.parametrize("way", ["broadcast_variables", "sync"])
def test_each_rank_keeps_its_own_dropout(way):
    tf.keras.utils.set_random_seed(hvd.rank())
    model = tf.keras.Sequential([tf.keras.layers.Input((64,)), tf.keras.layers.Dropout(0.5)])
    if way == "sync":
        hvd.elastic.TensorFlowKerasState(model, tf.keras.optimizers.SGD(0.5)).sync()
    else:
        hvd.broadcast_variables(model.variables, root_rank=0)
    masks = hvd.allgather(model(tf.ones((1, 64)), training=True))
    assert not np.array_equal(masks[0], masks[1])


def test_restore_returns_model_and_optimizer_to_the_last_commit():
    state = keras_state(batch=0)
    state.sync()
    assert np.array_equal(kernel(state), np.zeros((3, 1)))
    train_step(state)
    state.batch = 1
    state.commit()
    kept = [v.numpy() for v in (*state.model.variables, *state.optimizer.variables)]
    for _ in range(2):
        train_step(state)
        state.batch += 1
        state.restore()
        found = [v.numpy() for v in (*state.model.variables, *state.optimizer.variables)]
        assert all(map(np.array_equal, found, kept))
        assert state.batch == 1


def test_a_commit_of_more_variables_than_there_are_is_not_put_back():
    variables = [tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros(3))]
    state = hvd.elastic.TensorFlowState(variables)
    state._committed["variables"].append(np.zeros(3))
    with pytest.raises(hvd.UsageError, match="3 variables were committed, but there are 2 now"):
        state.restore()


def test_a_model_must_be_built_before_it_is_a_state():
    with pytest.raises(hvd.UsageError, match="the model is not built"):
        hvd.elastic.TensorFlowKerasState(tf.keras.Sequential([tf.keras.layers.Dense(1)]))


def test_variables_are_a_state_of_their_own():
    variable = tf.Variable(tf.fill(3, float(hvd.rank() + 1)))
    state = hvd.elastic.TensorFlowState([variable], epoch=hvd.rank())
    variable.assign_add(tf.ones(3))
    state.restore()
    assert np.array_equal(variable, np.full(3, hvd.rank() + 1.0))
    state.sync()
    assert np.array_equal(variable, np.ones(3))
    assert state.epoch == 0


def test_variables_of_a_session_are_a_state_of_their_own():
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [v1.get_variable(n, initializer=np.full(2, hvd.rank() + 1)) for n in "ab"]
        change = v1.assign_add(variables[0], [5, 5])
        session.run(v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, batch=7)
        session.run(change)
        state.restore()
        assert np.array_equal(session.run(variables), np.full((2, 2), hvd.rank() + 1))
        state.sync()
        assert np.array_equal(session.run(variables), np.ones((2, 2)))
        assert state.batch == 7


@tf.function
def rank_dependent_shapes():
    return hvd.allreduce(tf.ones(hvd.rank() + 1), name="of different shapes")


@needs_ranks(2)
def test_a_failure_within_a_function_is_tried_again_from_the_last_commit():
    state = keras_state(batch=0)
    starts = []

    @hvd.elastic.run
    def train(state):
        starts.append(state.batch)
        for state.batch in range(state.batch, 5):  # noqa: B020
            train_step(state)
            if state.batch == 3 and len(starts) == 1:
                rank_dependent_shapes()
            if state.batch == 2:
                state.commit()
        return state.batch

    assert train(state) == 4
    assert starts == [0, 2]
    assert np.array_equal(kernel(state), hvd.broadcast(kernel(state), 0))


@needs_ranks(2)
def test_a_failure_that_comes_again_without_a_commit_is_raised():
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(1)
        rank_dependent_shapes()

    with pytest.raises(hvd.HorovodInternalError, match="shape"):
        train(keras_state())
    assert len(calls) == 2


def test_other_errors_of_tensorflow_are_raised_as_they_are():
    @hvd.elastic.run
    def train(state):
        tf.debugging.assert_equal(1, 2)

    with pytest.raises(tf.errors.InvalidArgumentError):
        train(keras_state())
