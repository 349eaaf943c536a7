"""Step 3 of the conversion, a rule at a time: loaders, arrays and data sets of tf.data."""

from __future__ import annotations

import pytest

from qsgd_hpc.eight_steps.convert.cli import to_decide
from tests.eight_steps.scripts import TF2, done, torch_script


def test_slices_of_a_split_order_take_their_share():
    text = """
        import torch

        def main(x, y):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for epoch in range(2):
                order = torch.randperm(len(x))
                for batch in order.split(8):
                    loss_of(x[batch], y[batch]).backward()
                    optimizer.step()

        main(*load())
    """
    made = done(text)
    assert "x, y = x[shard], y[shard]" in made.after
    assert "start_factor=1 / hvd.size(), total_iters=max(1, len(x) // 8)\n" in made.after
    assert not made.to_decide


@pytest.mark.parametrize("count", ["len(x) // 8", "x.shape[0] // 8", "batches"])
def test_a_loop_over_numbers_of_batches_divides_the_arrays(count):
    made = done(f"""
        import torch

        x, y = load()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = len(x) // 8
        for epoch in range(2):
            order = torch.randperm(len(x))
            for i in range({count}):
                rows = order[i * 8 : (i + 1) * 8]
                loss_of(x[rows], y[rows]).backward()
                optimizer.step()
    """)
    assert made.after.index("x, y = x[shard], y[shard]") < made.after.index("batches = len(x)")
    assert f"total_iters=max(1, {count})\n" in made.after
    assert not made.to_decide


LOADER = """
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST

model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = {loader}
for epoch in range(2):
    for x, y in loader:
        loss_of(model(x), y).backward()
        optimizer.step()
"""


def test_a_loader_that_shuffles_has_no_sampler_in_its_options():
    made = done(LOADER.format(loader="DataLoader(data, batch_size=8, shuffle=True, **options)"))
    assert "shuffle=train_sampler is None, **options, sampler=train_sampler)" in made.after
    assert not made.to_decide


@pytest.mark.parametrize(
    ("order", "passed", "text"),
    [
        ("train", ["True", "False"], "if hvd.size() > 1 and train:\n"),
        ('split == "train"', ['"train"', '"test"'], 'if hvd.size() > 1 and (split == "train"):\n'),
        ("train", ["False", "False"], "if this also loads test data"),
        ("True", ["True", "False"], "if this also loads test data"),
    ],
)
def test_a_function_that_loads_test_data_too_shards_the_training_data_only(order, passed, text):
    made = done(f"""
        import torch
        from torch.utils.data import DataLoader

        def load({order.partition(" ")[0] if order != "True" else "train"}):
            return DataLoader(data_of(), batch_size=8, shuffle={order})

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader, tests = load({passed[0]}), load({passed[1]})
        for epoch in range(2):
            for x, y in loader:
                loss_of(model(x), y).backward()
                optimizer.step()
    """)
    assert text in made.after
    assert f"shuffle=train_sampler is None and {order}," in made.after or order == "True"
    assert bool(made.to_decide) is ("if this" in text)


@pytest.mark.parametrize("given", ["shuffle=False, **options", "*given, shuffle=True"])
def test_options_that_may_have_a_sampler_are_left_to_the_author(given):
    made = done(LOADER.format(loader=f"DataLoader(data, {given})"))
    assert any("its arguments are not written here" in note.text for note in made.to_decide)


def test_a_loop_over_windows_of_a_series_is_left_to_the_author():
    made = done("""
        import torch

        x = load()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            for i in range(len(x) - 8):
                loss_of(x[i : i + 8]).backward()
                optimizer.step()
    """)
    assert "[shard]" not in made.after
    assert any("shard the data" in note.text for note in made.to_decide)


SAMPLED = """
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from torch.utils.data.sampler import SubsetRandomSampler

model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mine = {sampler}
loader = DataLoader({data}, batch_size=8, sampler={given})
for epoch in range(2):
    for x, y in loader:
        loss_of(model(x), y).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("given", ["mine", None])
@pytest.mark.parametrize(
    ("sampler", "subset", "shuffle"),
    [
        ("RandomSampler(data)", "", ""),
        ("SequentialSampler(data)", "", ", shuffle=False"),
        ("SubsetRandomSampler(order[split:])", "order[split:]", ""),
    ],
)
def test_a_sampler_that_draws_each_sample_once_is_replaced(sampler, subset, shuffle, given):
    made = done(SAMPLED.format(sampler=sampler, data="data", given=given or sampler))
    name = given or "train_sampler"
    samples = "train_samples" if subset else "data"
    chosen = f"    train_samples = torch.utils.data.Subset(data, {subset})\n" if subset else ""
    assert (
        f"if hvd.size() > 1:\n{chosen}"
        f"    {name} = torch.utils.data.distributed.DistributedSampler(\n"
        f"        {samples}, num_replicas=hvd.size(), rank=hvd.rank(){shuffle}\n"
        "    )\n"
        f"loader = DataLoader({samples}, batch_size=8, sampler={name})\n"
    ) in made.after
    assert ("set_epoch(epoch)" in made.after) == (not shuffle)
    assert not made.to_decide


@pytest.mark.parametrize(
    "sampler",
    [
        "RandomSampler(data, replacement=True)",
        "RandomSampler(other)",
        "WeightedRandomSampler(weights, 100)",
        "make_sampler(data)",
    ],
)
def test_a_sampler_that_draws_otherwise_is_left_to_the_author(sampler):
    made = done(SAMPLED.format(sampler=sampler, data="data", given="mine"))
    assert "DistributedSampler(" not in made.after
    assert any("sampler of its own" in note.text for note in made.to_decide)


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


ALIKE = "generator=None if hvd.size() == 1 else torch.Generator().manual_seed(0)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("shuffle=True", f"held_out = DataLoader(test, shuffle=True, {ALIKE})"),
        (
            "sampler=torch.utils.data.SubsetRandomSampler(half)",
            f"sampler=torch.utils.data.SubsetRandomSampler(half, {ALIKE}))",
        ),
        ("shuffle=True, generator=own", "DataLoader(test, shuffle=True, generator=own)\n"),
        ("shuffle=False", "held_out = DataLoader(test, shuffle=False)\n"),
    ],
)
def test_ranks_that_draw_other_noise_test_in_one_order(given, expected):
    """Else the mean of batches, the last of which is short, differs and early stopping with it."""
    text = LOADER.format(loader="DataLoader(data, shuffle=True)")
    text = text.replace("\nfor epoch", f"\nheld_out = DataLoader(test, {given})\nfor epoch")
    assert expected in done(text.replace("make_model()", "torch.nn.Dropout()")).after
    assert ALIKE not in done(text).after


def test_one_rank_of_a_node_downloads_also_within_the_call_of_a_loader():
    made = done(
        LOADER.format(loader="DataLoader(MNIST('data', download=True), shuffle=True)")
    ).after
    before, _, behind = made.partition("MNIST('data', download=True)")
    assert "if hvd.local_rank() != 0:\n    hvd.barrier()" in before
    assert "if hvd.local_rank() == 0:\n    hvd.barrier()" in behind


DRAWN = """
import torch
from torch.utils.data import DataLoader

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8{order})
tests = DataLoader(test_data, batch_size=8)
batches = iter(loader)
for step in range(100):
    x, y = next(batches)
    loss_of(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("", "\nloader = DataLoader(data, batch_size=8, sampler=train_sampler)"),
        (", sampler=own", ""),
    ],
)
def test_a_loader_of_an_iterator_is_for_training(order, text):
    made = done(DRAWN.format(order=order))
    above = made.after.partition("\nloader = ")[0]
    assert text in made.after
    assert ("train_sampler" in above, "TODO shard this loader" in above) == (not order, bool(order))
    assert "Every rank tests" not in above and "Every rank tests" in made.after


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


SLICES = """
import torch

x = torch.rand(1000, 3)
{size}
y = x.sum(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    total = 0.0
    for i in range(0, n, 10):
        loss = loss_of(x[i : i + 10], y[i : i + 10])
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(total / (n // 10))
{after}
"""


@pytest.mark.parametrize("size", ["n = x.shape[0]", "n = len(x)", "n = int(0.8 * x.size(0))"])
def test_a_number_of_samples_is_that_of_a_ranks_part(size):
    made = done(SLICES.format(size=size, after=""))
    assert f"x, y = x[shard], y[shard]\n{size}\n" in made.after
    assert "total = sum(hvd.allgather_object(total)) / hvd.size()\n" in made.after
    assert not made.to_decide


def test_a_number_of_samples_that_may_be_another_is_left_to_the_author():
    made = done(SLICES.format(size="n = 10\nif all_of_them:\n    n = len(x)", after=""))
    assert any("n must be computed from this rank's part" in note.text for note in made.to_decide)


def test_arrays_that_are_read_behind_the_loop_are_pointed_out():
    after = "print(len(x), x.shape)\nsave('x.npy', x, y)"
    made = done(SLICES.format(size="n = len(x)", after=after))
    assert [note.text for note in made.to_decide] == [
        "here and below, only this rank's part of x, y is left."
    ]
    assert not done(SLICES.format(size="n = len(x)", after="x = 1\nprint(x)")).to_decide


def test_a_divisor_of_which_only_itself_is_known_is_left_to_the_author():
    text = torch_script("from settings import *\nn = n // 2 + n // 3", "print(total / n)")
    assert any("total covers only" in note.text for note in done(text).to_decide)


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


def test_a_loader_that_shuffles_by_its_sampler_is_sharded_wherever_it_comes_from():
    made = done("""
        import torch
        from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

        def load(data, tests):
            test = DataLoader(tests, sampler=SequentialSampler(tests), batch_size=8)
            sampler = RandomSampler(data)
            return vocabulary(data), DataLoader(data, sampler=sampler, batch_size=8), test

        vocabulary, train, test = load(*read())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(2):
            for batch in train:
                loss_of(batch).backward()
                optimizer.step()
    """)
    assert made.after.count("torch.utils.data.distributed.DistributedSampler(") == 1
    assert not any("shard the data" in note.text for note in made.to_decide)


BY_PHASE = """
import tempfile
import torch
from torch.utils.data import DataLoader

torch.manual_seed(0)
data = {"train": load(True), "val": load(False)}
{loaders}
sizes = {x: len(data[x]) for x in ["train", "val"]}

def fit(net, optimizer):
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(3):
            for phase in ["train", "val"]:
                total = 0.0
                for x, y in loaders[phase]:
                    loss = loss_of(net(x), y)
                    if phase == "train":
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                    total += loss.item()
                mean = total / sizes[phase]
                torch.save(net.state_dict(), f"{folder}/best.pt")
        net.load_state_dict(torch.load(f"{folder}/best.pt"))

first = torchvision.models.resnet18()
first_optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
fit(first, first_optimizer)
second = torchvision.models.resnet18()
chosen = []
for name, each in second.named_parameters():
    chosen.append(each)
second_optimizer = torch.optim.SGD(chosen, lr=0.1)
fit(second, second_optimizer)
"""
COMPREHENSION = """loaders = {
    x: DataLoader(data[x], batch_size=8, shuffle=True) for x in ["train", "val"]
}"""
LITERAL = """train = DataLoader(data["train"], batch_size=8, shuffle=True)
loaders = {"train": train, "val": DataLoader(data["val"], batch_size=8)}"""


@pytest.mark.parametrize(
    "loaders, sampler",
    [
        (COMPREHENSION, 'train_sampler if x == "train" else None'),
        (COMPREHENSION.replace("True", 'x == "train"'), 'train_sampler if x == "train" else None'),
        (LITERAL, "train_sampler"),
    ],
)
def test_of_loaders_by_phase_only_that_for_training_is_divided(loaders, sampler):
    made = done(BY_PHASE.replace("{loaders}", loaders))
    assert f"shuffle=train_sampler is None{' and x' if 'e=x' in loaders else ''}" in made.after
    assert f", sampler={sampler})" in made.after
    test = 'if hvd.size() > 1 and phase == "train":\n'
    assert f"{test}{' ' * 20}loaders[phase].sampler.set_epoch(epoch)\n" in made.after
    total = "total = sum(hvd.allgather_object(total))"
    assert f'if phase == "train":\n{" " * 20}{total}\n' in made.after
    assert "broadcast_parameters(dict(net.named_buffers())" in made.after
    assert "hvd.broadcast_parameters(second.state_dict(), root_rank=0)" in made.after
    assert made.after.count("if hvd.rank() == 0") == 0, "each rank has a temporary folder"
    assert not made.to_decide


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


def test_samples_that_each_step_draws_need_another_seed_on_each_rank():
    made = done("""
        import random
        import torch

        def chunk():
            start = random.randint(0, 99)
            return text[start : start + 9]

        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(100):
            loss_of(net, chunk()).backward()
            optimizer.step()
    """)
    left = [note.text for note in made.to_decide]
    assert any("draw other samples by random.randint: add hvd.rank()" in text for text in left)
    assert not any("shard the data" in text for text in left)


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
