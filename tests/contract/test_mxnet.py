"""What is MXNet's own: in place, deferred parameters, optimizers; see conftest.py.

Runs where MXNet is installed, which is in an environment of its own (tests/mpi/test_mxnet.py).
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest

mx = pytest.importorskip("mxnet", reason="make test-mxnet runs this")

import qsgd_hpc.mxnet as hvd  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def world():
    hvd.init()
    mx.npx.reset_np()  # the contract's arrays with no dimension or no elements need that mode


def mean():
    """Of the ranks' numbers, counted from 1."""
    return (hvd.size() + 1) / 2


def test_arrays_are_replaced_in_place_and_mxnet_goes_on_with_them():
    mine = mx.nd.ones((3, 2)) * (hvd.rank() + 1)  # under way in MXNet's engine
    assert hvd.allreduce_(mine) is mine
    np.testing.assert_allclose((mine * 2).asnumpy(), 2 * mean())
    pair = [mine, mx.nd.array([hvd.rank()], dtype="int32")]
    assert hvd.grouped_allreduce_(pair, op=hvd.Sum) is pair
    assert pair[1].asscalar() == hvd.size() * (hvd.size() - 1) // 2
    row = mx.nd.zeros((4, 3))
    row[1] = hvd.rank()
    hvd.broadcast_(row[1], hvd.size() - 1)
    assert row.asnumpy().tolist() == [[0.0] * 3, [hvd.size() - 1.0] * 3, [0.0] * 3, [0.0] * 3]


def test_parameters_of_known_and_unknown_shapes_become_equal():
    mx.random.seed(hvd.rank())
    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(4, in_units=3), mx.gluon.nn.Dense(2))
    net.initialize(mx.init.Uniform(1))
    hvd.broadcast_parameters(net.collect_params())
    net(mx.nd.ones((1, 3)))  # the second layer learns its shape here
    values = [p.data().asnumpy().tolist() for p in net.collect_params().values()]
    assert len({str(each) for each in hvd.allgather_object(values)}) == 1
    arrays = {"b": mx.nd.array([hvd.rank()]), "a": mx.nd.array([[hvd.rank(), 1]])}
    hvd.broadcast_parameters(arrays, root_rank=hvd.size() - 1, prefix="module.")
    assert arrays["a"].asnumpy().tolist() == [[hvd.size() - 1, 1]]
    with pytest.raises(ValueError, match="collect_params"):
        hvd.broadcast_parameters([mx.nd.ones(1)])


def step(trainer_of, batch=2):
    """Return a weight after one step on a gradient that is the rank's number, from 1."""
    weight = mx.gluon.Parameter("weight", shape=(64, 64), init="zeros")
    weight.initialize()
    trainer = trainer_of({"weight": weight})
    with mx.autograd.record():
        loss = (weight.data() * (batch * (hvd.rank() + 1.0))).sum()
    loss.backward()
    trainer.step(batch)
    return weight.data().asnumpy()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_predivide_factor": 4.0},
        {"num_groups": 1},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.qsgd(bits=8, min_elements=1)},
    ],
    ids=["plain", "predivide", "group", "fp16", "qsgd"],
)
def test_a_trainer_steps_by_the_average(options):
    made = step(lambda p: hvd.DistributedTrainer(p, "sgd", {"learning_rate": 0.5}, **options))
    np.testing.assert_allclose(made, -0.5 * mean(), rtol=1e-2)
    assert len(set(hvd.allgather_object(made.tobytes()))) == 1


def test_a_distributed_optimizer_in_a_trainer_averages_once():
    inner = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.5))
    np.testing.assert_allclose(step(lambda p: hvd.DistributedTrainer(p, inner)), -0.5 * mean())


def test_an_optimizer_averages_before_it_updates_and_is_itself_in_all_else():
    plain = mx.optimizer.SGD(learning_rate=0.5, momentum=0.9)
    optimizer = pickle.loads(pickle.dumps(hvd.DistributedOptimizer(plain)))
    optimizer.rescale_grad = 0.25
    assert optimizer.wrapped.rescale_grad == 0.25
    assert optimizer.learning_rate == 0.5
    update = mx.optimizer.get_updater(optimizer)
    weight = mx.nd.zeros(3)
    for _ in range(2):
        update(0, mx.nd.ones(3) * 4 * (hvd.rank() + 1), weight)
    np.testing.assert_allclose(weight.asnumpy(), -0.5 * mean() * (1 + 1.9), rtol=1e-6)


def test_sparse_gradients_are_refused():
    def trainer(parameters):
        return hvd.DistributedTrainer(parameters, "sgd")

    layer = mx.gluon.nn.Embedding(10, 4, sparse_grad=True)
    layer.initialize()
    parameters = trainer(layer.collect_params())
    with mx.autograd.record():
        loss = layer(mx.nd.array([1, 2])).sum()
    loss.backward()
    with pytest.raises(ValueError, match="sparse_grad=False"):
        parameters.step(1)


def test_wrong_calls_are_answered_with_the_remedy():
    weight = mx.gluon.Parameter("weight", shape=(2,), init="zeros")
    weight.initialize()
    parameters = {"weight": weight}
    trainer = mx.gluon.Trainer(parameters, "sgd", kvstore=None)
    sgd = mx.optimizer.SGD()
    for wrong in (trainer, "sgd", hvd.DistributedOptimizer(sgd)):
        with pytest.raises(hvd.UsageError, match="pass an optimizer of MXNet"):
            hvd.DistributedOptimizer(wrong)
    for options in ({"num_groups": -1}, {"gradient_predivide_factor": 0}, {"process_set": [0]}):
        with pytest.raises(hvd.UsageError, match=r"groups=-1|factor=0|ProcessSet"):
            hvd.DistributedTrainer(parameters, sgd, **options)
    with pytest.raises(hvd.UsageError, match="a Trainer; pass an optimizer of MXNet"):
        hvd.DistributedTrainer(parameters, trainer)
    for array in (np.ones(3), [1.0], None):
        with pytest.raises(hvd.UsageError, match="take arrays of MXNet"):
            hvd.allreduce(array)
