"""Seeds, and what ranks draw: alike before the training, and its noise."""

from __future__ import annotations

import pytest

from tests.eight_steps.scripts import NOISY, done, torch_script


@pytest.mark.parametrize(
    "draw",
    [
        "from sklearn.model_selection import KFold\nfolds = KFold(5, shuffle=True)",
        "import random\nrandom.shuffle(files)",
        "import random\nif args.seed:\n    random.seed(args.seed)\nrandom.shuffle(files)",
        "import sklearn.utils\nx, y = sklearn.utils.shuffle(x, y)",
        "rows = rows.sample(frac=1)",
        "import numpy as np\nrng = np.random.RandomState()",
    ],
)
def test_what_ranks_draw_without_a_seed_is_pointed_out(draw):
    made = done(f"{draw}\n{torch_script()}")
    assert any("ranks draw different numbers" in note.text for note in made.to_decide)


@pytest.mark.parametrize(
    ("line", "agreed"),
    [
        ("seed = {}", "random.randint(1, 10000)"),
        ("args.manualSeed = {}", "random.randrange(9)"),
        ("torch.manual_seed(int({}))", "time.time()"),
        ("sampler = make(random_state={})", "numpy.random.randint(9)"),
    ],
)
def test_a_drawn_seed_is_that_of_rank_0(line, agreed):
    text = f"import random, time, numpy\nstart = time.time()\n{line.format(agreed)}\n"
    made = done(text + NOISY.format(drawn=""))
    assert line.format(f"hvd.broadcast_object({agreed})") in made.after
    assert "start = time.time()" in made.after
    assert not any("different numbers" in note.text for note in made.to_decide)


@pytest.mark.parametrize(
    ("used", "agreed"),
    [
        ("reseed()", True),
        ("loader = make(worker_init_fn=reseed)", False),
        ("for sample in range(8):\n    reseed()", False),
    ],
)
def test_a_seed_of_each_sample_or_worker_stays(used, agreed):
    text = f"import random\ndef reseed(*_):\n    seed: int = random.randint(0, 9)\n{used}\n"
    made = done(text + NOISY.format(drawn=""))
    assert ("hvd.broadcast_object(random.randint(0, 9))" in made.after) == agreed


def test_ranks_draw_alike_until_they_train():
    text = torch_script(
        """
        drop = torch.nn.Dropout(0.5)
        train, valid = torch.utils.data.random_split(data, [80, 20])
        """
    )
    after = done(
        text.replace(" torch.", " th.").replace("import torch\n", "import torch as th\n")
    ).after
    other = "if hvd.rank() > 0:\n    th.manual_seed(th.initial_seed() + hvd.rank())\n"
    assert f"{other}for epoch in range(3):" in after
    assert after.index("random_split") < after.index("# From here on each rank draws")


def test_noise_of_two_optimizers_is_seeded_once_before_their_training():
    second = "dropout = torch.nn.Dropout()\nhead = torch.optim.SGD(top.parameters(), lr=0.1)"
    after = done(torch_script(second, clip="head.step(); ")).after
    assert after.count("torch.manual_seed(torch.initial_seed() + hvd.rank())") == 1


def test_an_unseeded_script_takes_rank_0s_seed():
    text = torch_script().replace("torch.manual_seed(0)\n", "")
    agreed = "torch.manual_seed(hvd.broadcast_object(torch.initial_seed()))"
    assert agreed in done(text).after
    given = "def seed(n):\n    torch.manual_seed(n)\n"
    for used, open_ in (("seed(1)", False), ("if args.seed:\n    seed(args.seed)", True)):
        assert (agreed in done(f"{given}{used}\n{text}").after) == open_


@pytest.mark.parametrize(
    ("drawn", "told"),
    [("", 0), (" + torch.randn_like(x)", 1), (" + torch.nn.functional.dropout(torch.rand(8))", 0)],
)
def test_noise_that_all_ranks_draw_alike_is_pointed_out(drawn, told):
    notes = [note.text for note in done(NOISY.format(drawn=drawn)).to_decide]
    assert sum("all ranks draw the same numbers here" in note for note in notes) == told


def test_a_seeded_generator_of_numpy_is_no_noise():
    text = NOISY.format(drawn="") + "import numpy as np\norder = np.random.RandomState(0)\n"
    assert "each rank draws other random numbers" not in done(text).after


def test_noise_that_a_function_of_the_training_draws_is_pointed_out_before_a_samplers():
    made = done("""
        import torch

        class Net(torch.nn.Linear):
            def sample(self):
                return torch.randn(1, 8)

        def loss_of(x):
            noise = torch.randn_like(x)
            return (net(x + noise) - noise).mean()

        net = Net(8, 8)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            loss_of(x).backward()
            optimizer.step()
    """)
    (note,) = [each for each in made.to_decide if "same numbers" in each.text]
    assert "noise = " in made.before.split("\n")[note.line - 1]
