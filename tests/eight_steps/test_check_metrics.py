"""When a metric is one rank's, and when it is the whole already."""

from __future__ import annotations

import pytest

from qsgd_hpc.eight_steps.check import check
from qsgd_hpc.eight_steps.reading import parse

SCRIPT = """
import torch
import horovod.torch as hvd

hvd.init()
x = torch.load("x.pt")
mine = x[hvd.rank() :: hvd.size()]
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(3):
    optimizer.zero_grad()
    model(mine).sum().backward()
    optimizer.step()
{end}
"""


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("loss = model(mine).sum()\nif hvd.rank() == 0:\n    print(loss)", ["QH801"]),
        ("loss = model(mine).sum()\nif hvd.rank() == 0:\n    print(f'{loss:.3f}')", ["QH801"]),
        # Every rank has tested on all of the data.
        ("loss = model(x).sum()\nif hvd.rank() == 0:\n    print(loss)", []),
        ("loss = hvd.allreduce(model(mine).sum())\nif hvd.rank() == 0:\n    print(loss)", []),
        (
            "loss = model(mine).sum()\nhvd.allreduce_(loss)\nif hvd.rank() == 0:\n    print(loss)",
            [],
        ),
        # Another loop has the same names.
        (
            "for mine in x.split(8):\n    loss = model(mine).sum()\n"
            "if hvd.rank() == 0:\n    print(loss)",
            [],
        ),
        # A function may be given a shard, too, in another call.
        (
            "def loss_of(y):\n    return y.sum()\nown = loss_of(model(mine))\n"
            "loss = loss_of(model(x))\nif hvd.rank() == 0:\n    print(loss)",
            [],
        ),
        (
            "def loss_of(y):\n    return y.sum()\nloss = loss_of(model(mine))\n"
            "if hvd.rank() == 0:\n    print(loss)",
            ["QH801"],
        ),
        # Sums of other functions have the same names.
        (
            "def trained():\n    meter = Meter()\n    meter.update(model(mine).sum())\n"
            "    return meter\ndef tested():\n    meter = Meter()\n"
            "    meter.update(model(x).sum())\n    return meter\nown = trained()\n"
            "loss = tested()\nif hvd.rank() == 0:\n    print(loss)",
            [],
        ),
        (
            "def add(losses):\n    losses.append(model(mine).sum())\nfound = []\nadd(found)\n"
            "def whole():\n    losses = []\n    add(losses)\n    return losses\nloss = whole()\n"
            "if hvd.rank() == 0:\n    print(loss)",
            ["QH801"],
        ),
        # The same, if the function returns several values.
        (
            "def losses_of(y):\n    total = y.sum()\n    return total, y.max()\n"
            "own, _ = losses_of(model(mine))\nloss, _ = losses_of(model(x))\n"
            "if hvd.rank() == 0:\n    print(loss)",
            [],
        ),
        (
            "def losses_of(y):\n    total = y.sum()\n    return total, y.max()\n"
            "whole, _ = losses_of(model(x))\nloss, _ = losses_of(model(mine))\n"
            "if hvd.rank() == 0:\n    print(loss)",
            ["QH801"],
        ),
        (
            "def say(loss):\n    if hvd.rank() == 0:\n        print(loss)\nsay(x)\nsay(mine)",
            ["QH801"],
        ),
        # Every rank says what it has.
        ("loss = model(mine).sum()\nprint(hvd.rank(), loss)", []),
        # A method may be given anything.
        (
            "class Log:\n    def say(self, loss):\n        if hvd.rank() == 0:\n"
            "            print(loss)\nLog().say(model(mine))",
            [],
        ),
        ("count = len(mine)\nif hvd.rank() == 0:\n    print(count)", []),
    ],
)
def test_a_metric_of_a_shard_is_not_the_whole(end, expected):
    found = [each.rule.id for each in check(parse(SCRIPT.format(end=end)))]
    assert [each for each in found if each == "QH801"] == expected
    assert not {"QH101", "QH301", "QH501", "QH601", "QH701", "QH901"} & set(found)


WHILE = SCRIPT.replace("for epoch in range(3):", "loss = one\nwhile {test}:").replace(
    "    model(mine).sum().backward()", "    loss = {loss}\n    loss.backward()"
)


@pytest.mark.parametrize(
    ("test", "loss", "expected"),
    [
        ("loss.item() > 0.01", "model(mine).sum()", True),
        ("float(hvd.allreduce(loss)) > 0.01", "model(mine).sum()", False),
        ("loss.item() > 0.01", "model(x).sum()", False),
        ("epoch < 3", "model(mine).sum()", False),
    ],
)
def test_a_training_that_lasts_as_long_as_a_ranks_own_loss_is_large_is_found(test, loss, expected):
    found = [each.rule.id for each in check(parse(WHILE.format(test=test, loss=loss, end="")))]
    assert ("QH802" in found) == expected


PLATEAU = (
    SCRIPT.replace(
        "for epoch", "plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\nfor epoch"
    )
    .replace(
        "    model(mine).sum().backward()", "    loss = model(mine).sum()\n    loss.backward()"
    )
    .replace("{end}", "    plan.step({loss})")
)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [("loss", True), ("loss.item()", True), ("hvd.allreduce(loss)", False), ("loss_of(x)", False)],
)
def test_a_rate_that_falls_by_a_ranks_own_loss_is_found(loss, expected):
    found = [each.rule.id for each in check(parse(PLATEAU.format(loss=loss)))]
    assert ("QH802" in found) == expected


GAME = """
class Game:
    def {name}(self):
        self.state = 0

    def step(self, action):
        return self.state + action{more}

world = Game()
"""


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [("reset", ", 1", True), ("restart", ", 1", False), ("reset", "", False)],
)
def test_a_step_of_an_environment_of_the_script_differs_between_ranks(name, more, expected):
    game = GAME.format(name=name, more=more)
    text = SCRIPT.format(end="").replace("for epoch", f"{game}for epoch", 1)
    step = "    model(mine).sum().backward()"
    kl = "    old[0], new[0] = world.step(1)\n    kl = (old - new).mean()\n"
    leave = f"{kl}    if kl > 0.02:\n        break\n{step}"
    found = [each.rule.id for each in check(parse(text.replace(step, leave)))]
    assert ("QH802" in found) == expected


JAX = """
import jax, optax
import qsgd_hpc.jax as hvd

hvd.init()
test, data, params = load()
mine = data[hvd.rank() :: hvd.size()]
optimizer = hvd.DistributedOptimizer(optax.sgd(0.1 * hvd.size()))
params = hvd.broadcast_parameters(params, root_rank=0)
state = optimizer.init(params)
for x in mine:
    loss, gradients = jax.value_and_grad(loss_of)(params, x)
    updates, state = optimizer.update(gradients, state)
    params = optax.apply_updates(params, updates)
if hvd.rank() == 0:
    print("test", {metric})
"""


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("loss_of(params, test)", False),
        ("f'{accuracy(params, test):.2f}'", False),
        ("loss_of(params, mine)", True),
        ("loss", True),
        ("loss, accuracy(params, test)", True),
        ("loss / accuracy(params, test)", True),
    ],
)
def test_equal_parameters_make_no_metric_one_ranks(metric, expected):
    found = [each.rule.id for each in check(parse(JAX.format(metric=metric)))]
    assert ("QH801" in found) == expected
