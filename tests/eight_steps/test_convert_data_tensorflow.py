"""Step 3 of the conversion for TensorFlow and Keras, a rule at a time: data sets and arrays."""

from __future__ import annotations

import pytest

from qsgd_hpc.eight_steps.convert.cli import to_decide
from tests.eight_steps.scripts import TF2, done

FIT_ONE = """
import keras
from elsewhere import batches, model
from sklearn.decomposition import FactorAnalysis

{made}
FactorAnalysis().fit(x)
reducer.fit(x)
model.fit({data})
"""


@pytest.mark.parametrize(
    ("made", "data"),
    [
        ('model.compile("adam", "mse")', "batches"),
        (
            'import tensorflow as tf\nstart().compile("adam", "mse")',
            "tf.data.Dataset.from_tensor_slices(x).batch(8)",
        ),
    ],
)
def test_a_fit_with_one_argument_trains_a_compiled_model_or_reads_a_data_set(made, data):
    converted = done(FIT_ONE.format(made=made, data=data)).after
    assert "hvd.callbacks.BroadcastGlobal" in converted.partition("\nmodel.fit(")[2]
    assert "\nFactorAnalysis().fit(x)\nreducer.fit(x)\n" in converted


def test_what_fit_divides_into_batches_is_an_array():
    text = "import keras\nmodel.compile('adam')\nmodel.fit({}, epochs=2, batch_size=8)\n"
    made = done(text.format("x"))
    assert "model.fit(x[shard], epochs=2, batch_size=8" in made.after
    assert not made.to_decide


def test_the_batches_to_take_are_divided_among_the_ranks():
    after = done(TF2).after
    assert "data.take(100 // hvd.size())" in after
    assert "((x, y)).shard(hvd.size(), hvd.rank()).take(len(x) // hvd.size()).repeat()" in after


def test_a_data_set_that_a_loop_does_not_exhaust_is_divided_before_it_is_shuffled():
    text = TF2.replace(".repeat()", "")
    made = done(text)
    assert "((x, y)).shard(hvd.size(), hvd.rank()).take(len(x) // hvd.size()).shuf" in made.after
    assert "data.take(100 // hvd.size())" in made.after
    others = done(f"{text}test = data.skip(100)\n").after
    assert "in data.take(100).shard(hvd.size(), hvd.rank()).take(100 // hvd.size()):" in others


def test_a_data_set_of_two_loops_is_divided_once():
    source = TF2.replace("8)\n", "8).take(90)\n").replace("data.take(100)", "data")
    loop = source[source.index("for images") :]
    after = done(f"{source}{loop}").after
    assert after.count(".shard(") == 1 and after.count(".take(90 // hvd.size())") == 1


def test_a_data_set_of_two_fits_is_divided_once():
    text = """
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        model.compile(tf.keras.optimizers.Adam(0.1), "mse")
        model.fit(data, epochs=1)
        model.fit(data, epochs=2)
    """
    assert done(text).after.count(".shard(") == 1


SPLIT = """
import tensorflow as tf

tf.random.set_seed(0)
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1000, seed=0)
train = data.{train}(800).batch(40)
test = data.{test}(800).batch(40)
model.compile(tf.keras.optimizers.Adam(0.1), "mse")
model.fit(train, validation_data=test)
"""


def test_a_data_set_is_split_before_it_is_divided_among_the_ranks():
    after = done(SPLIT.format(train="take", test="skip")).after
    part = "train = data.take(800).shard(hvd.size(), hvd.rank()).take(800 // hvd.size()).batch(40)"
    assert f"{part}\ntest = data.skip(800).batch(40)\n" in after
    assert after.count(".shard(") == 1
    assert "tf.random.set_seed(0)" in after  # or the ranks would shuffle and split differently


def test_a_shuffle_without_a_seed_before_a_split_is_pointed_out():
    text = SPLIT.format(train="take", test="skip").replace("tf.random.set_seed(0)", "")
    assert not any("seed" in note.text for note in done(text).to_decide)
    made = done(text.replace("1000, seed=0", "1000"))
    assert any("give this shuffle() a seed" in note.text for note in made.to_decide)


def test_a_part_of_unknown_size_is_left_to_the_author():
    made = done(SPLIT.format(train="skip", test="take"))
    assert "\ntrain = data.skip(800).batch(40)\n" in made.after
    assert any("shard this data set after skip()" in note.text for note in made.to_decide)


@pytest.mark.parametrize(
    ("drawn", "remedy"),
    [("flow(x, y, batch_size=8)", "x[shard]"), ("flow_from_directory('a')", "other files")],
)
def test_what_an_iterator_of_keras_draws_from_is_divided(drawn, remedy):
    text = f"""
        import keras

        augment = keras.preprocessing.image.ImageDataGenerator(rotation_range=9)
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(augment.{drawn}, epochs=2)
    """
    notes = [note.text for note in done(text).to_decide]
    assert any(remedy in note for note in notes)
    assert not any(".shard(" in note for note in notes)


@pytest.mark.parametrize("base", ["utils.PyDataset", "utils.Sequence"])
def test_batches_of_an_own_class_of_keras_are_left_with_what_it_has(base):
    made = done(f"""
        import keras

        class Data(keras.{base}):
            def __getitem__(self, i):
                return x[i], y[i]

        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
        model.fit(Data(), epochs=2)
    """)
    assert ["__getitem__" in note.text for note in made.to_decide] == [True]
    assert to_decide(made, "t.py").count("\n") == 1  # not of check, too


SEQUENCES = """
import tensorflow as tf

ids = tf.data.Dataset.from_tensor_slices(text)
model = make()
data = {data}
optimizer = tf.keras.optimizers.Adam(0.01)
for x in data:
    with tf.GradientTape() as tape:
        loss = loss_of(model(x), x)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
"""


def test_sequences_that_batch_makes_are_sharded_not_their_elements():
    made = done(SEQUENCES.format(data="ids.batch(length + 1, drop_remainder=True).batch(8)"))
    share = ".shard(hvd.size(), hvd.rank()).take(len(text) // (length + 1) // hvd.size())"
    assert f"data = ids.batch(length + 1, drop_remainder=True){share}.batch(8)" in made.after
    assert not any("shard" in note.text for note in made.to_decide)


def test_windows_of_a_series_are_left_to_the_author():
    made = done(SEQUENCES.format(data="ids.window(9).flat_map(lambda w: w.batch(9)).batch(8)"))
    assert ".shard(hvd.size(), hvd.rank()).take(" not in made.after
    assert any("shard the windows" in note.text for note in made.to_decide)


@pytest.mark.parametrize(
    "data",
    [
        "tf.data.TFRecordDataset('a')",
        "tf.data.Dataset.from_generator(read, tf.float32)",
        "ids.filter(good)",
    ],
)
def test_a_warm_up_needs_no_length_that_tensorflow_does_not_know(data):
    made = done(SEQUENCES.format(data=f"{data}.batch(8)"))
    assert "len(data)" not in made.after
    assert any("over a warm-up" in note.text for note in made.to_decide)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("x, [y, z]", "x[shard], [y[shard], z[shard]]"),
        ("[x, y], z", "[x[shard], y[shard]], z[shard]"),
        ("{'a': x}, {'b': y, 'c': z}", "{'a': x[shard]}, {'b': y[shard], 'c': z[shard]}"),
        ("x, both", ""),
        ("x, {**both}", ""),
        ("[1, 2], [3, 4]", ""),
    ],
)
def test_several_inputs_and_outputs_of_keras_are_sharded_one_by_one(given, expected):
    made = done(f"""
import keras
both = [y, z]
model = keras.Model(inputs, outputs)
model.compile(optimizer="sgd", loss="mse")
model.fit({given}, batch_size=8)
""")
    assert f"model.fit({expected or given}, batch_size=8" in made.after
    assert any("shard the data" in note.text for note in made.to_decide) == (not expected)
    assert ("shard = slice(hvd.rank(), len(x) //" in made.after) == bool(expected)


READ = """
import keras
import tensorflow as tf
import tensorflow_datasets as tfds

keras.utils.set_random_seed(1)
{read}
net = keras.Sequential([keras.layers.Dense(2)])
net.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
net.fit(train, validation_data=test)
"""


ALIKE = ", seed=None if hvd.size() == 1 else 0)"


def shard_of(name):
    return f"{name}.shard(hvd.size(), hvd.rank()).take(len({name}) // hvd.size())"


@pytest.mark.parametrize(
    "read, expected",
    [
        (
            "train = keras.utils.image_dataset_from_directory('a', subset='training')\n"
            "names = train.class_names\ntrain = train.cache().prefetch(2)\ntest = read()",
            [f"train = {shard_of('train')}.cache().prefetch(2)", f"'training'{ALIKE}"],
        ),
        (
            "raw, test = tf.keras.utils.text_dataset_from_directory('a', seed=3)\n"
            "words.adapt(raw.map(words_of))\ntrain = raw.map(vectors_of)",
            [f"train = {shard_of('raw')}.map(vectors_of)", "adapt(raw.map(words_of))"],
        ),
        (
            "train = keras.utils.timeseries_dataset_from_array(x, y, 5)\ntest = read()",
            [f"net.fit({shard_of('train')},", "_from_array(x, y, 5)\n"],
        ),
        (
            "(raw, test), info = tfds.load('mnist', split=['train', 'test'], shuffle_files=True)\n"
            "train = raw.shuffle(9).batch(8)",
            [f"train = {shard_of('raw')}.shuffle", "shuffle_files=True and hvd.size() == 1)"],
        ),
        (
            "sets = tfds.load('horses')\na, b = sets['trainA'], sets['trainB']\n"
            "a = a.map(of)\nb = b.map(of)\ntest = read()\n"
            "train = tf.data.Dataset.zip((a, b)).batch(8)",
            [f"a = {shard_of('a')}.map(of)", f"b = {shard_of('b')}.map(of)"],
        ),
    ],
)
def test_data_that_a_library_reads_are_divided_where_the_training_uses_them(read, expected):
    made = done(READ.format(read=read))
    assert all(text in made.after for text in expected), made.after
    assert not made.to_decide
