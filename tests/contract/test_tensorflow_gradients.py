"""What ``hvd.DistributedGradientTape`` promises, eagerly and in ``tf.function``, on any ranks."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest

pytestmark = pytest.mark.full

tf = pytest.importorskip("tensorflow")

import qsgd_hpc.tensorflow as hvd  # noqa: E402
from qsgd_hpc.frameworks.grouping import BATCH_BYTES  # noqa: E402
from qsgd_hpc.tensorflow.ops._run import operations_of  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def world():
    hvd.shutdown()
    hvd.init()
    yield
    hvd.barrier()


def needs_ranks(least):
    """Skip a test on fewer ranks; init() is harmless and has to come first."""
    hvd.init()
    return pytest.mark.skipif(hvd.size() < least, reason=f"needs {least} ranks or more")


@pytest.fixture(params=["eager", "function"])
def traced(request):
    """Return what runs a function: as it is, or as a graph."""
    return (lambda f: f) if request.param == "eager" else tf.function


def mean():
    return (hvd.size() + 1) / 2


def total():
    return hvd.size() * (hvd.size() + 1) / 2


def mine():
    return hvd.rank() + 1.0


def weights(*shapes):
    return [tf.Variable(tf.ones(shape), name=f"w{i}") for i, shape in enumerate(shapes)]


def linear(variables):
    """Return a loss whose gradient is rank + 1 everywhere."""
    return tf.add_n([tf.reduce_sum(v) for v in variables]) * mine()


def gradients(traced, variables, loss=linear, **arguments):
    def step():
        with tf.GradientTape() as tape:
            value = loss(variables)
        return hvd.DistributedGradientTape(tape, **arguments).gradient(value, variables)

    return traced(step)()


def everywhere(value, gradient):
    return np.allclose(gradient, value, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, mean),
        ({"op": hvd.Sum}, total),
        ({"gradient_predivide_factor": 4.0}, mean),
        ({"compression": hvd.Compression.fp16}, mean),
        ({"num_groups": 2}, mean),
        ({"groups": 9}, mean),
    ],
)
def test_gradients_of_every_variable_are_reduced(traced, arguments, expected):
    variables = weights((3,), (2, 5), (), (0, 4))
    reduced = gradients(traced, variables, **arguments)
    for gradient, variable in zip(reduced, variables, strict=True):
        assert gradient.shape == variable.shape
        assert gradient.dtype == tf.float32
        assert everywhere(expected(), gradient)


def test_gradients_of_several_types_travel_in_one_step(traced):
    kinds = ["float16", "float32", "float64", "bfloat16", "complex64"]
    variables = [tf.Variable(tf.ones(3, kind)) for kind in kinds]

    def loss(variables):
        parts = [tf.cast(tf.math.real(tf.reduce_sum(v)), tf.float64) for v in variables]
        return tf.add_n(parts) * mine()

    for group in (0, 1):
        for gradient, kind in zip(
            gradients(traced, variables, loss, groups=group), kinds, strict=True
        ):
            assert gradient.dtype == kind
            assert everywhere(mean(), tf.cast(gradient, tf.complex64))


def test_groups_may_be_lists_of_variables(traced):
    variables = weights((3,), (4,), (5,), (6,))
    lists = [[variables[3], variables[1]], [variables[0]]]
    for gradient in gradients(traced, variables, groups=lists):
        assert everywhere(mean(), gradient)


@needs_ranks(2)
def test_groups_have_no_other_variables():
    variables = weights((3,), (4,))
    with pytest.raises(ValueError, match="does not have"):
        gradients(lambda f: f, variables[:1], groups=[variables])


def embedding(size=6):
    return tf.Variable(tf.ones((size, 2)), name="embedding")


def looked_up(variables):
    rows = tf.constant([hvd.rank(), 5])
    return tf.reduce_sum(tf.gather(variables[0], rows)) * mine()


def in_numpy(gradient):
    dense = np.zeros((6, 2), np.float32)
    np.add.at(dense, gradient.indices.numpy(), gradient.values.numpy())
    return dense


@pytest.mark.parametrize(("op", "divisor"), [(hvd.Average, hvd.size), (hvd.Sum, lambda: 1)])
def test_sparse_gradients_are_gathered(traced, op, divisor):
    (gradient,) = gradients(traced, [embedding()], looked_up, op=op)
    assert isinstance(gradient, tf.IndexedSlices)
    expected = np.zeros((6, 2))
    expected[: hvd.size()] = np.arange(1.0, hvd.size() + 1)[:, None]
    expected[5] = total()
    assert np.allclose(in_numpy(gradient), expected / divisor())


def test_sparse_gradients_may_travel_dense(traced):
    (gradient,) = gradients(traced, [embedding()], looked_up, sparse_as_dense=True)
    dense = tf.convert_to_tensor(gradient).numpy()
    assert np.allclose(dense[5], mean())
    assert np.allclose(dense[hvd.rank()], mine() / hvd.size())
    if hvd.size() > 1:
        assert not isinstance(gradient, tf.IndexedSlices)


@needs_ranks(2)
def test_adasum_takes_no_sparse_gradients():
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        gradients(lambda f: f, [embedding()], looked_up, op=hvd.Adasum)


def test_adasum_of_equal_gradients_is_one_of_them(traced):
    variables = weights((3,), (4,))
    for gradient in gradients(traced, variables, lambda v: linear(v) / mine(), op=hvd.Adasum):
        assert everywhere(1.0, gradient)


@pytest.mark.parametrize(("scale", "divisor"), [(True, hvd.size), (False, lambda: 1)])
def test_local_sources_keep_their_own_gradients(traced, scale, divisor):
    variables = [*weights((3,), (4,)), embedding()]

    def loss(variables):
        return linear(variables[:2]) + looked_up(variables[2:])

    def step():
        with tf.GradientTape() as tape:
            value = loss(variables)
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(variables[1])
        tape.register_local_source(variables[2])
        return tape.gradient(value, variables)

    shared, local, sparse = traced(step)()
    assert everywhere(mean(), shared)
    assert everywhere(mine() / divisor(), local)
    assert np.allclose(in_numpy(sparse)[5], mine() / divisor())


def test_ranks_may_name_their_variables_differently(traced):
    local = tf.Variable(tf.ones((2,)), name="local")
    shared = tf.Variable(tf.ones((3,)), name=f"of_rank_{hvd.rank()}")
    sources = [local, shared] if hvd.rank() else [shared]

    def step():
        with tf.GradientTape() as tape:
            value = linear(sources)
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(local)
        return tape.gradient(value, sources, use_generic_names=True)

    assert everywhere(mean(), traced(step)()[-1])


def test_layers_may_be_local(traced):
    layers = [tf.keras.layers.Dense(2, use_bias=False) for _ in range(3)]
    for layer in layers:
        layer.build((None, 3))
    sources = [layer.kernel for layer in layers]

    def step():
        with tf.GradientTape() as tape:
            value = tf.add_n([tf.reduce_sum(layer(tf.ones((1, 3)))) for layer in layers]) * mine()
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layers[1:])
        return tape.gradient(value, sources)

    expected = [mean(), mine() / hvd.size(), mine() / hvd.size()]
    for gradient, value in zip(traced(step)(), expected, strict=True):
        assert everywhere(value, gradient)


def test_sources_may_be_nested_and_unconnected(traced):
    a, b, c = weights((3,), (4,), (5,))
    found = gradients(traced, {"a": [a], "b": (b, c)}, lambda v: linear([*v["a"], v["b"][0]]))
    assert everywhere(mean(), found["a"][0])
    assert everywhere(mean(), found["b"][0])
    assert found["b"][1] is None


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_a_tape_may_be_wrapped_at_any_time(when):
    (variable,) = weights((3,))
    tape = tf.GradientTape(persistent=True)
    distributed = hvd.DistributedGradientTape(tape) if when == "before" else None
    with distributed or tape:
        loss = linear([variable])
        if when == "within":
            distributed = hvd.DistributedGradientTape(tape)
    distributed = distributed or hvd.DistributedGradientTape(tape)
    assert isinstance(distributed, tf.GradientTape)
    for _ in range(2):
        assert everywhere(mean(), distributed.gradient(loss, variable))
    with pytest.raises(ValueError, match="wrap it once"):
        hvd.DistributedGradientTape(distributed)


@pytest.mark.parametrize("code", ["qsgd", "eden"])
def test_compressed_gradients_are_equal_on_every_rank(traced, code):
    variable = tf.Variable(tf.random.stateless_normal((64, 64), [hvd.rank(), 1]), name="w")
    lossy = getattr(hvd.Compression, code)(bits=8, min_elements=0)
    (gradient,) = gradients(
        traced, [variable], lambda v: tf.reduce_sum(v[0] ** 2) / 2, compression=lossy
    )
    exact = hvd.allreduce(tf.convert_to_tensor(variable))
    error = tf.norm(gradient - exact) / tf.norm(exact)
    assert (0 < error < 0.05) if hvd.size() > 1 else (error == 0)
    assert np.array_equal(gradient, hvd.broadcast(gradient, 0))
    if hvd.size() > 1:
        assert hvd.compression_stats()["gradient.w"]["bits"] < 9


class Halving:
    """A compressor of a user: sends float16 halves, and doubles what comes back."""

    @staticmethod
    def compress(tensor):
        return tf.cast(tensor / 2, tf.float16), tensor.dtype

    @staticmethod
    def decompress(tensor, context):
        return tf.cast(tensor * 2, context)


def test_a_users_compressor_is_honoured(traced):
    (gradient,) = gradients(traced, weights((3,)), compression=Halving)
    assert gradient.dtype == tf.float32
    assert everywhere(mean(), gradient)


@needs_ranks(2)
def test_a_gradient_that_is_not_finite_is_refused_on_every_rank(traced):
    factor = float("inf") if hvd.rank() == 0 else 1.0
    with pytest.raises((hvd.NonFiniteGradientError, tf.errors.OpError), match=r"gradient\.w0"):
        gradients(traced, weights((3,)), lambda v: linear(v) * factor)
    with pytest.raises((hvd.NonFiniteGradientError, tf.errors.OpError), match="embedding"):
        gradients(traced, [embedding()], lambda v: looked_up(v) * factor)


@needs_ranks(3)
def test_only_the_ranks_of_a_process_set_average(traced):
    hvd.shutdown()
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    (gradient,) = gradients(traced, weights((3,)), process_set=pair)
    assert everywhere(2.0 if pair.included() else mine(), gradient)
    hvd.shutdown()
    hvd.init()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "Average"),
        ({"op": hvd.Max}, r"DistributedGradientTape\(op=Max\): choose hvd"),
        ({"num_groups": 1, "groups": 1}, "not both"),
        ({"op": hvd.Adasum, "compression": hvd.Compression.qsgd(bits=4)}, "exact steps"),
        ({"compression": "fp16"}, "choose one of hvd.Compression"),
    ],
)
def test_arguments_that_cannot_be_are_answered_with_the_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedGradientTape(tf.GradientTape(), **arguments)


def step_graph(variables, shape):
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = linear(variables) * tf.reduce_sum(x)
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    return step.get_concrete_function(tf.TensorSpec(shape)).graph


def names_of(operation):
    return [each.name for each in operations_of(operation)]


@needs_ranks(2)
def test_small_gradients_share_an_operation_and_large_ones_end_it():
    variables = weights((8,), (BATCH_BYTES // 4,), *[(4, 4)] * 20)
    graph = step_graph(variables, (1,))
    found = [names_of(op) for op in graph.get_operations() if op.type == "QsgdAllreduce"]
    last = [f"allreduce.gradient.w{i}" for i in range(21, 0, -1)]
    assert found == [last, ["allreduce.gradient.w0"]]


@needs_ranks(2)
def test_a_function_that_is_traced_again_keeps_its_names():
    variables = weights((2,), (3,))
    graphs = [step_graph(variables, shape) for shape in [(1,), (2,)]]
    names = [
        names_of(op)
        for graph in graphs
        for op in graph.get_operations()
        if op.type == "QsgdAllreduce"
    ]
    assert names[0] == names[1]


def test_two_tapes_of_one_function_have_names_of_their_own():
    variables = weights((2,))

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            losses = [linear(variables), 2 * linear(variables)]
        tape = hvd.DistributedGradientTape(tape)
        return [tape.gradient(loss, variables)[0] for loss in losses]

    for _ in range(2):
        first, second = step()
        assert everywhere(mean(), first)
        assert everywhere(2 * mean(), second)


@needs_ranks(2)
@pytest.mark.parametrize(("prefixes", "warned"), [((), True), (("one", "two"), False)])
def test_threads_with_variables_of_one_name_are_warned_or_take_two(traced, prefixes, warned):
    first_may_end = threading.Event()
    results = []

    def train(number, done):
        variables = [tf.Variable(tf.ones(3), name="of.threads")]
        options = {"name": prefixes[number]} if prefixes else {}
        results.append(gradients(traced, variables, **options)[0].numpy().tolist())
        done.set()
        assert first_may_end.wait(60)
        del variables

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = []
        for number in range(2):  # one after the other, so that ranks cannot mix them
            done = threading.Event()
            threads.append(threading.Thread(target=train, args=(number, done)))
            threads[-1].start()
            assert done.wait(60)
        first_may_end.set()
        for thread in threads:
            thread.join()
    assert results == [[mean()] * 3] * 2
    said = [str(each.message) for each in caught if "two threads" in str(each.message)]
    assert len(said) == (warned and hvd.rank() == 0)


@needs_ranks(2)
@pytest.mark.parametrize(("prefixes", "warned"), [((), True), (("three", "four"), False)])
def test_models_that_take_turns_do_not_share_error_feedback_silently(traced, prefixes, warned):
    models = [[tf.Variable(tf.ones((64, 64)), name="of.turns")] for _ in range(2)]
    said = []
    for number, variables in enumerate(models):
        options = {"name": prefixes[number]} if prefixes else {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gradients(traced, variables, compression=hvd.Compression.qsgd(bits=2), **options)
        said = [each for each in caught if "error feedback" in str(each.message)]
    assert len(said) == (warned and hvd.rank() == 0)  # about the second model


@needs_ranks(2)
def test_ranks_may_build_their_operations_in_different_orders():
    """They would wait for each other if TensorFlow ran them one after the other."""
    order = ["a", "b"] if hvd.rank() % 2 else ["b", "a"]

    @tf.function
    def step(x):
        found = {name: hvd.allreduce(x, name=f"unordered.{name}", op=hvd.Sum) for name in order}
        return found["a"], found["b"]

    for result in step(tf.ones(3)):
        assert everywhere(hvd.size(), result)


def test_training_equals_one_process_with_the_whole_batch(traced):
    def rows(shares):
        parts = [
            tf.random.stateless_normal((4, 6), [share, 7], dtype=tf.float64) for share in shares
        ]
        x = tf.concat(parts, 0)
        return x, tf.stack([tf.reduce_sum(x, 1), x[:, 0]], 1)

    start = tf.random.stateless_normal((6, 2), [1, 2], dtype=tf.float64)
    shared, alone = tf.Variable(start), tf.Variable(start)

    def step(variable, shares, wrap):
        with tf.GradientTape() as tape:
            x, y = rows(shares)
            loss = tf.reduce_mean((x @ variable - y) ** 2)
        variable.assign_sub(0.1 * wrap(tape).gradient(loss, variable))

    mine_step = traced(lambda: step(shared, [hvd.rank()], hvd.DistributedGradientTape))
    whole_step = traced(lambda: step(alone, range(hvd.size()), lambda tape: tape))
    for _ in range(5):
        mine_step()
        whole_step()
    assert np.allclose(shared, alone, atol=1e-12)
    assert np.array_equal(shared, hvd.broadcast(shared.value(), 0))


@needs_ranks(2)
def test_a_gradient_of_unknown_shape_is_reduced_uncompressed():
    start = tf.random.stateless_normal((64, 64), [1, 2])
    variable = tf.Variable(start, shape=tf.TensorShape([None, 64]))
    compression = hvd.Compression.qsgd(bits=2)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2) * (1.0 + hvd.rank())
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, variable)

    assert np.allclose(step(), start * (1 + hvd.size()), rtol=1e-6)
