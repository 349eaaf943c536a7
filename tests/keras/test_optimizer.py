"""What Keras's ``fit`` promises with ``hvd.DistributedOptimizer``, for every optimizer of Keras.

Runs as plain ``pytest`` on one rank, and under ``qsgd-hpc run -np N python -m pytest`` on more;
``KERAS_BACKEND`` says what Keras runs on.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import warnings

import keras
import numpy as np
import pytest

import qsgd_hpc.keras as hvd
from qsgd_hpc.keras.optimizer import synchronization_of
from tests.keras.training import (
    BATCH,
    ROWS,
    SHIPPED,
    compiled,
    fit,
    flat,
    make,
    network,
    replicas_are_identical,
    rows,
)

# Keras's own, on some backends.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BACKEND = keras.backend.backend()
_NO_LOSS = {"loss": np.float32(0)}
hvd.init()
several_ranks = pytest.mark.skipif(hvd.size() < 2, reason="needs 2 ranks or more")


def of(optimizer, **options):
    return hvd.DistributedOptimizer(optimizer, **options)


def of_several(choose):
    """Return an optimizer of distributed ones: of a map, or of a function of the variable."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    weights, biases = of(keras.optimizers.SGD(0.01)), of(keras.optimizers.Adam(0.01))
    members = keras.optimizers.OptimizerMap(weights, {".*bias": biases})
    if choose:
        return keras.optimizers.MultiOptimizer(lambda v: members[v.path])
    return keras.optimizers.MultiOptimizer(members)


@several_ranks
@pytest.mark.parametrize("callback", [False, True], ids=["alone", "broadcast"])
@pytest.mark.parametrize("kind", SHIPPED)
def test_unequal_data_ends_in_equal_weights_for_every_optimizer(kind, callback):
    # JAX cannot look at weights within a step: there, equal weights to begin with are the user's.
    seed = hvd.rank() if callback or BACKEND != "jax" else 0
    model = compiled(of(make(kind)), seed)
    before = flat(network(0).get_weights())
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if callback else []
    fit(model, callbacks=callbacks)
    assert replicas_are_identical(model)
    assert not np.allclose(flat(model.get_weights()), before, atol=1e-4)


@several_ranks
@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.Adam])
@pytest.mark.parametrize(
    "options",
    [{}, {"run_eagerly": True}, {"steps_per_execution": 2}],
    ids=["compiled", "eagerly", "steps"],
)
def test_fit_equals_one_process_with_the_whole_batch(kind, options):
    if BACKEND == "torch" and "steps_per_execution" in options:
        pytest.skip("Keras has no steps_per_execution on torch")
    model = compiled(of(kind(0.02)), **options)
    serial = compiled(kind(0.02), **options)
    fit(model)
    fit(serial, rows(range(hvd.size())), batch_size=BATCH * hvd.size())
    assert replicas_are_identical(model)
    assert np.allclose(flat(model.get_weights()), flat(serial.get_weights()), atol=1e-4)


@pytest.mark.skipif(hvd.size() > 1, reason="needs one rank")
def test_a_study_sees_the_steps_of_a_single_rank(monkeypatch, tmp_path):
    monkeypatch.setenv("QSGD_RECORDS", str(tmp_path / "records.jsonl"))
    hvd.shutdown()
    hvd.init()
    fit(compiled(of(keras.optimizers.SGD(0.1))))
    assert hvd.step_profile()["steps"] == 2 * ROWS // BATCH
    monkeypatch.delenv("QSGD_RECORDS")
    hvd.shutdown()  # leaves no record where none is asked for
    hvd.init()


@several_ranks
def test_ranks_of_a_process_set_train_as_one_process_with_their_data():
    sets = [hvd.ProcessSet(list(range(first, hvd.size(), 2))) for first in (0, 1)]
    hvd.shutdown()
    hvd.init(process_sets=sets)
    mine = sets[hvd.rank() % 2]
    model = compiled(of(keras.optimizers.SGD(0.1), process_set=mine))
    serial = compiled(keras.optimizers.SGD(0.1))
    fit(model)
    fit(serial, rows(mine.ranks), batch_size=BATCH * len(mine.ranks))
    assert np.allclose(flat(model.get_weights()), flat(serial.get_weights()), atol=1e-4)
    hvd.shutdown()
    hvd.init()


@pytest.mark.parametrize("average", [False, True])
def test_passes_add_up_before_one_reduction(average):
    passes, rate = 2, 0.02
    model = compiled(
        of(
            keras.optimizers.SGD(rate),
            backward_passes_per_step=passes,
            average_aggregated_gradients=average,
        )
    )
    serial = compiled(keras.optimizers.SGD(rate if average else rate * passes))
    fit(model)
    fit(serial, rows(range(hvd.size())), batch_size=passes * BATCH * hvd.size())
    assert np.allclose(flat(model.get_weights()), flat(serial.get_weights()), atol=1e-4)


@several_ranks
def test_a_model_that_changes_its_variables_by_itself_raises():
    class Bypassing(keras.Sequential):
        def train_step(self, *arguments):
            if BACKEND == "jax":
                (trainable, *others), _ = arguments
                return _NO_LOSS, ([v * (1 + hvd.rank()) for v in trainable], *others)
            for variable in self.trainable_variables:
                variable.assign(variable * (1.0 + hvd.rank()))
            return _NO_LOSS

    model = Bypassing(network().layers)
    model.compile(of(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(ValueError, match="no gradient was reduced"):
        fit(model)


def test_a_job_that_is_resumed_at_its_end_trains_nothing():
    model = compiled(of(keras.optimizers.SGD(0.1)), seed=hvd.rank())
    before = flat(model.get_weights())
    fit(model, epochs=3, initial_epoch=3)
    assert np.array_equal(flat(model.get_weights()), before)


def test_passes_that_end_before_a_reduction_are_no_error():
    fit(compiled(of(keras.optimizers.SGD(0.1), backward_passes_per_step=1000)))


@several_ranks
def test_layers_of_equal_names_in_nested_models_train_as_in_one_process():
    def ensemble():
        def member(name):
            x = keras.Input((4,))
            return keras.Model(x, keras.layers.Dense(1, name="out")(x), name=name)

        keras.utils.set_random_seed(0)
        x = keras.Input((4,))
        return keras.Model(x, keras.layers.Add()([member("first")(x), member("second")(x)]))

    def trained(optimizer, ranks):
        model = ensemble()
        model.compile(optimizer, "mse")
        data = np.concatenate([np.random.default_rng(r).standard_normal((8, 4)) for r in ranks])
        model.fit(data, data.sum(1, keepdims=True), batch_size=len(data), epochs=2, verbose=0)
        return flat(model.get_weights())

    alone = trained(keras.optimizers.SGD(0.1), range(hvd.size()))
    assert np.allclose(trained(of(keras.optimizers.SGD(0.1)), [hvd.rank()]), alone, atol=1e-5)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA cannot wait for ranks on TensorFlow only")
def test_a_model_that_was_saved_with_xla_is_loaded_without(tmp_path):
    model = compiled(keras.optimizers.SGD(0.1), jit_compile=True)
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras")
    assert not loaded.jit_compile
    fit(loaded)


@several_ranks
def test_replicas_that_come_apart_raise_and_name_variable_and_rank():
    model = compiled(of(keras.optimizers.SGD(0.1)))
    fit(model)
    if hvd.rank() == hvd.size() - 1:
        kernel = model.layers[1].kernel
        kernel.assign(kernel + 1.0)
    with pytest.raises(ValueError, match=rf"kernel' of rank {hvd.size() - 1} differs.*rank 0"):
        fit(model)


@several_ranks
def test_an_optimizer_that_clips_in_its_own_way_raises_at_once():
    class Odd(keras.optimizers.SGD):
        def _backend_apply_gradients(self, grads, trainable_variables):
            self._backend_update_step(grads, trainable_variables, self.learning_rate)

    model = compiled(of(Odd(0.1)))
    with pytest.raises(ValueError, match="gradients of this rank"):
        fit(model)


def test_gradients_are_clipped_after_they_are_averaged():
    model = compiled(of(keras.optimizers.SGD(0.1, global_clipnorm=0.01)))
    serial = compiled(keras.optimizers.SGD(0.1, global_clipnorm=0.01))
    fit(model)
    fit(serial, rows(range(hvd.size())), batch_size=BATCH * hvd.size())
    assert np.allclose(flat(model.get_weights()), flat(serial.get_weights()), atol=1e-5)


@several_ranks
@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA cannot wait for ranks on TensorFlow only")
@pytest.mark.parametrize("several", [False, True])
def test_keras_leaves_a_distributed_step_out_of_xla(several):
    optimizer = of_several(choose=False) if several else of(keras.optimizers.SGD(0.1))
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model = compiled(optimizer, jit_compile=True)
    fit(model)
    assert replicas_are_identical(model)
    assert compiled(keras.optimizers.SGD(0.1), jit_compile=True).jit_compile


@several_ranks
@pytest.mark.skipif(BACKEND != "torch", reason="torch.compile")
@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer])
def test_steps_that_torch_compiles_are_synchronised(kind, monkeypatch):
    import torch

    # Traces as the default backend does, which takes minutes to generate code.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    models = []
    for jit_compile in (False, True):
        models.append(compiled(of(make(kind)), hvd.rank(), jit_compile=jit_compile))
        fit(models[-1])
    assert replicas_are_identical(models[1])
    assert np.allclose(flat(models[0].get_weights()), flat(models[1].get_weights()), atol=1e-6)


SCALED = {
    "one": lambda: of(keras.optimizers.SGD(0.01)),
    "map": lambda: of_several(choose=False),
    "function": lambda: of_several(choose=True),
}


@several_ranks
@pytest.mark.parametrize("kind", SCALED)
def test_an_overflow_on_one_rank_is_one_on_all(kind):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(SCALED[kind]())
    finally:
        keras.config.set_dtype_policy(policy)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = rows([hvd.rank()])
    if hvd.rank() == 1:
        y = y.copy()
        y[:BATCH] = 1e30  # in the first batch
    fit(model, (x, y), epochs=1)
    assert replicas_are_identical(model)
    scale = float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale))
    assert scale == 2.0**14
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == len(x) // BATCH - 1


@several_ranks
@pytest.mark.skipif(BACKEND == "jax", reason="needs the callback there")
def test_every_rank_starts_with_the_scale_of_the_first():
    model = compiled(of(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(2.0 ** (5 + hvd.rank()))
    model.optimizer.step_counter.assign(hvd.rank())
    fit(model, epochs=1)
    assert float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale)) == 2.0**5
    steps = keras.ops.convert_to_numpy(model.optimizer.step_counter)
    assert int(steps) == ROWS // BATCH


@several_ranks
@pytest.mark.skipif(BACKEND != "tensorflow", reason="steps run in the program's order elsewhere")
def test_scalers_of_two_optimizers_in_one_step_ask_for_overflows_apart():
    import tensorflow as tf

    from qsgd_hpc.tensorflow.ops._run import operations_of

    models = [network(0), network(0)]
    scaled = [keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)) for _ in models]
    optimizers = [of(optimizer) for optimizer in scaled]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)

    def step():
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])

    graph = tf.function(step).get_concrete_function().graph
    collectives = [op for op in graph.get_operations() if op.type == "QsgdAllreduce"]
    names = [each.name for op in collectives for each in operations_of(op)]
    assert len(names) == len(set(names)) == len(models)


@several_ranks
@pytest.mark.parametrize("code", ["qsgd", "eden"])
def test_compressed_gradients_leave_replicas_identical(code):
    compression = getattr(hvd.Compression, code)(bits=4, min_elements=1)
    model = compiled(of(keras.optimizers.Adam(0.02), compression=compression))
    before = hvd.compression_stats()
    history = fit(model, epochs=4)
    assert replicas_are_identical(model)
    assert hvd.compression_stats() != before
    assert history.history["loss"][-1] < history.history["loss"][0]


@several_ranks
@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eagerly"])
def test_only_the_passes_that_update_variables_leave_a_compression_error(eagerly):
    slopes = np.random.default_rng(0).standard_normal((6, 64)).astype("float32")

    class Linear(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=slopes.shape, initializer="zeros", name="w")

        def call(self, x):
            return keras.ops.sum(self.w * slopes) + 0 * x

    passes, updates, name = 4, 5, f"accumulated_{eagerly}"
    code = hvd.Compression.topk(ratio=0.1, min_elements=1)
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=passes)
    model = keras.Sequential([keras.Input((1,)), Linear(name=name)])
    loss = {"loss": lambda _, out: out, "run_eagerly": eagerly}
    model.compile(of(optimizer, compression=code), **loss)
    ones = np.ones((passes * updates, 1), "float32")
    fit(model, (ones, ones), batch_size=1, epochs=1)
    [owed] = [r for n, r in hvd.error_feedback_state().items() if name in n]
    moved = owed.reshape(slopes.shape) - model.get_weights()[0]
    assert np.allclose(moved, updates * slopes, atol=1e-4)


@several_ranks
def test_local_layers_keep_their_own_gradients():
    model = network()
    last = model.layers[-1]
    model.compile(
        hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=last, scale_local_gradients=False
        ),
        "mse",
    )
    fit(model)
    kernels = hvd.allgather_object([np.array(layer.kernel) for layer in model.layers])
    shared, own = zip(*kernels, strict=True)
    assert all(np.array_equal(each, shared[0]) for each in shared)
    assert not np.array_equal(own[0], own[1])


@several_ranks
@pytest.mark.parametrize("how", ["local_layers", "local_variables", "first step"])
def test_local_layers_keep_their_own_optimizer_state(how):
    model = network()
    last, optimizer = model.layers[-1], keras.optimizers.Adam(0.1)
    local = None if how == "local_variables" else last
    model.compile(hvd.PartialDistributedOptimizer(optimizer, local_layers=local), "mse")
    model.optimizer.build(model.trainable_variables)
    state = [v for v in model.optimizer.variables if v.path.endswith("_momentum")]
    for each in state:
        each.assign(keras.ops.full_like(each, hvd.rank() + 1))
    if how == "first step":
        if keras.backend.backend() == "jax":
            pytest.skip("the callback alone broadcasts on JAX")
        model.optimizer._synchronization.begin(model.trainable_variables, state)
    else:
        variables = last.variables if how == "local_variables" else None
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=variables)
        callback.set_model(model)
        callback.on_train_begin()
    for each in state:
        own = f"/{last.path.replace('/', '_')}_" in each.path
        expected = hvd.rank() + 1 if own else 1
        assert (keras.ops.convert_to_numpy(each) == expected).all()


def test_no_layer_need_be_local():
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=None)
    assert isinstance(optimizer, keras.optimizers.SGD)


def test_what_is_no_layer_cannot_be_local():
    with pytest.raises(hvd.UsageError, match="local_layers has 3, which is not a layer"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[3])


@several_ranks
@pytest.mark.parametrize("groups", [1, "lists"])
def test_groups_change_no_result(groups):
    plain, model = compiled(of(keras.optimizers.SGD(0.1))), network()
    if groups == "lists":
        groups = [[model.layers[0].kernel, model.layers[1].bias]]
    model.compile(of(keras.optimizers.SGD(0.1), groups=groups), "mse")
    for each in (plain, model):
        fit(each)
    assert np.array_equal(flat(plain.get_weights()), flat(model.get_weights()))


@pytest.mark.parametrize("dense", [False, True])
def test_embeddings_train_alike_on_every_rank(dense):
    def model_with(optimizer):
        start = keras.initializers.RandomUniform(seed=1)
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Embedding(10, 4, embeddings_initializer=start)]
        )
        model.compile(optimizer, "mse")
        return model

    x = np.random.default_rng(0).integers(0, 10, (8 * hvd.size(), 2))
    y = np.random.default_rng(1).standard_normal((8 * hvd.size(), 2, 4)).astype("float32")
    model = model_with(of(keras.optimizers.SGD(0.5), sparse_as_dense=dense))
    serial = model_with(keras.optimizers.SGD(0.5))
    mine = slice(hvd.rank(), None, hvd.size())
    fit(model, (x[mine], y[mine]), batch_size=8)
    fit(serial, (x, y), batch_size=8 * hvd.size())
    assert replicas_are_identical(model)
    assert np.allclose(flat(model.get_weights()), flat(serial.get_weights()), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": hvd.Adasum}, "Average or hvd.Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "Average"),
        ({"num_groups": 1, "groups": 1}, "not both"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"compression": 4}, "hvd.Compression"),
    ],
)
def test_arguments_that_cannot_be_are_answered_with_the_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        of(keras.optimizers.SGD(0.1), **arguments)


def test_no_optimizer_cannot_be_wrapped():
    with pytest.raises(hvd.UsageError, match="pass an optimizer of Keras"):
        hvd.DistributedOptimizer(None)


def test_an_optimizer_is_wrapped_once():
    with pytest.raises(ValueError, match="wrap it once"):
        of(of(keras.optimizers.SGD(0.1)))


@pytest.mark.parametrize("choose", [False, True])
def test_a_copy_of_which_only_the_members_would_be_distributed_is_refused(choose):
    model = compiled(of_several(choose))
    model.optimizer.build(model.trainable_variables)
    for each in (model, model.optimizer):
        with pytest.raises(hvd.UsageError, match=r"DistributedOptimizer\(MultiOptimizer\("):
            copy.deepcopy(each)


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "broadcast_object", "save"])
def test_a_copy_of_a_model_trains_as_the_model_does(way, tmp_path):
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    fit(model)
    file = tmp_path / "model.keras"
    make = {
        "pickle": lambda: pickle.loads(pickle.dumps(model)),
        "deepcopy": lambda: copy.deepcopy(model),
        # The root keeps its own, and trains it with the others' copies.
        "broadcast_object": lambda: hvd.broadcast_object(model, hvd.size() - 1),
        "save": lambda: model.save(file) or hvd.load_model(file),
    }
    twin = make[way]()
    fit(twin)
    assert replicas_are_identical(twin)
    if way == "broadcast_object":
        return
    fit(model)
    np.testing.assert_allclose(flat(twin.get_weights()), flat(model.get_weights()), atol=1e-5)


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer])
def test_an_optimizer_is_pickled_and_copied_as_what_it_is(kind):
    optimizer = hvd.DistributedOptimizer(make(kind), gradient_predivide_factor=2.0)
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert synchronization_of(twin).reduction == synchronization_of(optimizer).reduction
        model = compiled(twin)
        fit(model)
        assert replicas_are_identical(model)
    grouped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=[[]])
    with pytest.raises(hvd.UsageError, match="pass the number of groups"):
        pickle.dumps(grouped)


@several_ranks
@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow traces a step twice")
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_gradients_have_the_same_names_on_ranks_that_have_loaded_their_optimizer(policy):
    code = hvd.Compression.qsgd(bits=2, min_elements=1)
    dtype = keras.DTypePolicy(policy)

    def trained(loaded):
        given = keras.Input((6,))
        layer = keras.layers.Dense(3, name="of_" + policy, dtype=dtype)
        model = keras.Model(given, layer(given))
        model.compile(of(keras.optimizers.Adam(0.1), compression=code), "mse")
        if loaded:
            model.optimizer.build(model.trainable_variables)
        fit(model, epochs=1)
        return model

    assert replicas_are_identical(trained(loaded=hvd.rank() == 0))
    model = trained(loaded=False)
    names = {name for name in hvd.error_feedback_state() if "of_" + policy in name}
    assert names == {f"gradient.{model.trainable_variables[0].path}"}


def steps_of_a_loop(model, optimizer, traced):
    """Train by two steps of a custom loop, on TensorFlow also in a ``tf.function``."""
    x, y = rows([hvd.rank()])

    def tensorflow_step():
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def torch_step():
        model.zero_grad()
        keras.losses.MeanSquaredError()(y, model(x)).backward()
        gradients = [v.value.grad for v in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)

    step = torch_step
    if BACKEND == "tensorflow":
        import tensorflow as tf

        step = tf.function(tensorflow_step) if traced else tensorflow_step
    for _ in range(2):
        step()


@several_ranks
@pytest.mark.skipif(BACKEND == "jax", reason="values are not broadcast within a step on JAX")
@pytest.mark.parametrize("loads", [0, 1])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_that_one_rank_has_loaded_is_that_of_the_first_rank_in_a_loop(
    loads, traced, scaled
):
    code = hvd.Compression.qsgd(bits=2, min_elements=1)
    model, optimizer = network(), of(keras.optimizers.Adam(0.1), compression=code)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    if hvd.rank() == loads:
        optimizer.build(model.trainable_variables)
        optimizer.iterations.assign(7)
    steps_of_a_loop(model, optimizer, traced)
    assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == (9 if loads == 0 else 2)
    assert replicas_are_identical(model)
    states = hvd.allgather_object(flat(map(keras.ops.convert_to_numpy, optimizer.variables)))
    assert all(np.array_equal(each, states[0]) for each in states)


@several_ranks
@pytest.mark.skipif(BACKEND == "jax", reason="values are not broadcast within a step on JAX")
def test_models_whose_variables_have_other_names_on_some_rank_raise_and_name_both():
    given = keras.Input((6,))
    name = "of_first" if hvd.rank() == 0 else "of_others"
    model = keras.Model(given, keras.layers.Dense(3, name=name)(given))
    model.compile(of(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(hvd.UsageError, match="'of_others/kernel' on rank 1 and 'of_first/kernel'"):
        fit(model)


@several_ranks
@pytest.mark.parametrize("names", [("of_turns", "of_turns"), ("first", "second")])
def test_models_that_take_turns_do_not_share_error_feedback_silently(names):
    code = hvd.Compression.qsgd(bits=2, min_elements=1)
    models, said = [], []
    for name in names:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name=name)], name=name)
        model.compile(of(keras.optimizers.SGD(0.1), compression=code), "mse")
        models.append(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        said.append(any("error feedback" in str(each.message) for each in caught))
    assert said == [False, names[0] == names[1] and hvd.rank() == 0]


@several_ranks
@pytest.mark.parametrize("clears", [False, True])
def test_a_new_model_begins_without_the_error_feedback_of_a_deleted_one(clears):
    code = hvd.Compression.topk(ratio=0.1, min_elements=1)

    def fold():
        layer = keras.layers.Dense(8, use_bias=False, kernel_initializer="ones", name="of_folds")
        model = keras.Sequential([keras.Input((8,)), layer], name="of_folds")
        model.compile(of(keras.optimizers.SGD(1.0), compression=code), "mse")
        return model

    zeros = np.zeros((4, 8), "float32")
    ones = zeros + 1
    gc.collect()  # models of other tests that shared names
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = fold()
        model.train_on_batch(ones, ones)
        if clears:
            keras.backend.clear_session()
        model = fold()
        before = flat(model.get_weights())
        model.train_on_batch(zeros, zeros)  # the gradient is zero
    assert np.array_equal(flat(model.get_weights()), before)
