"""What training on a single rank, which reduces no gradients, leaves unchanged and keeps."""

from __future__ import annotations

import pytest
import torch

import qsgd_hpc.torch as hvd
from qsgd_hpc.frameworks import step_mark

STEPS = 4


@pytest.fixture(autouse=True)
def one_rank():
    hvd.init()
    if hvd.size() > 1:
        pytest.skip("needs one rank")


def torch_steps(**options):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1, 1 + i, p.numel()).reshape(p.shape))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 / (step + 3))).square().sum().backward()
        optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


def torch_adasum():
    return torch_steps(op=hvd.Adasum)


def torch_sparse():
    model = torch.nn.Embedding(7, 2, sparse=True)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 14).reshape(7, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.tensor([step, step, 5])).square().sum().backward()
        optimizer.step()
    return [model.weight.detach().numpy()]


def tensorflow_steps(run=lambda step: step):
    tf = pytest.importorskip("tensorflow")
    import qsgd_hpc.tensorflow as tf_hvd

    variables = [tf.Variable([[1.0, 2.0]]), tf.Variable(3.0), tf.Variable([[1.0], [4.0], [2.0]])]

    @run
    def step(rows):
        with tf_hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            picked = tf.gather(variables[2], rows)  # its gradient is sparse
            loss = tf.reduce_sum((picked @ variables[0] + variables[1]) ** 2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * tf.convert_to_tensor(gradient))

    for i in range(STEPS):
        step(tf.constant([i % 3, 1]))
    return [v.numpy() for v in variables]


def tensorflow_graph():
    tf = pytest.importorskip("tensorflow")
    return tensorflow_steps(tf.function)


def tensorflow_adasum():
    tf = pytest.importorskip("tensorflow")
    import qsgd_hpc.tensorflow as tf_hvd

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=[1.0, 2.0])
        inner = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        optimizer = tf_hvd.DistributedOptimizer(inner, op=tf_hvd.Adasum)
        step = optimizer.minimize(tf.reduce_sum(variable**2), var_list=[variable])
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(STEPS):
            session.run(step)
        return [session.run(variable)]


def jax_steps(run=lambda step: step):
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    import qsgd_hpc.jax as jax_hvd

    optimizer = jax_hvd.DistributedOptimizer(optax.sgd(0.1))
    values = {"w": jax.numpy.linspace(-1, 1, 6).reshape(2, 3), "b": jax.numpy.ones(3)}

    @run
    def step(values, state, x):
        gradients = jax.grad(lambda v: ((x @ v["w"] + v["b"]) ** 2).sum())(values)
        updates, state = optimizer.update(gradients, state, values)
        return optax.apply_updates(values, updates), state

    state = optimizer.init(values)
    for i in range(STEPS):
        values, state = step(values, state, jax.numpy.full((2, 2), 1.0 / (i + 3)))
    return [jax.device_get(values[name]) for name in sorted(values)]


def jax_compiled():
    jax = pytest.importorskip("jax")
    return jax_steps(jax.jit)


TRAININGS = (
    torch_steps,
    torch_adasum,
    torch_sparse,
    tensorflow_steps,
    tensorflow_graph,
    tensorflow_adasum,
    jax_steps,
    jax_compiled,
)


@pytest.mark.parametrize("train", TRAININGS, ids=lambda f: f.__name__)
def test_a_study_sees_every_step_and_changes_no_bit(train, monkeypatch, tmp_path):
    monkeypatch.setattr(step_mark, "_metered", False)  # by another test of this process
    without = train()
    monkeypatch.setenv("QSGD_RECORDS", str(tmp_path / "records.jsonl"))
    hvd.shutdown()
    hvd.init()
    seen = train()
    assert hvd.step_profile()["steps"] == STEPS
    for one, other in zip(without, seen, strict=True):
        assert one.tobytes() == other.tobytes()
    monkeypatch.delenv("QSGD_RECORDS")
    hvd.shutdown()  # leaves no record where none is asked for
    hvd.init()


def test_residuals_on_one_rank_are_kept_for_the_next_checkpoint_with_a_warning():
    saved = {"gradient.weight": torch.ones(6)}
    with pytest.warns(UserWarning, match="1 tensor.s. .* one rank .* does not add it"):
        hvd.load_error_feedback_state(saved)
    assert torch.equal(hvd.error_feedback_state()["gradient.weight"], saved["gradient.weight"])
    hvd.load_error_feedback_state({})  # nothing to warn of
