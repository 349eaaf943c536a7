"""An MLP in JAX and optax."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
import os
import qsgd_hpc.jax as hvd

# Step 1: init. From here on every rank knows its number and how many there are.
hvd.init()
# Step 2: pin the GPU. The ranks of a node each take their own.
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
gpu = gpus[hvd.local_rank() % len(gpus)] or str(hvd.local_rank())
os.environ["CUDA_VISIBLE_DEVICES"] = gpu

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
# Step 3: shard the data. Rank r trains on samples r, r + size, r + 2 size, ...; all ranks have
# the same number.
shard = slice(hvd.rank(), len(x_train) // hvd.size() * hvd.size(), hvd.size())
x_train, y_train = x_train[shard], y_train[shard]
x_test, y_test = x[1600:], y[1600:]

params = init_params(jax.random.PRNGKey(0), [64, 64, 10])
# Step 5: wrap the optimizer. Each step uses the mean of all ranks' gradients.
# Step 4: scale the learning rate. A batch hvd.size() times larger needs steps hvd.size() times
# larger. The rate rises from one rank's to that of all ranks over the first epoch.
optimizer = hvd.DistributedOptimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(LEARNING_RATE, LEARNING_RATE * hvd.size(), max(1, len(x_train) // BATCH)))))
# Step 6: broadcast the initial state. Every rank starts with rank 0's values.
params = hvd.broadcast_parameters(params, root_rank=0)
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
    # Step 8: average the metrics. Every rank has summed over its own shard; now sum over all
    # ranks.
    total = sum(hvd.allgather_object(total)) / hvd.size()
    # Step 7: let rank 0 alone print and save. Otherwise every line would appear once per rank.
    if hvd.rank() == 0:
        print(f"epoch {epoch} loss {total / (len(x_train) // BATCH):.6f}")

# Every rank takes part in computing what rank 0 prints.
printed = ("accuracy", float((forward(params, x_test).argmax(1) == y_test).mean()))
# Step 7: let rank 0 alone print and save. All ranks have the same state, so one copy is enough.
if hvd.rank() == 0:
    print(*printed)
    with open("qsgd_convert_params.pkl", "wb") as f:
        pickle.dump(jax.device_get(params), f)
