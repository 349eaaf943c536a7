"""Step 7 of the conversion, a rule at a time: what only rank 0 prints and writes."""

from __future__ import annotations

import pytest

from qsgd_hpc.eight_steps.convert import convert
from tests.eight_steps.scripts import TF2, done, torch_script


def test_what_rank_0_prints_is_computed_by_every_rank():
    text = """
        import torch
        from torch.utils.data import DataLoader

        def train(model, optimizer, loader):
            for x, y in loader:
                loss = model(x, y)
                loss.backward()
                optimizer.step()
            return 1

        def main():
            torch.manual_seed(0)
            loader = DataLoader(data, 8, shuffle=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for epoch in range(2):
                print("epoch", epoch, train(model, optimizer, loader), flush=True)

        if __name__ == "__main__":
            main()
    """
    after = done(text).after
    assert 'printed = ("epoch", epoch, train(model, optimizer, loader))' in after
    assert "print(*printed, flush=True)" in after
    assert "loader.sampler.set_epoch(" in after
    assert after.index("if __name__") < after.index("hvd.init()")


def test_a_keyword_behind_a_star_is_seen():
    before = "from tqdm import tqdm\nfor line in tqdm(*files, disable=quiet): pass"
    assert "tqdm(*files, disable=quiet)" in done(torch_script(setup=before)).after


def test_lines_inside_of_a_string_are_not_indented_with_what_prints_it():
    made = done(torch_script(after='print("""one\ntwo""")'))
    assert 'print("""one\n    two""")' in made.after or 'print("""one\ntwo""")' in made.after
    assert made.before.split("two")[0][-5:] == made.after.split("two")[0][-5:]


def test_neighbouring_prints_share_one_condition():
    made = done(torch_script(after="print(1)\nprint(2)"))
    assert "    if hvd.rank() == 0:\n        print(1)\n        print(2)\n" in made.after


def test_an_output_among_other_statements_of_a_line_is_rank_0s():
    setup = "model.train(); a = 1; torch.save(a,\n  'a.pt'); print('two\\nlines'); b = 2  # why"
    after = done(torch_script(setup, after="print(b); b += 1")).after
    assert (
        "model.train()\na = 1\nif hvd.rank() == 0:\n    torch.save(a,\n  'a.pt')\n"
        "if hvd.rank() == 0:\n    print('two\\nlines')\nb = 2  # why\n"
    ) in after
    assert "    if hvd.rank() == 0:\n        print(b)\n    b += 1\n" in after


@pytest.mark.parametrize("setup", ["for i in range(2): print(i)", "if a: print(a); b = 1"])
def test_an_output_on_the_line_of_a_compound_statement_is_left_to_the_author(setup):
    made = done(torch_script(setup))
    assert setup in made.after
    assert [note.text for note in made.to_decide] == [
        "every rank does this, but only rank 0 should write or print."
    ]


def test_an_output_that_trains_among_other_statements_is_left_to_the_author():
    made = done("""
        import torch

        def fit(model, optimizer):
            for x in data:
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
            return 1

        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        a = 1; print(fit(model, optimizer))
        torch.save(fit(model, optimizer), "a.pt")
    """)
    assert "a = 1; print(fit(model, optimizer))" in made.after
    assert any("every rank must do the work" in note.text for note in made.to_decide)
    assert sum("every rank must do" in note.text for note in made.to_decide) == 2  # one a line


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ("wandb.init()", 'wandb.init(mode=None if hvd.rank() == 0 else "disabled")'),
        (
            "run = wandb.init(mode='offline' if a else b)",
            "run = wandb.init(mode=('offline' if a else b) if hvd.rank() == 0 else \"disabled\")",
        ),
        (
            "run = neptune.init_run(project='a')",
            "run = neptune.init_run(project='a', mode=None if hvd.rank() == 0 else \"debug\")",
        ),
        ("e = comet_ml.Experiment()", "e = comet_ml.Experiment(disabled=hvd.rank() != 0)"),
        (
            "e = comet_ml.start()",
            "e = comet_ml.start(experiment_config=comet_ml.ExperimentConfig("
            "disabled=hvd.rank() != 0))",
        ),
        (
            "w = SummaryWriter()",
            "w = SummaryWriter(log_dir=None if hvd.rank() == 0 else tempfile.mkdtemp())",
        ),
        (
            "with SummaryWriter('logs') as w:\n    train(w)",
            "with SummaryWriter('logs' if hvd.rank() == 0 else tempfile.mkdtemp()) as w:\n"
            "    train(w)",
        ),
        ("f = open('a', 'w')", "f = open('a' if hvd.rank() == 0 else os.devnull, 'w')"),
        (
            "with tf.io.TFRecordWriter('a') as f:\n    for x in data:\n        f.write(x)",
            "with tf.io.TFRecordWriter('a' if hvd.rank() == 0 else os.devnull) as f:\n",
        ),
        (
            "f = tf.io.TFRecordWriter(path='a')",
            "f = tf.io.TFRecordWriter(path='a' if hvd.rank() == 0 else os.devnull)",
        ),
        (
            "f = h5py.File('a', 'w')",
            "f = h5py.File('a' if hvd.rank() == 0 else tempfile.mkdtemp() + \"/other\", 'w')",
        ),
        (
            "with (out / 'a').open('w') as f:\n    json.dump(b, f)",
            "if hvd.rank() == 0:\n    with (out / 'a').open('w') as f:\n        json.dump(b, f)\n",
        ),
        (
            "with out.open(mode='a') as f:\n    f.write('b')",
            "if hvd.rank() == 0:\n    with out.open(mode='a') as f:\n        f.write('b')\n",
        ),
        ("scipy.io.savemat('a', b)", "if hvd.rank() == 0:\n    scipy.io.savemat('a', b)\n"),
        ("plt.imsave('a.png', b)", "if hvd.rank() == 0:\n    plt.imsave('a.png', b)\n"),
        ("b.tofile('a')", "if hvd.rank() == 0:\n    b.tofile('a')\n"),
        (
            "with h5py.File('a', 'w') as f:\n    f['x'] = 1\n    f.attrs['y'] = 2",
            "if hvd.rank() == 0:\n    with h5py.File('a', 'w') as f:\n        f['x'] = 1\n",
        ),
        (
            "d = netCDF4.Dataset('a', mode='r')\ne = h5py.File('b', 'w', driver='mpio')",
            "d = netCDF4.Dataset('a', mode='r')\ne = h5py.File('b', 'w', driver='mpio')\n",
        ),
        (
            "logging.basicConfig(filename='a')",
            "logging.basicConfig(filename='a' if hvd.rank() == 0 else os.devnull)",
        ),
        (
            "with open('a', 'w') as f:\n    best = 1\n    f.write('x')\nx = best",
            "with open('a' if hvd.rank() == 0 else os.devnull, 'w') as f:\n    best = 1\n"
            "    f.write('x')\nx = best",
        ),
        ("if not os.path.exists(d):\n    os.makedirs(d)", "    os.makedirs(d, exist_ok=True)"),
        (
            "mlflow.start_run()\nx = mlflow.active_run().info.run_id",
            "\nmlflow.start_run()\nx = mlflow.active_run().info.run_id",
        ),
        (
            "mlflow.set_tracking_uri('here')\nmlflow.start_run()",
            "if hvd.rank() == 0:\n    mlflow.set_tracking_uri('here')\n",
        ),
    ],
)
def test_what_keeps_a_state_is_on_every_rank_and_its_effect_on_one(setup, expected):
    imports = "import comet_ml, h5py, netCDF4, logging, mlflow, neptune, wandb\n"
    imports += "import matplotlib.pyplot as plt\nimport scipy.io\nimport tensorflow as tf\n"
    imports += "from torch.utils.tensorboard import SummaryWriter\n"
    made = convert(imports + torch_script(setup))
    assert expected in made.after
    assert made.to_decide == ()
    for module, used in (("os", "os.devnull"), ("tempfile", "tempfile.mkdtemp")):
        assert made.after.count(f"import {module}\n") == (used in made.after)
    others = '    mlflow.set_tracking_uri(f"sqlite:///{tempfile.mkdtemp()}/mlflow.db")\n'
    assert made.after.count(f"if hvd.rank() != 0:\n{others}") == ("mlflow" in setup)


@pytest.mark.parametrize(
    "setup",
    [
        "wandb.init(**options)",
        "wandb.agent(sweep, main)",
        "f = open('a', 'w+')",
        "f = h5py.File('a', 'a')",
        "with path.open('w') as f:\n    best = 1\n    f.write('x')\nx = best",
        "f = path.open('x')",
    ],
)
def test_a_state_that_cannot_be_kept_apart_is_left_to_the_author(setup):
    assert convert("import h5py, wandb\n" + torch_script(setup)).to_decide


def test_calls_of_a_tracker_that_another_module_opens_are_rank_0s():
    after = convert("import wandb\n" + torch_script(after="wandb.log({})")).after
    assert "if hvd.rank() == 0:\n        wandb.log({})" in after


FIRST = "if hvd.rank() != 0:\n    hvd.barrier()\n"


LAST = "if hvd.rank() == 0:\n    hvd.barrier()\n"


WAIT = "hvd.barrier()  # until rank 0 has written the file\n"


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (
            "np.save('a.npy', a)\nprint('saved')\na = np.load('a.npy')",
            f"    print('saved')\n{WAIT}a = np.load('a.npy')\n",
        ),
        (
            "with open('a', 'w') as f:\n    for w in a:\n        f.write(w)\nb = open('a').read()",
            f"        f.write(w)\n{WAIT}b = open('a').read()\n",
        ),
        (
            "for w in a:\n    np.save(w, w)\nb = [np.load(w) for w in a]",
            f"        np.save(w, w)\n{WAIT}b = [np",
        ),
        (
            "f = open('a', 'w')\nf.write(b)\nf.close()\nb = open('a').read()",
            f"f.close()\n{WAIT}b = open('a').read()\n",
        ),
        (
            "if not os.path.exists('a'):\n    np.save('a', b)\na = np.load('a')",
            f"{FIRST}if not os.path.exists('a'):\n    # ",
        ),
        (
            "try:\n    a = np.load('a')\nexcept OSError:\n    np.save('a', b)",
            f"{FIRST}try:\n",
        ),
        (
            "def make():\n    if os.path.exists('a'):\n        return np.load('a')\n"
            "    np.save('a', b)\n    return b\nb = make()",
            f"{FIRST}b = make()\n{LAST}",
        ),
        (
            "class Data:\n    def __init__(self):\n        if not os.path.exists('a'):\n"
            "            self.make()\n        self.a = np.load('a')\n\n    def make(self):\n"
            "        np.save('a', b)\n\nd = Data()",
            "    if hvd.rank() == 0:\n            hvd.barrier()\n        self.a = ",
        ),
    ],
)
def test_ranks_read_a_file_from_before_the_training_when_rank_0_has_written_it(setup, expected):
    after = convert("import os\nimport numpy as np\n" + torch_script(setup)).after
    assert expected in after
    assert after.count("hvd.barrier()") == (1 if WAIT in after else 2)


@pytest.mark.parametrize(
    ("setup", "after"),
    [
        ("np.save('a', b)", "pass"),  # nothing is read
        ("plt.savefig('a')\nb = np.load('b')", "pass"),
        ("b = np.load('b')", "np.save('a', b)"),  # the training writes
        ("def get(i):\n    np.save(i, b)\n    return np.load(i)", "pass"),  # no known caller
    ],
)
def test_ranks_do_not_wait_for_other_files(setup, after):
    imports = "import numpy as np\nimport matplotlib.pyplot as plt\n"
    assert "hvd.barrier()" not in convert(imports + torch_script(setup, after)).after


@pytest.mark.parametrize("returns", [False, True])
def test_ranks_that_look_for_a_download_agree(returns):
    early = "    if os.path.exists('a'):\n        return\n    urlretrieve(url, 'a')\n"
    late = "    if not os.path.exists('a'):\n        urlretrieve(url, 'a')\n"
    fetch = f"def fetch():\n{early if returns else late}\nfetch()\n"
    imports = "import os\nfrom urllib.request import urlretrieve\n"
    after = convert(imports + torch_script(fetch)).after
    wait = "if hvd.local_rank() != 0:\n"
    assert f"{wait}    hvd.barrier()\nfetch()\n" in after or (
        f"{wait}        hvd.barrier()\n    if not os.path.exists('a'):\n" in after
    )
    assert after.count("hvd.barrier()") == 2


@pytest.mark.parametrize(
    ("use", "left"),
    [("print(f'saved {path}')", False), ("pass", False), ("check(path)", True)],
)
def test_a_checkpoint_whose_path_is_only_printed_is_rank_0s(use, left):
    made = done(f"{TF2}path = tf.train.CheckpointManager(c, 'd', 3).save()\n{use}\n")
    saved = "path = tf.train.CheckpointManager(c, 'd', 3).save() if hvd.rank() == 0 else None\n"
    assert (saved in made.after) != left
    assert any("only rank 0 may do this" in note.text for note in made.to_decide) == left
