"""Step 3 of the conversion for PyTorch, a rule at a time: loaders and arrays."""

from __future__ import annotations

import pytest

from tests.eight_steps.scripts import done, torch_script


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
    made = done(
        SLICES.format(size="n = len(x)", after="").replace("\noptimizer", f"\n{after}\noptimizer")
    )
    assert [note.text for note in made.to_decide] == [
        "here and below, only this rank's part of x, y is left."
    ]


def test_a_divisor_of_which_only_itself_is_known_is_left_to_the_author():
    text = torch_script("from settings import *\nn = n // 2 + n // 3", "print(total / n)")
    assert any("total covers only" in note.text for note in done(text).to_decide)


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


RETURNED = """
import torch
from torch.utils.data import DataLoader

def load(data, tests):
    return {made}

def run(loader, optimizer=None):
    total = 0.0
    for x, y in loader:
        loss = loss_of(model(x), y)
        if optimizer is not None:
            loss.backward()
            optimizer.step()
        total += loss.item() * len(x)
    return total / len(loader.dataset)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train, val = load(*read())
for epoch in range(2):
    run(train, optimizer)
    run(val)
"""
PAIR = "DataLoader(data, 8, shuffle=True), DataLoader(tests, 8, shuffle=True)"
PARTIAL = "total covers only this rank's batches: average over the ranks."


def test_of_loaders_that_a_function_returns_only_that_for_training_is_divided():
    made = done(RETURNED.format(made=PAIR).replace("    run(val)\n", ""))
    sampled = "DataLoader(data, 8, shuffle=train_sampler is None, sampler=train_sampler)"
    assert f"return {sampled}, DataLoader(tests, 8, shuffle=True)\n" in made.after
    assert not made.to_decide


@pytest.mark.parametrize("load", ["load", "imported"])
def test_a_loop_over_several_loaders_that_functions_return_sums_no_tests(load):
    text = RETURNED.format(made="DataLoader(data, 8, shuffle=True), DataLoader(tests, 8)")
    made = done(text.replace("= load(", f"= {load}("))
    assert [note.text for note in made.to_decide] == [PARTIAL]
    assert 'hasattr(getattr(loader, "sampler", None), "set_epoch")' in made.after


def test_loaders_of_one_line_that_cannot_be_told_apart_have_a_sampler_each():
    made = done(RETURNED.format(made=f"[{PAIR}]"))
    assert "sampler=train_sampler), DataLoader(" in made.after
    assert "sampler=train_rank_sampler)]\n" in made.after
    assert "if this loads test data, leave out its sampler." in [n.text for n in made.to_decide]


def test_loaders_by_phase_may_be_unknown():
    text = BY_PHASE.replace("{loaders}", "train = DataLoader(data['train'], shuffle=True)")
    made = done(text.replace("sizes = ", "loaders = imported(train)\nsizes = "))
    assert PARTIAL in [note.text for note in made.to_decide]


@pytest.mark.parametrize(
    "over", ["zip(first, second)", "enumerate(zip(first, itertools.cycle(second)))"]
)
def test_each_loader_of_a_zip_is_divided(over):
    text = LOADER.format(loader="DataLoader(data, 8, True)").replace("loader = ", "first = ")
    text = text.replace("\nfor epoch", "\nsecond = DataLoader(other, 8, True)\nfor epoch")
    made = done(f"import itertools\n{text.replace('in loader', f'in {over}')}")
    for name in ("first", "second"):
        assert f"sampler={name}_sampler)\n" in made.after
        assert f"    if hvd.size() > 1:\n        {name}.sampler.set_epoch(epoch)\n" in made.after
    assert not made.to_decide


@pytest.mark.parametrize(("over", "told"), [("range(1000)", True), ("batches_of(data)", False)])
def test_steps_on_all_data_need_no_larger_rate(over, told):
    made = done(f"""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for each in {over}:
            loss_of(model(x), y).backward()
            optimizer.step()
    """)
    (note,) = [note.text for note in made.to_decide if "shard the data" in note.text]
    assert note.endswith("If each step uses all data, leave the learning rate as it was.") == told
