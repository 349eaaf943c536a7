"""What conditions on the rank are, what values depend on, and in which order things run."""

from __future__ import annotations

from pathlib import Path

import libcst as cst
import pytest

from qsgd_hpc.eight_steps.check import check, helpers
from qsgd_hpc.eight_steps.check.facts import trace
from qsgd_hpc.eight_steps.check.reach import differs, guarded, reach
from qsgd_hpc.eight_steps.reading import Script, parse

HEAD = "import horovod.torch as hvd\n"


def script(text: str) -> Script:
    return parse(HEAD + text)


def call(source: Script, name: str) -> cst.Call:
    (found,) = [c for c in source.calls if source.code(c.func) == name]
    return found


def rules(text: str) -> list[str]:
    return [each.rule.id for each in check(script(text))]


@pytest.mark.parametrize(
    ("parts", "expected"), [("1, rank=0", ["QH301"]), ("hvd.size(), rank=hvd.rank()", [])]
)
def test_a_sampler_with_one_part_shards_nothing(parts, expected):
    text = f"""
import torch

hvd.init()
sampler = torch.utils.data.DistributedSampler(data, num_replicas={parts}, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for x, y in loader:
    model(x).sum().backward()
    optimizer.step()
"""
    assert rules(text) == expected


def test_one_function_may_train_on_shards_and_validate_on_all_data():
    text = """
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

hvd.init()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

def epoch(loader, optimizer=None):
    for x, y in loader:
        loss = loss_of(model(x), y)
        if optimizer is not None:
            loss.backward()
            optimizer.step()

sampler = DistributedSampler(data, hvd.size(), hvd.rank())
epoch(DataLoader(data, sampler=sampler), optimizer)
epoch(DataLoader(tests))
"""
    assert "QH301" not in rules(text)
    assert "QH301" in rules(text.replace("sampler=sampler", "shuffle=True"))


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("hvd.rank() == 0", True),
        ("0 == hvd.rank()", True),
        ("not hvd.rank()", True),
        ("hvd.local_rank() != 0", True),
        ("hvd.rank() == 0 and verbose", True),
        ("verbose and hvd.rank() < 1", True),
        ("hvd.size() > 1", False),
        ("verbose", False),
        ("chief", True),
        ("is_chief()", True),
        ("rank == 0", True),
        ("equal", False),
    ],
)
def test_a_condition_on_the_rank_is_known_by_any_name(test, expected):
    source = script(
        "def is_chief():\n    '''Say so.'''\n    return hvd.rank() == 0\n"
        "rank, ranks = hvd.rank(), hvd.size()\nchief = rank == 0\n"
        "equal = hvd.broadcast_object(rank == 0)\n"
        f"if {test}:\n    save()\n"
    )
    (branch,) = source.branches(call(source, "save"))
    assert differs(source, branch.test) is expected


@pytest.mark.parametrize(
    "text",
    [
        "if hvd.rank() == 0:\n    save()\n",
        "hvd.rank() == 0 and save()\n",
        "hvd.rank() or save()\n",
        "x = save() if hvd.rank() == 0 else None\n",
        "if utils.is_main_process():\n    save()\n",
        "if args.rank == 0:\n    save()\n",
    ],
)
def test_a_guard_by_rank_is_seen(text):
    source = script(text)
    assert guarded(source, source.branches(call(source, "save")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\nuse(x)\n", set()),
        ("x = hvd.size()\nuse(x)\n", {"size"}),
        ("x = hvd.rank()\nuse(x == 0)\n", {"compared_rank"}),
        ("def f():\n    return hvd.size()\nuse(f())\n", {"size"}),
        ("def f(x):\n    use(x)\nf(hvd.size())\n", {"size"}),
        ("a = []\na.append(hvd.size())\nuse(a)\n", {"size"}),
        ("a = {}\na['n'] = hvd.size()\nuse(a)\n", {"size"}),
        ("n = 1\nn *= hvd.size()\nuse(n)\n", {"size"}),
        ("for x in range(hvd.size()):\n    use(x)\n", {"size"}),
        ("size = 1\nuse(other.size, size=3)\n", set()),
        ("a, (b, c) = 1, (2, hvd.size())\nuse(b)\n", set()),
        ("a, (b, c) = 1, (2, hvd.size())\nuse(c)\n", {"size"}),
        ("class C:\n    def __init__(self):\n        self.n = hvd.size()\n"
         "    def f(self):\n        use(self.n)\n", {"size"}),
    ],
)  # fmt: skip
def test_a_value_reaches_what_it_comes_from(text, expected):
    source = script(text)
    found = reach(source, *(each.value for each in call(source, "use").args))
    assert found.api == expected


def test_own_functions_are_entered_where_they_are_called():
    source = script("def a():\n    b()\n    c()\ndef b():\n    d()\na()\ne()\n")
    names = [source.code(each.call.func) for each in trace(source)]
    assert names == ["d", "b", "c", "a", "e"]


def test_a_function_given_to_another_is_entered():
    source = script("def work():\n    step()\ntimeit(work, number=3)\n")
    assert [source.code(each.call.func) for each in trace(source)] == ["step", "timeit"]


def test_recursion_ends():
    source = script("def a(n):\n    a(n - 1)\n    b(n)\ndef b(n):\n    a(n)\na(3)\n")
    assert len(trace(source)) < 40


@pytest.mark.parametrize(
    "text",
    [
        # Both sides take part.
        "if hvd.rank() == 0:\n    x = hvd.broadcast_object(1)\nelse:\n"
        "    x = hvd.broadcast_object(None)\n",
        "x = hvd.broadcast_object(1) if hvd.rank() == 0 else hvd.broadcast_object(None)\n",
        # All ranks decide alike.
        "if hvd.size() > 1:\n    hvd.barrier()\n",
        "stop = hvd.broadcast_object(hvd.rank() == 0)\nif stop:\n    hvd.barrier()\n",
        # A process set has the ranks that come.
        "if hvd.rank() == 0:\n    hvd.allreduce(x, process_set=first)\n",
        # Nothing comes later.
        "def f():\n    hvd.barrier()\n    if hvd.rank() != 0:\n        return\n    write()\nf()\n",
        # It leaves the inner loop alone.
        "for i in r:\n    for j in s:\n        if hvd.rank() == 0:\n            break\n"
        "    hvd.barrier()\n",
        # Those who leave have taken part.
        "def f():\n    if hvd.rank() == 0:\n        hvd.barrier()\n        return\n"
        "    hvd.barrier()\nf()\n",
        # Rank 0 works while the others wait for it.
        "if hvd.local_rank() == 0:\n    download()\nhvd.barrier()\n",
        "if hvd.rank() == 0:\n    raise ValueError\nhvd.barrier()\n",
        # One goes first.
        "if hvd.rank() != 0:\n    hvd.barrier()\nf()\nif hvd.rank() == 0:\n    hvd.barrier()\n",
        "r = hvd.rank()\nif not r:\n    hvd.barrier()\nif r:\n    hvd.barrier()\n",
    ],
)
def test_no_hang_is_claimed_where_all_ranks_take_part(text):
    assert not {"QH901", "QH902", "QH903"} & set(rules("hvd.init()\n" + text))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("if hvd.rank() == 0:\n    hvd.barrier()\n", "QH901"),
        ("if hvd.rank() == 0:\n    hvd.barrier()\nif hvd.rank() != 0:\n    f()\n", "QH901"),
        ("if hvd.rank() == 0:\n    pass\nelse:\n    hvd.barrier()\n", "QH901"),
        ("if verbose:\n    pass\nelif hvd.rank() == 0:\n    hvd.barrier()\n", "QH901"),
        ("hvd.rank() == 0 and hvd.barrier()\n", "QH901"),
        ("rank = hvd.rank()\nif not rank:\n    x = hvd.allreduce(x)\n", "QH901"),
        ("def f():\n    hvd.barrier()\nif hvd.rank():\n    f()\n", "QH902"),
        ("def f():\n    hvd.barrier()\nif hvd.rank() == 0:\n    f()\n", "QH902"),
        ("def g():\n    hvd.barrier()\ndef f():\n    g()\nif hvd.rank() == 0:\n    f()\n", "QH902"),
        ("for i in r:\n    if hvd.rank() == 0:\n        continue\n    hvd.barrier()\n", "QH903"),
        ("def f():\n    if hvd.rank() != 0:\n        return 1\n    hvd.barrier()\nf()\n", "QH903"),
        ("for i in r:\n    if hvd.rank() == 0:\n        break\n    hvd.barrier()\n", "QH903"),
        ("from horovod.torch import barrier, rank\nif rank() == 0:\n    barrier()\n", "QH901"),
        ("from horovod.torch import *\nif rank() == 0:\n    barrier()\n", "QH901"),
    ],
)
def test_a_hang_is_found(text, rule):
    assert [each for each in rules("hvd.init()\n" + text) if each[2] == "9"] == [rule]


TORCH_STEP = """import torch
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=hvd.size()))
for x, y in loader:
    if scaler:
        scaler.scale(loss).backward()
        {first}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        scaler.step(optimizer)
    else:
        loss.backward()
        {second}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
"""
UNSCALE, WAIT = "scaler.unscale_(optimizer)", "optimizer.synchronize()"


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [(UNSCALE, "pass", 1), (UNSCALE, WAIT, 0), ("pass", WAIT, 1), ("pass", "pass", 2)],
)
def test_each_branch_that_clips_must_wait_for_the_average(first, second, count):
    text = "hvd.init()\n" + TORCH_STEP.format(first=first, second=second)
    assert rules(text).count("QH504") == count


LOADERS = """import torch
def make(args):
    sampler = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank())
    train = torch.utils.data.DataLoader({train})
    return train, torch.utils.data.DataLoader(tests)
loader, test_loader = make(args)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=hvd.size()))
for x in loader:
    loss_of(x).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("train", "found"), [("data, sampler=sampler", False), ("data, shuffle=True", True)]
)
def test_each_loader_that_a_function_returns_is_judged_by_itself(train, found):
    assert ("QH301" in rules("hvd.init()\n" + LOADERS.format(train=train))) == found


@pytest.mark.parametrize(("package", "found"), [("horovod", True), ("qsgd_hpc", False)])
def test_only_horovod_needs_names_for_two_optimizers(package, found):
    text = f"""import torch
import {package}.torch as hvd
hvd.init()
first = hvd.DistributedOptimizer(torch.optim.SGD(one.parameters(), lr=hvd.size()))
second = hvd.DistributedOptimizer(torch.optim.SGD(two.parameters(), lr=hvd.size()))
"""
    assert ("QH503" in [each.rule.id for each in check(parse(text))]) == found


def test_two_optimizers_of_keras_need_no_names():
    text = """import keras, torch
import horovod.keras as hvd
hvd.init()
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(hvd.size())))
model.fit(x[hvd.rank() :: hvd.size()])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(hvd.size())))
model.fit(x[hvd.rank() :: hvd.size()])
"""
    assert "QH503" not in [found.rule.id for found in check(parse(text))]


OTHERS = """import torch
from lion_pytorch import Lion
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=hvd.size()))
opt_head = {made}
for x in loader:
    loss_of(x).backward()
    optimizer.step()
    opt_head.step()
"""


@pytest.mark.parametrize(
    ("made", "count"),
    [
        ("Lion(head.parameters())", 1),
        ("hvd.DistributedOptimizer(Lion(head.parameters()))", 0),
        ("wrapped(head)", 0),
    ],
)
def test_an_optimizer_of_another_package_must_be_wrapped_too(made, count):
    text = "hvd.init()\n" + OTHERS.format(made=made)
    assert rules(text).count("QH501") == count


KERAS = """
import keras
import horovod.keras as hvd
hvd.init()
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())))
best = keras.callbacks.ModelCheckpoint("best.keras", monitor="loss")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
GUARD    callbacks.append(best)
model.fit(data.shard(hvd.size(), hvd.rank()), callbacks=callbacks)
"""


@pytest.mark.parametrize(("guard", "found"), [("if hvd.rank() == 0:\n", False), ("if 1:\n", True)])
def test_a_callback_writes_where_it_is_used_not_where_it_is_made(guard, found):
    source = parse(KERAS.replace("GUARD", guard))
    assert ("QH701" in [each.rule.id for each in check(source)]) == found


def test_one_entry_of_a_checkpoint_is_not_all_of_them():
    text = """
import torch
hvd.init()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
step, best = 0, 1e9
if resume:
    checkpoint = torch.load("c.pt")
    step = checkpoint["step"]
    best = checkpoint["best"]
while True:
    loss = model(batch())
    loss.backward()
    optimizer.step()
    best = min(best, loss.item())
    checkpoint = {"step": step, "best": best}
    step += 1
    if step > 100:
        break
"""
    assert "QH802" not in rules(text)


@pytest.mark.parametrize(
    ("opened", "found"),
    [
        ("h5py.File('a', 'w')", True),
        ("h5py.File(f'a{hvd.rank()}', 'w')", False),
        ("h5py.File('a', 'w', driver='mpio')", False),
        ("h5py.File('a', 'r')", False),
        ("h5py.File('a', a)", False),
        ("netCDF4.Dataset('a', 'ws')", True),
        ("zarr.open('a', 'r+')", False),
        ("tf.io.TFRecordWriter('a')", True),
        ("tf.io.TFRecordWriter(f'a-{hvd.rank()}')", False),
    ],
)
def test_a_file_of_data_is_written_by_one_rank(opened, found):
    imports = "import h5py, netCDF4, zarr\nimport tensorflow as tf\n"
    text = f"hvd.init()\n{imports}out = {opened}\n" + OTHERS.format(made="wrapped(head)")
    assert ("QH701" in rules(text)) == found


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("np.save('a.npy', a)", True),
        ("np.savez(file='a.npz', a=a)", True),
        ("np.save(f'a{hvd.rank()}.npy', a)", False),
        ("np.savez(file=f'a{hvd.rank()}.npz', a=a)", False),
        ("plt.savefig('a.png')", True),
        ("plt.savefig(fname=f'a{hvd.rank()}.png')", False),
        ("joblib.dump(a, 'a.joblib')", True),
        ("joblib.dump(a, f'a{hvd.rank()}.joblib')", False),
        ("if hvd.rank() == 0: plt.savefig('a.png')", False),
    ],
)
def test_arrays_and_plots_are_written_by_one_rank(written, found):
    text = "import joblib, numpy as np, matplotlib.pyplot as plt\nhvd.init()\n" + written
    assert ("QH701" in rules(text)) == found


def test_optax_wraps_nothing_also_where_it_is_not_installed(monkeypatch):
    clean = Path(__file__).parents[1] / "check" / "clean" / "jax_loop.py"
    wrapped = "hvd.DistributedOptimizer(optax.adam(0.01 * hvd.size()))"
    text = clean.read_text(encoding="utf-8")
    assert wrapped in text
    monkeypatch.setattr(helpers, "installed", lambda _: False)
    bare = parse(text.replace(wrapped, "optax.adam(0.01 * hvd.size())"))
    assert [each.rule.id for each in check(bare)] == ["QH501"]


@pytest.mark.parametrize(("rest", "found"), [("", True), (".shuffle(99).batch(8)", False)])
def test_sequences_that_batch_makes_may_be_sharded(rest, found):
    text = f"""import tensorflow as tf
hvd.init()
sequences = tf.data.Dataset.from_tensor_slices(text).batch(9).shard(hvd.size(), hvd.rank())
data = sequences{rest}
"""
    assert ("QH302" in rules(text)) == found


@pytest.mark.parametrize(
    ("line", "found"), [("is_main = lambda: hvd.rank() == 0", False), ("hvd.rank()", True)]
)
def test_a_function_that_is_defined_above_init_may_use_it(line, found):
    assert ("QH102" in rules(f"{line}\nhvd.init()\nhvd.size()\n")) == found
