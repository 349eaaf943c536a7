"""Train a small network on scikit-learn's digits with JAX and optax, in one process.

    python train.py

train_hvd.py is this script for many ranks: compare the two with `diff`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

EPOCHS, BATCH, RATE = 5, 50, 0.1

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
optimizer = optax.sgd(RATE, momentum=0.9)
state = optimizer.init(params)


@jax.jit
def train_step(params, state, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


for epoch in range(EPOCHS):
    order = np.random.default_rng(epoch).permutation(len(x_train))
    losses = []
    for begin in range(0, len(order), BATCH):
        batch = order[begin : begin + BATCH]
        params, state, loss = train_step(params, state, x_train[batch], y_train[batch])
        losses.append(loss)
    train_loss = jnp.mean(jnp.array(losses))
    correct = np.mean(logits_of(params, x_test).argmax(1) == y_test)
    print(
        f"epoch {epoch + 1}: {len(losses)} steps, loss {train_loss:.4f}, "
        f"test accuracy {correct:.2%}"
    )
np.savez("digits.npz", **params)
