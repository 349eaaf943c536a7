"""Train a small network on scikit-learn's digits with JAX and optax, on many ranks.

    qsgd-hpc run -np 2 train_hvd.py
    qsgd-hpc run -np 2 --bits 4 train_hvd.py     # gradients in 4 bits

This is train.py and eight steps, each marked where it happens.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import qsgd_hpc.jax as hvd

EPOCHS, BATCH, RATE = 5, 50, 0.1

# Step 1: init.
hvd.init()
# Step 2: pin the GPU, before JAX looks for its devices.
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
gpu = gpus[hvd.local_rank() % len(gpus)] or str(hvd.local_rank())
os.environ["CUDA_VISIBLE_DEVICES"] = gpu

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]


def logits_of(params, x):
    hidden = jax.nn.relu(x @ params["first"] + params["first_bias"])
    return hidden @ params["last"] + params["last_bias"]


def loss_of(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), y).mean()


keys = jax.random.split(jax.random.key(1))
params = {
    "first": jax.random.normal(keys[0], (64, 128)) / 8,
    "first_bias": jnp.zeros(128),
    "last": jax.random.normal(keys[1], (128, 10)) / 11,
    "last_bias": jnp.zeros(10),
}
# Step 4: scale the learning rate, with a warm-up over the first epoch.
warm_up = len(x_train) // (BATCH * hvd.size())
rate = optax.linear_schedule(RATE, RATE * hvd.size(), warm_up)
optimizer = optax.sgd(rate, momentum=0.9)
# Step 5: wrap the optimizer.
optimizer = hvd.DistributedOptimizer(optimizer)
# Step 6: broadcast the initial state. The optimizer's state is made of the parameters.
params = hvd.broadcast_parameters(params, root_rank=0)
state = optimizer.init(params)


@jax.jit
def train_step(params, state, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


for epoch in range(EPOCHS):
    order = np.random.default_rng(epoch).permutation(len(x_train))
    # Step 3: shard the data, in equal parts.
    order = order[: len(order) // hvd.size() * hvd.size()]
    order = order[hvd.rank() :: hvd.size()]
    losses = []
    for begin in range(0, len(order), BATCH):
        batch = order[begin : begin + BATCH]
        params, state, loss = train_step(params, state, x_train[batch], y_train[batch])
        losses.append(loss)
    # Step 8: average the metrics. Every rank tests on all test images, so `correct` is exact.
    train_loss = hvd.allreduce(jnp.mean(jnp.array(losses)), name="loss")
    correct = np.mean(logits_of(params, x_test).argmax(1) == y_test)
    # Step 7: let rank 0 alone print.
    if hvd.rank() == 0:
        print(
            f"epoch {epoch + 1}: {len(losses)} steps, loss {train_loss:.4f}, "
            f"test accuracy {correct:.2%}"
        )
# Step 7 again: and save.
if hvd.rank() == 0:
    np.savez("digits.npz", **params)
