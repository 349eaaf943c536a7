"""Train with JAX and optax, with all steps that it has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qsgd_hpc.jax as hvd

hvd.init()
random = np.random.default_rng(hvd.rank())
params = {"kernel": jnp.asarray(random.standard_normal((8, 1)), jnp.float32)}
params = hvd.broadcast_parameters(params)
optimizer = hvd.DistributedOptimizer(optax.adam(0.01 * hvd.size()))
state = optimizer.init(params)


def loss_of(params, x, y):
    return jnp.mean((x @ params["kernel"] - y) ** 2)


@jax.jit
def step(params, state, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, hvd.allreduce(loss, name="loss")


for _ in range(100):
    x = random.standard_normal((32, 8)).astype(np.float32)
    params, state, loss = step(params, state, x, x.sum(1, keepdims=True))

if hvd.rank() == 0:
    print(f"loss after 100 steps on {hvd.size()} ranks: {loss:.4f}")
    np.savez("trained.npz", **params)
