"""What TensorFlow adds to the collectives: graphs, sessions, gradients, sparse tensors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

pytestmark = pytest.mark.full

tf = pytest.importorskip("tensorflow")

import qsgd_hpc.tensorflow as hvd  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def job():
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()
    hvd.init()


def mine(*shape, scale=1.0):
    return tf.reshape(tf.range(float(np.prod(shape))), shape) * scale * (hvd.rank() + 1.0)


def ranks_sum():
    return hvd.size() * (hvd.size() + 1) / 2


def every_collective(x):
    """Of x with as many rows as there are ranks; reductions are of equal shapes."""
    rows = tf.concat([x] * (hvd.rank() + 1), 0)
    splits = [1] * hvd.size()
    return {
        "allreduce": hvd.allreduce(x, op=hvd.Sum),
        "average": hvd.allreduce(x, average=True),
        "group": hvd.grouped_allreduce([x, tf.cast(x, tf.int32)], op=hvd.Max),
        "allgather": hvd.allgather(rows),
        "gathers": hvd.grouped_allgather([x, tf.shape(rows)]),
        "broadcast": hvd.broadcast(x, hvd.size() - 1),
        "alltoall": hvd.alltoall(x, splits=splits),
        "share": hvd.reducescatter(x, op=hvd.Sum),
        "shares": hvd.grouped_reducescatter([x, x], op=hvd.Min),
        "sparse": hvd.allreduce(tf.IndexedSlices(x, tf.range(hvd.size())), op=hvd.Sum).values,
        "facts": [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()],
        "included": hvd.process_set_included_op(0),
    }


def in_a_session(function, *arguments):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(function(*map(tf.constant, arguments)))


@pytest.fixture(params=["eager", "function", "session"])
def call(request):
    """Return call(f, *arrays): what f makes of them in one of TensorFlow's ways to compute."""
    if request.param == "session":
        return in_a_session
    traced = tf.function if request.param == "function" else lambda f: f
    return lambda f, *arrays: traced(f)(*map(tf.constant, arrays))


def assert_equal(found, right):
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_function_computes_what_eager_calls_do():
    compiled = tf.function(every_collective)
    for scale in (1.0, 3.0):
        x = mine(hvd.size(), 2, scale=scale)
        assert_equal(compiled(x), every_collective(x))


def test_shapes_are_known_while_tracing_as_far_as_they_can_be():
    seen = {}

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def traced(x):
        for name in ("allreduce", "allgather", "alltoall", "reducescatter"):
            seen[name] = getattr(hvd, name)(x).shape.as_list()
        seen["broadcast"] = hvd.broadcast(x, 0).shape.as_list()
        return x

    traced(tf.zeros([hvd.size(), 3]))
    assert set(map(tuple, seen.values())) == {(None, 3)}


def test_calls_that_ignore_the_name_scope_are_the_same():
    x = mine(hvd.size(), 2)
    for call in (hvd.allreduce, hvd.reducescatter, hvd.allgather, hvd.alltoall):
        assert_equal(call(x, ignore_name_scope=True), call(x))
    (reduced,) = hvd.grouped_allreduce([x], ignore_name_scope=True)
    assert_equal(reduced, hvd.allreduce(x))


def test_a_session_computes_what_eager_calls_do():
    right = every_collective(mine(hvd.size(), 2))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [hvd.size(), 2])
        found = every_collective(x)
        gradient = tf.gradients(tf.reduce_sum(found["allreduce"]), x)[0]
        fed = np.arange(2.0 * hvd.size()).reshape(hvd.size(), 2) * (hvd.rank() + 1)
        for _ in range(2):
            values, slope = session.run([found, gradient], {x: fed})
        for a, b in zip(tf.nest.flatten(values), tf.nest.flatten(right), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(slope, np.full([hvd.size(), 2], hvd.size()))


def test_ranks_that_trace_differently_often_still_find_each_other():
    @tf.function
    def step(x):
        return hvd.allreduce(tf.reduce_sum(x), op=hvd.Sum)

    odd = hvd.rank() == hvd.size() - 1
    for extra in (0, 1, 0):
        total = step(tf.ones([2 + extra * odd]))
        assert total == 2 * hvd.size() + extra
    total = step(tf.ones([4 + hvd.rank()]))
    assert total == sum(4 + r for r in range(hvd.size()))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_gradients_of_extrema_and_products_are_of_the_sum_of_all_losses(graph, grouped):
    """Each loss weighs its rank's result by its rank, plus one."""
    weight, n = hvd.rank() + 1.0, hvd.size()

    def gradient(x, call):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = weight * tf.reduce_sum(call(x))
        return tape.gradient(loss, x)

    run = tf.function(gradient) if graph else gradient
    x = mine(n, 2) + 1.0

    def one(name, **arguments):
        if grouped:
            return lambda x: getattr(hvd, f"grouped_{name}")([x], **arguments)[0]
        return lambda x: getattr(hvd, name)(x, **arguments)

    total = ranks_sum()
    largest = total * (hvd.rank() == n - 1)
    most = run(x, one("allreduce", op=hvd.Max, postscale_factor=2.0))[-1]
    np.testing.assert_allclose(most, [2 * largest] * 2)
    product = run(x, one("allreduce", op=hvd.Product))
    everyone = np.prod([np.arange(2.0 * n).reshape(n, 2) * (r + 1) + 1 for r in range(n)], 0)
    np.testing.assert_allclose(product, total * everyone / x.numpy(), rtol=1e-5)
    held = hvd.reducescatter(x, op=hvd.Max)
    assert held.shape == (1, 2)
    smallest = run(x, one("reducescatter", op=hvd.Min))[-1]
    np.testing.assert_allclose(smallest, [float(n) * (hvd.rank() == 0)] * 2)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_of_sparse_tensors_are_those_of_dense_ones(op):
    values = mine(1, 2)
    with tf.GradientTape() as tape:
        tape.watch(values)
        sparse = tf.IndexedSlices(values, tf.constant([hvd.rank()]), tf.constant([hvd.size(), 2]))
        loss = (hvd.rank() + 1.0) * tf.reduce_sum(hvd.allreduce(sparse, op=op).values)
    right = ranks_sum() / (hvd.size() if op is hvd.Average else 1)
    np.testing.assert_allclose(tape.gradient(loss, values), np.full([1, 2], right), rtol=1e-6)


def test_second_derivatives_pass_through():
    x = tf.Variable([2.0, 3.0])
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) ** 3)
        slope = inner.gradient(loss, x)
    # Each of the two derivatives sums over the ranks once, and S = n x is differentiated twice.
    n = hvd.size()
    np.testing.assert_allclose(outer.gradient(slope, x), 6.0 * n**3 * x.numpy(), rtol=1e-5)


def test_adasum_has_no_gradient():
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = hvd.allreduce(x, op=hvd.Adasum)
    with pytest.raises(ValueError, match="Adasum has no gradient"):
        tape.gradient(y, x)


def test_sparse_entries_are_gathered_and_averaged():
    slices = tf.IndexedSlices(
        tf.fill([2, 3], hvd.rank() + 1.0), tf.constant([hvd.rank(), 9]), tf.constant([10, 3])
    )
    mean = hvd.allreduce(slices)
    assert mean.indices.numpy().tolist() == [i for r in range(hvd.size()) for i in (r, 9)]
    dense = tf.convert_to_tensor(mean).numpy()
    np.testing.assert_allclose(dense[9], ranks_sum() / hvd.size(), rtol=1e-6)
    np.testing.assert_allclose(dense[hvd.rank()], (hvd.rank() + 1) / hvd.size(), rtol=1e-6)
    both = hvd.grouped_allreduce([slices, tf.ones([2])], op=hvd.Sum)
    assert both[0].values.shape == (2 * hvd.size(), 3)
    assert both[1].numpy().tolist() == [hvd.size()] * 2


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64"])
@pytest.mark.parametrize(
    "options", [{}, {"postscale_factor": 3.0}, {"op": hvd.Sum, "postscale_factor": 2.0}]
)
def test_sparse_integers_are_averaged_as_dense_ones_are(call, dtype, options):
    rank = hvd.rank()

    def both(values, indices):
        dense = tf.constant([3, 2], tf.int64)
        slices = tf.IndexedSlices(values, indices, dense)
        tensor = tf.convert_to_tensor(tf.IndexedSlices(tf.cast(values, tf.int64), indices, dense))
        sparse = hvd.allreduce(slices, **options)
        sums = tf.convert_to_tensor(
            tf.IndexedSlices(tf.cast(sparse.values, tf.int64), sparse.indices, dense)
        )
        return sums, hvd.allreduce(tensor, **options)

    found, right = call(
        both, np.array([[7, rank], [5, 2]], dtype), np.array([rank % 3, 1 - rank % 2], "int64")
    )
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("op", [hvd.Max, hvd.Product, hvd.Adasum], ids=str)
def test_what_sparse_tensors_cannot_do_is_not_implemented(call, op):
    def sparse(x):
        return hvd.allreduce(tf.IndexedSlices(x, tf.range(2)), op=op).values

    for kind in (NotImplementedError, hvd.UsageError):
        with pytest.raises(kind, match="IndexedSlices"):
            call(sparse, np.ones((2, 3), np.float32))


def test_variables_are_replaced_in_place():
    variables = [tf.Variable(mine(2, 2)), tf.Variable([hvd.rank()])]
    returned = hvd.broadcast_(variables, hvd.size() - 1, name="variables")
    assert len(returned) == 2
    np.testing.assert_array_equal(variables[0], np.arange(4.0).reshape(2, 2) * hvd.size())
    assert variables[1].numpy().tolist() == [hvd.size() - 1]


def test_compression_and_types_that_travel_in_disguise():
    x = tf.constant([1.0, 2.0, 3.0]) * (hvd.rank() + 1.0)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(x, op=hvd.Sum, compression=compression)
        assert result.dtype == tf.float32
        np.testing.assert_allclose(result, np.array([1.0, 2.0, 3.0]) * ranks_sum(), rtol=1e-2)
    coded = hvd.allreduce(tf.ones([1024]), compression=hvd.Compression.qsgd(bits=8))
    np.testing.assert_allclose(coded, 1.0, rtol=0.02)
    z = tf.complex(x, -x)
    np.testing.assert_allclose(
        hvd.allreduce(z, op=hvd.Sum), (1 - 1j) * ranks_sum() * np.arange(1, 4)
    )
    assert hvd.allgather(z).shape == (3 * hvd.size(),)
    large = tf.constant([2**63 + 1], tf.uint64)
    assert hvd.broadcast(large, 0).numpy().tolist() == [2**63 + 1]


def test_xla_is_refused_with_a_remedy():
    compiled = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
    with pytest.raises(ValueError, match="Pass jit_compile=False"):
        compiled(tf.ones([2]))


def test_errors_are_those_of_this_package_and_those_of_tensorflow(call):
    x = np.ones(hvd.size() + 1, np.float32)
    wrong = {
        f"root_rank={hvd.size()}": lambda x: hvd.broadcast(x, hvd.size()),
        "splits=": lambda x: hvd.alltoall(x, [1] * hvd.size()),
    }
    for text, mistake in wrong.items():
        for kind in (hvd.UsageError, tf.errors.InvalidArgumentError):
            with pytest.raises(kind, match=text) as caught:
                call(mistake, x)
    if caught.value.op is None:  # TensorFlow does not pickle what names an operation
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))
    if hvd.size() == 1:
        return
    unequal = np.ones(4 if hvd.rank() == hvd.size() - 1 else 3, np.float32)
    for kind in (hvd.HorovodInternalError, tf.errors.FailedPreconditionError):
        with pytest.raises(kind, match=r"\[3\].*\[4\]|\[4\].*\[3\]"):
            call(lambda x: hvd.allreduce(x, name="unequal"), unequal)
    assert hvd.allreduce(tf.constant(1), op=hvd.Sum) == hvd.size()


@pytest.mark.parametrize("kind", ["uint64", "string"])
def test_a_type_that_cannot_be_reduced_is_named(kind):
    x = tf.constant(["a"]) if kind == "string" else tf.constant([1], kind)
    with pytest.raises(hvd.UsageError, match=f"tensors of type {kind} cannot be reduced; cast"):
        hvd.allreduce(x, op=hvd.Sum)


def test_other_errors_of_tensorflow_stay_as_they_are():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.debugging.assert_equal(hvd.allreduce(tf.constant(1)), 2)
    assert type(caught.value) is tf.errors.InvalidArgumentError


def test_a_finished_job_is_named_in_the_error_of_a_graph():
    function = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    function(tf.ones([2]))
    hvd.shutdown()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"call hvd.init\(\)"):
        function(tf.ones([2]))
    hvd.init(process_sets="dynamic")
    assert function(tf.ones([2])).numpy().tolist() == [hvd.size()] * 2


def test_batch_normalisation_takes_the_arguments_of_the_layer_that_it_replaces():
    former = {"renorm": False, "virtual_batch_size": None, "adjustment": None}
    layer = hvd.SyncBatchNormalization(fused=False, axis=-1, name="bn", **former)
    again = hvd.SyncBatchNormalization.from_config(layer.get_config())
    assert again.name == "bn"
    with pytest.raises(hvd.UsageError, match=r"virtual_batch_size=8.*remove virtual_batch_size"):
        hvd.SyncBatchNormalization(virtual_batch_size=8)


def test_batches_are_normalised_together():
    whole = np.random.default_rng(1).normal(3.0, 2.0, (4 * hvd.size() + 2, 5)).astype(np.float32)
    cuts = [0, *(4 * r + 2 for r in range(1, hvd.size() + 1))]
    part = whole[cuts[hvd.rank()] : cuts[hvd.rank() + 1]]
    layer = hvd.SyncBatchNormalization(momentum=0.5)
    with tf.GradientTape() as tape:
        x = tf.constant(part)
        tape.watch(x)
        y = layer(x, training=True)
        loss = tf.reduce_sum(y**3)
    plain = tf.keras.layers.BatchNormalization(momentum=0.5)
    with tf.GradientTape() as alone:
        all_rows = tf.constant(whole)
        alone.watch(all_rows)
        right = tf.reduce_sum(plain(all_rows, training=True) ** 3)
    slopes = alone.gradient(right, all_rows).numpy()[cuts[hvd.rank()] : cuts[hvd.rank() + 1]]
    np.testing.assert_allclose(tape.gradient(loss, x), slopes, atol=2e-4)
    np.testing.assert_allclose(layer.moving_mean, plain.moving_mean, rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, plain.moving_variance, rtol=1e-5)


def test_ragged_and_sparse_tensors_are_answered_with_the_remedy():
    for tensor in (tf.ragged.constant([[1.0], []]), tf.sparse.eye(2)):
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            for way in (call, tf.function(call)):
                with pytest.raises(hvd.UsageError, match="take dense tensors"):
                    way(tensor)
