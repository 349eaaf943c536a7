"""An MLP in JAX and optax."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

EPOCHS = 5
BATCH = 32
LEARNING_RATE = 2e-3


def init_params(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) / np.sqrt(m), "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:])
    ]


def forward(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()


x, y = load_digits(return_X_y=True)
x, y = jnp.asarray(x / 16, jnp.float32), jnp.asarray(y)
x_train, y_train = x[:1600], y[:1600]
x_test, y_test = x[1600:], y[1600:]

params = init_params(jax.random.PRNGKey(0), [64, 64, 10])
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
opt_state = optimizer.init(params)


@jax.jit
def step(params, opt_state, xb, yb):
    loss, grads = jax.value_and_grad(loss_fn)(params, xb, yb)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


rng = np.random.default_rng(0)
for epoch in range(EPOCHS):
    order = rng.permutation(len(x_train))
    total = 0.0
    for i in range(0, len(x_train), BATCH):
        batch = order[i:i + BATCH]
        params, opt_state, loss = step(params, opt_state, x_train[batch], y_train[batch])
        total += float(loss)
    print(f"epoch {epoch} loss {total / (len(x_train) // BATCH):.6f}")

print("accuracy", float((forward(params, x_test).argmax(1) == y_test).mean()))
with open("qsgd_convert_params.pkl", "wb") as f:
    pickle.dump(jax.device_get(params), f)
