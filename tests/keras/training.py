"""What the tests of training with Keras share: small models, and unequal data on each rank."""

from __future__ import annotations

import inspect

import keras
import numpy as np

import qsgd_hpc.keras as hvd

SHIPPED = [
    kind
    for kind in vars(keras.optimizers).values()
    if inspect.isclass(kind)
    and issubclass(kind, keras.optimizers.Optimizer)
    and kind is not keras.optimizers.Optimizer
]
ROWS, BATCH = 16, 4


def make(kind):
    """Return an optimizer, in one of the ways that its class can be made."""
    if kind.__name__ == "MultiOptimizer":
        rest = {".*bias": keras.optimizers.Adam(0.02)}
        return kind(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), rest))
    if kind.__name__ == "LossScaleOptimizer":
        return kind(keras.optimizers.SGD(0.1))
    return kind(0.02)


def rows(ranks, count=ROWS):
    """Return inputs (count x ranks, 6) and targets, batch by batch one rank after the other."""
    made = [np.random.default_rng(rank).standard_normal((count, 6)) for rank in ranks]
    x = np.stack(made, 1).reshape(-1, BATCH, len(made), 6).swapaxes(1, 2).reshape(-1, 6)
    y = np.stack([x.sum(1), x[:, 0], x[:, 1] * x[:, 2]], 1)
    return x.astype("float32"), y.astype("float32")


def network(seed=0, **options):
    """Return a model of four variables; each seed has its own."""
    initial = [keras.initializers.GlorotUniform(100 * seed + i) for i in range(2)]
    dense = keras.layers.Dense
    first = dense(8, activation="tanh", kernel_initializer=initial[0], **options)
    return keras.Sequential([keras.Input((6,)), first, dense(3, kernel_initializer=initial[1])])


def compiled(optimizer, seed=0, **options):
    """Return a model that trains with an optimizer."""
    model = network(seed)
    model.compile(optimizer, "mse", **options)
    return model


def fit(model, data=None, **options):
    """Train on this rank's rows, in their order."""
    options = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "shuffle": False, **options}
    return model.fit(*(data or rows([hvd.rank()])), **options)


def flat(weights):
    """Return all weights in one vector."""
    return np.concatenate([np.asarray(w, "float64").ravel() for w in weights])


def replicas_are_identical(model):
    """Tell whether every rank has rank 0's weights, bit for bit."""
    mine = flat(model.get_weights())
    return len({each.tobytes() for each in hvd.allgather_object(mine)}) == 1
