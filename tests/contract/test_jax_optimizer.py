"""DistributedOptimizer over optax, and equal beginnings; see conftest.py."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest

from tests.contract.training import needs_ranks

pytestmark = pytest.mark.full

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

import qsgd_hpc.jax as hvd  # noqa: E402

PARAMS = {
    "dense": [{"kernel": (6, 64), "bias": (64,)}, {"kernel": (64, 3), "bias": (3,)}],
    "scale": (),
}


@pytest.fixture(scope="module", autouse=True)
def world():
    hvd.init()


def parameters(seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(random.standard_normal(shape) / 4, jnp.float32),
        PARAMS,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def batch(ranks, step):
    random = [np.random.default_rng([step, rank]) for rank in ranks]
    x = np.concatenate([r.standard_normal((8, 6)) for r in random]).astype(np.float32)
    return x, np.stack([x.sum(1), x[:, 0], x[:, 1] * x[:, 2]], 1)


def loss(params, x, y):
    for layer in params["dense"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean((params["scale"] * x - y) ** 2)


def trained(optimizer, ranks, steps=4, jitted=True):
    params = parameters()
    state = optimizer.init(params)

    def step(params, state, x, y):
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1)) if jitted else step
    for i in range(steps):
        params, state = step(params, state, *batch(ranks, i))
    return jax.block_until_ready((params, state))


def assert_close(tree, expected, **tolerance):
    for found, right in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, right, **tolerance)


def assert_replicas_are_identical(tree):
    mine = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    assert all(other == mine for other in hvd.allgather_object(mine))


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("options", [{}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}])
def test_ranks_train_as_one_process_with_all_their_data(options, jitted):
    params, state = trained(
        hvd.DistributedOptimizer(optax.adam(0.01), **options), [hvd.rank()], jitted=jitted
    )
    right, right_state = trained(optax.adam(0.01), range(hvd.size()))
    assert_replicas_are_identical((params, state))
    assert_close(params, right, atol=2e-5)
    assert jax.tree.structure(state) == jax.tree.structure(right_state)


def test_groups_by_name_are_reduced_together():
    groups = [["dense.0.kernel", "scale"], ["dense.1.bias"]]
    params, _ = trained(hvd.DistributedOptimizer(optax.sgd(0.1), groups=groups), [hvd.rank()])
    assert_close(params, trained(optax.sgd(0.1), range(hvd.size()))[0], atol=2e-5)
    if hvd.size() > 1:
        with pytest.raises(ValueError, match=r"dense\.0\.bias"):
            trained(hvd.DistributedOptimizer(optax.sgd(0.1), groups=[["kernel"]]), [hvd.rank()])


@needs_ranks(2)
def test_compressed_gradients_keep_replicas_identical_and_send_less():
    def bytes_of(**options):
        before = hvd.communication_stats()["wire_bytes"]
        params, _ = trained(hvd.DistributedOptimizer(optax.adam(0.01), **options), [hvd.rank()], 8)
        assert_replicas_are_identical(params)
        return hvd.communication_stats()["wire_bytes"] - before, params

    plain, exact = bytes_of()
    coded, params = bytes_of(compression=hvd.Compression.qsgd(bits=4, min_elements=0))
    assert coded < 0.75 * plain  # most of these few bytes are names and one-dimensional gradients
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (params, exact)), strict=True))
    assert any("dense.0.kernel" in name for name in hvd.compression_stats())
    rotated, _ = bytes_of(compression=hvd.Compression.eden(bits=3, min_elements=0))
    assert rotated < 0.75 * plain
    _, halved = bytes_of(compression=hvd.Compression.fp16)
    assert_close(halved, exact, atol=5e-3)


@needs_ranks(2)
def test_what_depends_on_the_loss_is_decided_by_all_ranks_losses():
    plateau = optax.contrib.reduce_on_plateau(patience=1, rtol=1e-2, factor=0.7)
    optimizer = hvd.DistributedOptimizer(optax.chain(optax.sgd(0.05), plateau))
    params = parameters()
    state = optimizer.init(params)
    for i in range(6):
        value = jnp.float32(1.0 + (i if hvd.rank() == 0 else -i))  # worse here, better there
        gradients = jax.grad(loss)(params, *batch([hvd.rank()], i))
        updates, state = optimizer.update(gradients, state, params, value=value)
        params = optax.apply_updates(params, updates)
    assert_replicas_are_identical((params, state))
    search = hvd.DistributedOptimizer(optax.lbfgs())
    with pytest.raises(ValueError, match="line search"):
        search.update(
            params, search.init(params), params, value=value, grad=params, value_fn=lambda p: value
        )


def test_backward_passes_add_up_before_one_reduction():
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), backward_passes_per_step=2)
    before = hvd.communication_stats()["allreduces"]
    params, _ = trained(optimizer, [hvd.rank()], steps=2)
    reduced = hvd.communication_stats()["allreduces"] - before
    assert reduced == (5 if hvd.size() > 1 else 0)
    start = parameters()
    summed = jax.tree.map(
        lambda *g: sum(g),
        *(jax.grad(loss)(start, *batch(range(hvd.size()), i)) for i in range(2)),
    )
    assert_close(params, jax.tree.map(lambda p, g: p - 0.1 * g, start, summed), atol=2e-5)


def test_adasum_combines_the_updates():
    params, _ = trained(hvd.DistributedOptimizer(optax.sgd(0.1), op=hvd.Adasum), [0], steps=1)
    assert_close(params, trained(optax.sgd(0.1), [0], steps=1)[0], atol=1e-5)


@needs_ranks(2)
def test_nonfinite_gradients_are_named_on_every_rank_or_handed_on():
    gradients = {"fine": jnp.ones(3), "bad": jnp.full(3, np.nan if hvd.rank() == 1 else 1.0)}
    reduce = jax.jit(lambda g: hvd.allreduce_gradients(g, name="checked"))
    with (
        pytest.raises(hvd.NonFiniteGradientError, match=r"bad.*rank\(s\) 1"),
        hvd.translated_errors(),
    ):
        jax.block_until_ready(reduce(gradients))
    optimizer = hvd.DistributedOptimizer(
        optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=9), check_finite=False
    )
    updates, state = jax.jit(optimizer.update)(gradients, optimizer.init(gradients))
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
    assert not state.last_finite


@needs_ranks(2)
def test_a_rank_outside_the_set_trains_on_its_own():
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    only = hvd.add_process_set([0])
    params, _ = trained(hvd.DistributedOptimizer(optax.sgd(0.1), process_set=only), [hvd.rank()])
    assert_close(params, trained(optax.sgd(0.1), [hvd.rank()])[0], atol=1e-6)
    hvd.remove_process_set(only)


def test_every_leaf_takes_the_roots_value():
    root = hvd.size() - 1
    tree = {
        "params": parameters(hvd.rank()),
        "key": jax.random.key(hvd.rank()),
        "numpy": np.full(3, hvd.rank()),
        "half": jnp.full(2, hvd.rank(), jnp.bfloat16),
        "step": hvd.rank(),
        "name": f"rank {hvd.rank()}",
        "none": None,
    }
    found = hvd.broadcast_parameters(tree, root_rank=root)
    assert_close(found["params"], parameters(root), rtol=0)
    assert (
        jax.random.key_data(found["key"]).tolist()
        == jax.random.key_data(jax.random.key(root)).tolist()
    )
    assert isinstance(found["numpy"], np.ndarray)
    assert found["numpy"].tolist() == [root] * 3
    assert found["half"].dtype == jnp.bfloat16
    assert (found["step"], found["name"], found["none"]) == (root, f"rank {root}", None)
    optimizer = optax.adam(0.1)
    state = optimizer.init(parameters(hvd.rank()))
    same = hvd.broadcast_optimizer_state(state, root)
    assert jax.tree.structure(same) == jax.tree.structure(state)
    with pytest.raises(ValueError, match="outside"):
        jax.jit(hvd.broadcast_parameters)(parameters())


def test_numpy_leaves_keep_their_types_and_all_bits():
    root = hvd.size() - 1

    def leaves(rank):
        return {
            "steps": np.array(2**40 + rank),
            "mean": np.full(2, rank + 1 / 3),
            "words": np.array(["epoch" * (rank + 1)]),
        }

    found = hvd.broadcast_parameters(leaves(hvd.rank()), root_rank=root)
    for name, wanted in leaves(root).items():
        assert found[name].dtype == wanted.dtype
        np.testing.assert_array_equal(found[name], wanted)


def test_an_elastic_state_restores_values_and_types_whatever_happened_to_them(tmp_path):
    def fresh():
        return {
            "key": jax.random.key(1),
            "half": jnp.ones(2, jnp.bfloat16),
            "seen": np.zeros(2),
            "list": [1],
        }

    def assert_as_committed(state):
        tree, wanted = state.tree, fresh()
        for name, value in wanted.items():
            assert isinstance(tree[name], jax.Array) == isinstance(value, jax.Array), name
        assert (jax.random.key_data(tree["key"]) == jax.random.key_data(wanted["key"])).all()
        assert tree["half"].dtype == jnp.bfloat16
        assert (tree["half"].tolist(), tree["seen"].tolist(), tree["list"]) == ([1, 1], [0, 0], [1])
        assert isinstance(state.step, jax.Array)
        assert int(state.step) == 7

    state = hvd.elastic.JaxState(tree=fresh(), step=jnp.int32(7))
    state.sync()
    for _ in range(2):  # a commit can be restored repeatedly
        assert_as_committed(state)
        jax.jit(lambda x: x + 1, donate_argnums=0)(state.tree["half"])
        state.tree["seen"] += 1
        state.tree["list"].append(2)
        state.tree["key"] = None
        state.step += 1
        state.restore()
    state.step = 8
    state.restore()
    assert_as_committed(state)
    state.keep_in(hvd.broadcast_object(tmp_path / "commits"))
    state.commit()
    state.tree, state.step = {name: None for name in fresh()}, None
    assert state.resume()
    state.sync()
    assert_as_committed(state)


def test_an_elastic_state_holds_trees_with_functions_in_their_structure(tmp_path):
    """As flax's TrainState, which holds the functions of the model and of the optimizer."""

    @jax.tree_util.register_pytree_node_class
    class Train:
        def __init__(self, params, apply):
            self.params, self.apply = params, apply

        def tree_flatten(self):
            return (self.params,), self.apply

        @classmethod
        def tree_unflatten(cls, apply, leaves):
            return cls(*leaves, apply)

    def state():
        return hvd.elastic.JaxState(train=Train(jnp.ones(3) * hvd.rank(), lambda x: x), epoch=1)

    first = state()
    first.sync()
    first.keep_in(hvd.broadcast_object(tmp_path / "commits"))
    first.train = Train(jnp.full(3, 7.0), first.train.apply)
    first.commit()
    again = state()
    again.keep_in(hvd.broadcast_object(tmp_path / "commits"))
    assert again.resume()
    again.sync()
    assert again.train.params.tolist() == [7, 7, 7]
    assert again.train.apply(3) == 3


def test_a_resumed_state_whose_arrays_have_other_shapes_is_reported(tmp_path, capfd):
    file = hvd.broadcast_object(tmp_path / "commits")

    def state(width, **more):
        made = hvd.elastic.JaxState(params={"w": jnp.ones((2, width)), **more}, key=None)
        made.keep_in(file)
        return made

    state(3, b=jnp.ones(3)).commit()
    for again, difference in (
        (state(3, b=jnp.ones(3)), ""),
        (state(4, b=jnp.ones(4)), "params['b'] is (3,) in the file, (4,) in the script"),
        (state(3), "params['b'] is (3,) in the file, no array in the script"),
    ):
        capfd.readouterr()
        assert again.resume()
        again.sync()
        assert again.params["w"].shape == (2, 3)
        told = capfd.readouterr().err
        if hvd.rank() == 0:
            assert ("remove the file" in told) == bool(difference)
            assert difference in told


@needs_ranks(2)
def test_elastic_training_returns_to_its_last_commit():
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    params = parameters(hvd.rank())
    state = hvd.elastic.JaxState(params=params, opt_state=optimizer.init(params), step=0)
    attempts = []

    @jax.jit
    def step(params, opt_state, x, y):
        updates, opt_state = optimizer.update(jax.grad(loss)(params, x, y), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @hvd.elastic.run
    def train(state):
        attempts.append(state.step)
        while state.step < 4:
            data = batch([hvd.rank()], state.step)
            state.params, state.opt_state = step(state.params, state.opt_state, *data)
            state.step += 1
            if state.step == 2:
                state.commit()
            if state.step == 3 and len(attempts) == 1:
                bad = jax.jit(lambda x: hvd.allreduce(x, name="fails"))
                jax.block_until_ready(bad(jnp.zeros(2 + hvd.rank() % 2)))

    train(state)
    assert attempts == [0, 2]
    assert_replicas_are_identical(state.params)


def test_arguments_that_cannot_be_are_refused():
    for wrong in ("adam", optax.adam, {"w": jnp.ones(3)}):
        with pytest.raises(hvd.UsageError, match=r"such as optax\.adam"):
            hvd.DistributedOptimizer(wrong)
    with pytest.raises(hvd.UsageError, match=r"pass optimizer\.init"):
        hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(optax.adam(0.1)))
    for options, why in (
        ({"op": hvd.Max}, "choose hvd.Average"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"num_groups": 1, "groups": 2}, "not both"),
        ({"compression": 4}, "hvd.Compression"),
    ):
        with pytest.raises(ValueError, match=why):
            hvd.DistributedOptimizer(optax.sgd(0.1), **options)


@needs_ranks(2)
def test_an_optimizer_for_two_models_warns_of_their_error_feedback():
    compression = hvd.Compression.qsgd(bits=2, min_elements=64, error_feedback=True)
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), compression)
    first, second = parameters(1), parameters(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.init(first)
        jax.eval_shape(optimizer.init, first)
        optimizer.init(first)
    if hvd.rank() == 0:
        with pytest.warns(UserWarning, match="wrap an optimizer for each model"):
            optimizer.init(second)


@needs_ranks(2)
@pytest.mark.parametrize("loads", [False, True])
def test_a_second_training_begins_without_the_error_feedback_of_the_first(loads):
    compression = hvd.Compression.topk(ratio=0.1, min_elements=1)
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), compression)
    slopes = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)), jnp.float32)
    update = jax.jit(optimizer.update)

    def moved(factor):
        w = {"w": jnp.zeros_like(slopes)}
        updates, _ = update({"w": factor * slopes}, optimizer.init(w), w)
        return np.abs(updates["w"]).max()

    for _ in range(2):  # traced once
        assert moved(1.0) > 0
        assert loads or moved(0.0) == 0
    if loads:  # the state of a job that this one continues
        hvd.load_error_feedback_state(hvd.error_feedback_state())
    assert (moved(0.0) > 0) == loads


@needs_ranks(2)
def test_an_optimizer_that_is_gone_leaves_no_error_feedback():
    compression = hvd.Compression.topk(ratio=0.1, min_elements=1)
    w = {"deleted": jnp.ones((8, 8))}

    def step():
        optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), compression)
        jax.block_until_ready(optimizer.update(w, optimizer.init(w), w))

    for _ in range(3):
        step()
        gc.collect()
    assert sum("deleted" in name for name in hvd.error_feedback_state()) == 1
