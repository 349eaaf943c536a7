"""Graphs and sessions of TensorFlow 1, through ``tf.compat.v1``, on any number of ranks."""

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


@pytest.fixture(params=["now", "then"])
def variable(request):
    """Return variable(name, initial) for the graph of the test; once as ``disable_v2_behavior``."""
    now = request.param == "now"

    def make(name, initial):
        return v1.get_variable(name, initializer=initial, use_resource=now)

    if not now:
        v1.disable_control_flow_v2()
        v1.disable_v2_tensorshape()
    with tf.Graph().as_default():
        yield make
    v1.enable_control_flow_v2()
    v1.enable_v2_tensorshape()


def mean():
    return (hvd.size() + 1) / 2


def mine():
    return hvd.rank() + 1.0


OPTIMIZERS = {
    "Adadelta": lambda: v1.train.AdadeltaOptimizer(1.0),
    "Adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "AdagradDA": lambda: v1.train.AdagradDAOptimizer(0.1, v1.train.get_or_create_global_step()),
    "Adam": lambda: v1.train.AdamOptimizer(0.1),
    "Ftrl": lambda: v1.train.FtrlOptimizer(0.1),
    "GradientDescent": lambda: v1.train.GradientDescentOptimizer(0.1),
    "Momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "ProximalAdagrad": lambda: v1.train.ProximalAdagradOptimizer(0.1),
    "ProximalGradientDescent": lambda: v1.train.ProximalGradientDescentOptimizer(0.1),
    "RMSProp": lambda: v1.train.RMSPropOptimizer(0.1, momentum=0.9),
}


def squares(weights, shares):
    parts = [np.random.default_rng(share).standard_normal((4, 6)) for share in shares]
    x = tf.constant(np.concatenate(parts), tf.float32)
    return tf.reduce_mean((tf.matmul(x, weights) - tf.reduce_sum(x, 1, keepdims=True)) ** 2)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_equals_one_process_with_the_whole_batch(variable, make):
    start = np.linspace(-1, 1, 6, dtype=np.float32).reshape(6, 1)
    shared, alone = variable("shared", start), variable("alone", start)
    optimizer = hvd.DistributedOptimizer(make())
    assert isinstance(optimizer, v1.train.Optimizer)
    step = v1.train.get_or_create_global_step()
    train = [
        optimizer.minimize(squares(shared, [hvd.rank()]), step, [shared]),
        make().minimize(squares(alone, range(hvd.size())), var_list=[alone]),
    ]
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run(train)
        result, expected, steps = session.run([shared, alone, step])
        names = optimizer.get_slot_names()
        assert {optimizer.get_slot(shared, name).dtype.base_dtype for name in names} <= {tf.float32}
    assert steps == 3
    assert not np.allclose(result, start)
    assert np.allclose(result, expected, atol=1e-5)
    assert np.array_equal(result, hvd.broadcast_object(result, 0))


def test_compressed_gradients_move_all_ranks_alike(variable):
    start = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    weights = variable("coded", start)
    optimizer = hvd.DistributedOptimizer(
        v1.train.GradientDescentOptimizer(1.0),
        compression=hvd.Compression.qsgd(bits=8, min_elements=0),
    )
    train = optimizer.minimize(tf.reduce_sum(weights * start) * mine(), var_list=[weights])
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(train)
        result = session.run(weights)
    assert np.allclose(result, start * (1 - mean()), atol=0.05)
    assert np.array_equal(result, hvd.broadcast_object(result, 0))


def test_a_monitored_session_begins_with_the_variables_of_the_root(variable, tmp_path):
    weights = variable("w", np.full(3, 10.0 * hvd.rank(), np.float32))
    loss = tf.reduce_sum(weights) * mine()
    step = v1.train.get_or_create_global_step()
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), op=hvd.Sum)
    train = optimizer.minimize(loss, step)
    root = hvd.size() - 1
    hooks = [hvd.BroadcastGlobalVariablesHook(root), v1.train.StopAtStepHook(last_step=2)]
    config = v1.ConfigProto()
    config.gpu_options.visible_device_list = str(hvd.local_rank())
    folder = str(tmp_path) if hvd.rank() == root else None
    with v1.train.MonitoredTrainingSession(
        checkpoint_dir=folder, hooks=hooks, config=config
    ) as session:
        while not session.should_stop():
            session.run(train)
    if folder is not None:
        saved = v1.train.load_checkpoint(folder).get_tensor("w")
        assert np.allclose(saved, 10 * root - 2 * hvd.size() * mean())


def test_all_variables_of_a_graph_are_broadcast_by_an_operation(variable):
    kinds = ["float32", "float64", "int32", "int64", "bool"]
    variables = [variable(kind, np.full(3, hvd.rank() % 2, kind)) for kind in kinds]
    root = hvd.size() - 1
    operation = hvd.broadcast_global_variables(root)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(operation)
        for value, kind in zip(session.run(variables), kinds, strict=True):
            assert value.dtype == kind
            assert np.array_equal(value, np.full(3, root % 2, kind))


def test_eagerly_there_are_no_global_variables():
    with pytest.raises(ValueError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


@pytest.mark.parametrize("wrong", [3, [3], tf.keras.Sequential(), tf.zeros([2])])
def test_only_variables_are_broadcast(wrong):
    with pytest.raises(hvd.UsageError, match="pass a list of variables"):
        hvd.broadcast_variables(wrong, 0)


@pytest.mark.parametrize(("average", "divisor"), [(False, 1), (True, 3)])
def test_gradients_of_several_passes_add_up_before_they_are_reduced(variable, average, divisor):
    weights, table = variable("w", np.zeros(3, np.float32)), variable("t", np.zeros(4, np.float32))
    loss = (tf.reduce_sum(weights) + tf.reduce_sum(tf.gather(table, [1]))) * mine()
    step = v1.train.get_or_create_global_step()
    optimizer = hvd.DistributedOptimizer(
        v1.train.MomentumOptimizer(1.0, 0.0),
        backward_passes_per_step=3,
        average_aggregated_gradients=average,
    )
    train = optimizer.minimize(loss, step)
    before = hvd.communication_stats()["allreduces"]
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        for done in range(1, 8):
            session.run(train)
            values, rows, steps = session.run([weights, table, step])
            assert np.allclose(values, -(done // 3) * 3 * mean() / divisor)
            assert np.allclose(rows, [0, values[0], 0, 0])
            assert steps == done
    reduced = hvd.communication_stats()["allreduces"] - before
    assert reduced == (4 if hvd.size() > 1 else 0)


@pytest.mark.parametrize("traced", [False, True])
def test_passes_add_up_without_a_session(traced):
    weights = tf.Variable(np.zeros(3, np.float32))
    optimizer = hvd.DistributedOptimizer(
        v1.train.MomentumOptimizer(1.0, 0.0), backward_passes_per_step=2
    )

    def train():
        optimizer.minimize(lambda: tf.reduce_sum(weights) * mine())

    train = tf.function(train) if traced else train
    for done in range(1, 6):
        train()
        assert np.allclose(weights, -(done // 2) * 2 * mean())


def test_adasum_averages_equal_steps(variable):
    weights = variable("w", np.zeros(3, np.float32))
    optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(0.5, 0.9), op=hvd.Adasum)
    train = optimizer.minimize(tf.reduce_sum(weights))
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        for expected in (-0.5, -1.45):
            session.run(train)
            assert np.allclose(session.run(weights), expected, atol=1e-3)


def test_local_variables_keep_their_own_gradients(variable):
    shared, local = (variable(name, np.zeros(3, np.float32)) for name in "ab")
    optimizer = hvd.DistributedOptimizer(
        v1.train.GradientDescentOptimizer(1.0), scale_local_gradients=False
    )
    optimizer.register_local_var(local)
    train = optimizer.minimize(tf.reduce_sum(shared + local) * mine())
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(train)
        values = session.run([shared, local])
    assert np.allclose(values[0], -mean())
    assert np.allclose(values[1], -mine())


def test_an_optimizer_may_be_used_eagerly():
    weights = tf.Variable(tf.zeros(3))
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    optimizer.minimize(lambda: tf.reduce_sum(weights) * mine(), var_list=[weights])
    assert np.allclose(weights, -mean())


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        ("sgd", {}, "pass an optimizer of"),
        (v1.train.GradientDescentOptimizer(1.0), {"backward_passes_per_step": 0}, "at least 1"),
        (v1.train.GradientDescentOptimizer(1.0), {"op": hvd.Min}, "choose hvd"),
        (v1.train.GradientDescentOptimizer(1.0), {"groups": -1}, "0 \\(none\\) or more"),
    ],
)
def test_arguments_that_cannot_be_are_answered_with_the_remedy(optimizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(optimizer, **arguments)


def test_an_optimizer_is_wrapped_once():
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    with pytest.raises(ValueError, match="wrap it once"):
        hvd.DistributedOptimizer(optimizer)
