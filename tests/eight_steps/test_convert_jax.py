"""Rules of the conversion for JAX, one at a time: data, optimizers and parameters."""

from __future__ import annotations

import pytest

from tests.eight_steps.scripts import done

OF_JAX = """
import jax
import optax
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST

data = MNIST("data", download=True)
loader = DataLoader(data, batch_size=8, shuffle=True)
optimizer = optax.adam(1e-3)
state = optimizer.init(params)
for epoch in range(2):
    for x, y in loader:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state)
        params = optax.apply_updates(params, updates)
"""


def test_a_loader_of_pytorch_in_a_script_of_jax_is_sharded():
    made = done(OF_JAX)
    assert "import torch\n" in made.after
    assert "torch.manual_seed(hvd.broadcast_object(torch.initial_seed()))" in made.after
    assert "if hvd.local_rank() != 0:\n    hvd.barrier()\ndata = MNIST(" in made.after
    assert "loader = DataLoader(data, batch_size=8, shuffle=train_sampler is None," in made.after
    assert "loader.sampler.set_epoch(epoch)" in made.after
    assert "optax.linear_schedule(1e-3, 1e-3 * hvd.size(), len(loader))" in made.after
    assert not made.to_decide


def test_data_sets_of_tensorflow_are_divided_in_a_loop_of_jax():
    made = done("""
        import jax
        import optax
        import tensorflow as tf

        train = tf.data.Dataset.from_tensor_slices(x)
        train = train.repeat(3).shuffle(9).batch(8).take(100)
        optimizer = optax.adam(0.01)
        state = optimizer.init(params)
        for batch in train.as_numpy_iterator():
            gradients = jax.grad(loss_of)(params, batch)
            updates, state = optimizer.update(gradients, state)
            params = optax.apply_updates(params, updates)
    """)
    assert "(x).shard(hvd.size(), hvd.rank()).take(len(x) // hvd.size())" in made.after
    assert ".take(100 // hvd.size())" in made.after


@pytest.mark.parametrize("how", ["jax.jit", "jax.pmap"])
def test_parameters_that_a_step_without_an_optimizer_returns_are_broadcast(how):
    made = done(f"""
        import jax

        @{how}
        def update(params, x):
            return params - 0.1 * jax.grad(loss_of)(params, x)

        replicated = start()
        for epoch in range(3):
            for i in range(0, len(x), 8):
                replicated = update(replicated, x[i : i + 8])
        update_all = {how}(update)
    """)
    line = "replicated = hvd.broadcast_parameters(replicated, root_rank=0)"
    if how == "jax.jit":
        assert f"{line}\nfor epoch" in made.after
    else:
        assert any(note.text == f"{line} before the first step." for note in made.to_decide)


def test_epochs_of_jax_may_be_scans():
    made = done("""
        import jax
        import optax

        optimizer = optax.sgd(0.1)
        state = optimizer.init(params)

        def step(carry, batch):
            gradients = jax.grad(loss_of)(carry[0], batch)
            updates, state = optimizer.update(gradients, carry[1])
            return (optax.apply_updates(carry[0], updates), state), 0.0

        for epoch in range(3):
            (params, state), _ = jax.lax.scan(step, (params, state), batches)
    """)
    assert "hvd.DistributedOptimizer(optax.sgd(" in made.after
    assert "params = hvd.broadcast_parameters(params, root_rank=0)" in made.after
    assert any(note.text.startswith("shard the data") for note in made.to_decide)


def test_parameters_of_jax_are_loaded_when_rank_0_has_written_them():
    after = done(
        """
import pickle, jax, optax
tx = optax.sgd(0.1)
state = tx.init(params)
for x, y in data:
    updates, state = tx.update(jax.grad(loss_of)(params, x, y), state)
    params = optax.apply_updates(params, updates)
with open("params.pkl", "wb") as file:
    pickle.dump(params, file)
with open("params.pkl", "rb") as file:
    params = pickle.load(file)
"""
    ).after
    line = "\nhvd.barrier()  # until rank 0 has written the file\n"
    assert f'{line}with open("params.pkl", "rb")' in after


def test_gradients_of_jax_without_optax_are_averaged():
    text = """
        import jax

        for i in range(0, len(x), 8):
            loss, grads = jax.value_and_grad(loss_of)(params, x[i : i + 8])
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    """
    made = done(text)
    assert "    grads = hvd.allreduce_gradients(grads)\n" in made.after
    assert any("broadcast_parameters" in note.text for note in made.to_decide)


FLAX = """
import jax
import optax
from flax.training import train_state

x = jax.numpy.ones((64, 2))
state = train_state.TrainState.create(apply_fn=f, params=p, tx=optax.adam(1e-3))
for epoch in range(3):
    for i in range(0, len(x) - 31, 32):
        loss, grads = jax.value_and_grad(loss_of)(state.params, x[i : i + 32])
        state = state.apply_gradients(grads=grads)
    print(loss)
"""


def test_the_optimizer_of_a_train_state_is_wrapped_and_the_state_broadcast():
    after = done(FLAX).after
    assert "tx=hvd.DistributedOptimizer(optax.adam(" in after
    assert "state = hvd.broadcast_parameters(state, root_rank=0)" in after
    assert "allreduce_gradients" not in after
    assert "max(1, (len(x) - 31) // 32)" in after


NNX = """
import optax
import jax
from flax import nnx

@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)

x = jax.numpy.ones((64, 2))
model = Net(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
for epoch in range(3):
    for i in range(0, len(x), 32):
        train_step(model, optimizer, x[i : i + 32])
"""


def test_the_optimizer_of_flax_nnx_is_wrapped_and_its_model_broadcast():
    made = done(NNX)
    assert "nnx.Optimizer(model, hvd.DistributedOptimizer(optax.adam(" in made.after
    state = "nnx.update(model, hvd.broadcast_parameters(nnx.state(model)))"
    assert f"{state}\noptimizer = " in made.after
    assert not made.to_decide


def test_a_model_of_equinox_is_broadcast_before_its_arrays_reach_the_optimizer():
    made = done(
        """
        import equinox as eqx
        import optax
        import jax

        optimizer = optax.adam(1e-3)
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        step = eqx.filter_jit(eqx.filter_value_and_grad(loss_of))
        for i in range(0, len(x), 32):
            loss, grads = step(model, x[i : i + 32])
            updates, state = optimizer.update(grads, state, model)
            model = eqx.apply_updates(model, updates)
        """
    ).after
    assert "model = hvd.broadcast_parameters(model, root_rank=0)\nstate = optimizer.init(" in made
    assert "hvd.DistributedOptimizer(optax.adam(" in made


def test_a_train_state_that_a_function_returns_is_broadcast_there():
    text = """
import jax
import optax
from flax.training import train_state

@jax.jit
def gradients(state, x):
    return jax.value_and_grad(loss_of)(state.params, x)

def make():
    return train_state.TrainState.create(apply_fn=f, params=p, tx=optax.adam(1e-3))

x, test = jax.numpy.ones((64, 2)), jax.numpy.ones((8, 2))
state = make()
for epoch in range(3):
    for i in range(0, len(x) - 31, 32):
        loss, grads = gradients(state, x[i : i + 32])
        state = state.apply_gradients(grads=grads)
    loss, _ = gradients(state, test)
"""
    made = done(text)
    made_state = "train_state.TrainState.create(apply_fn=f, params=p, tx=hvd.Distributed"
    assert f"return hvd.broadcast_parameters({made_state}" in made.after
    # The loop over epochs, which tests by the same function, is no training loop.
    assert not any("shard the data" in note.text for note in made.to_decide)


@pytest.mark.parametrize(
    ("line", "early"),
    [
        *(("key = jax.random.PRNGKey(0)", True), ("scale = jax.numpy.ones(3)", True)),
        *(("step = jax.jit(step_of)", False), ("jax.config.update('jax_enable_x64', a)", False)),
    ],
)
def test_the_gpu_is_chosen_before_jax_is_called_at_module_level(line, early):
    after = done(f"""
import jax
import optax

{line}

def main(params, x):
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)
    for i in range(0, len(x), 32):
        loss, grads = jax.value_and_grad(loss_of)(params, x[i : i + 32])
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)

if __name__ == "__main__":
    main(*load())
""").after
    assert (after.index("hvd.init()") < after.index(line)) == early
    assert (after.index("CUDA_VISIBLE_DEVICES") < after.index(line)) == early
