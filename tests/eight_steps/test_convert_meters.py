"""Objects that average, such as an `AverageMeter`: their sums become those of all ranks."""

from __future__ import annotations

from textwrap import dedent, indent

import pytest

from qsgd_hpc.eight_steps.check import check
from qsgd_hpc.eight_steps.reading import parse
from tests.eight_steps.scripts import done, has, torch_script

METER = """
class AverageMeter(object):
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count
"""
PROPERTY = """
class Running:
    def __init__(self):
        self.total, self.n = 0.0, 0

    def add(self, x):
        self.total = self.total + x
        self.n += 1

    @property
    def mean(self):
        return self.total / self.n if self.n else 0.0
"""
NUMBERS = """
losses.sum = sum(hvd.allgather_object(losses.sum))
losses.count = sum(hvd.allgather_object(losses.count))
losses.avg = losses.sum / losses.count
"""
LEFT = "losses covers only this rank's batches: average over the ranks."


def converted(
    start="losses = AverageMeter()",
    update="losses.update(loss.item(), len(x))",
    after="print(losses.avg)",
    before="",
    kind=METER,
):
    """Convert the smallest script with such an object; the check must agree with the conversion."""
    text = torch_script(f"{kind.strip()}\n{before}".strip(), after)
    text = text.replace("total += loss.item()", indent(dedent(update), " " * 8).strip())
    made = done(text.replace("total = 0.0", indent(dedent(start), " " * 4).strip()))
    found = [each.rule.id for each in check(parse(made.after))]
    assert found == (["QH801"] if made.to_decide else [])
    return made


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"before": "losses = AverageMeter()", "start": "losses.reset()"},
        {
            "before": "losses = AverageMeter()",
            "start": "pass",
            "after": "print(losses.avg)\nlosses.reset()",
        },
        {"after": "best = losses.avg\nif best < 0.1:\n    break"},
        {"after": "print(losses.sum / len(loader.dataset))"},
        {"kind": METER.replace("self.sum += val * n", "self.sum = self.sum + val * n")},
    ],
)
def test_a_meter_that_begins_anew_in_each_epoch_is_summed(how):
    made = converted(**how)
    assert has(made, NUMBERS) and not made.to_decide
    comment = "# Step 8: average the metrics. Every rank has summed over its own shard"
    assert made.after.count(comment) == 1


@pytest.mark.parametrize(
    "how",
    [
        {"before": "losses = AverageMeter()", "start": "pass"},  # earlier epochs would count again
        {"before": "losses = AverageMeter()", "start": "if epoch == 1:\n    losses.reset()"},
        {"start": "losses = AverageMeter()\nlosses.update(first, 1)"},
        {"before": "losses = AverageMeter()", "start": "losses.summary()"},
        {
            "before": "losses = AverageMeter()",
            "start": "pass",
            "after": "if loss > 9:\n    continue\nprint(losses.avg)\nlosses.reset()",
        },
        {"after": "print(losses.sum / len(loader))"},
        {"kind": METER.replace("self.sum += val", "self.sum = 0.9 * self.sum + val")},
        {"kind": METER.replace("self.val = val", "self.val = max(self.val, val)")},
        {"kind": METER.replace("self.val = val", "self.values.append(val)")},
        {"kind": METER.replace("self.val = val", "self.squares += val**2 * n")},
    ],
)
def test_a_meter_whose_sum_is_not_that_of_an_epoch_is_left_to_the_author(how):
    made = converted(**how)
    assert [note.text for note in made.to_decide] == [LEFT]
    assert "allgather_object" not in made.after


def test_a_meter_that_may_have_no_updates_is_not_divided_by_zero():
    made = converted(update="if x.sum() > 0:\n    losses.update(loss.item())")
    lines = NUMBERS.strip().splitlines()
    assert has(made, "\n".join((*lines[:2], "if losses.count:", f"    {lines[2]}")))


@pytest.mark.parametrize("value", ["loss", "loss * w.item()", "accuracy(x)[0]", "ever"])
def test_a_sum_that_may_be_a_tensor_stays_what_it_is(value):
    made = converted(update=f"ever = ever * 2\nlosses.update({value}, n=len(x))")
    expected = """
        if torch.is_tensor(losses.sum):
            losses.sum = hvd.allreduce(losses.sum, op=hvd.Sum)
        else:
            losses.sum = sum(hvd.allgather_object(losses.sum))
        losses.count = sum(hvd.allgather_object(losses.count))
    """
    assert has(made, expected)


@pytest.mark.parametrize(("test", "alike"), [("step % 9 == 0", True), ("loss < 9", False)])
def test_a_sum_that_is_a_tensor_on_some_ranks_only_is_left_to_the_author(test, alike):
    update = f"step += 1\nif {test}:\n    losses.update(loss.detach())"
    made = converted("step, losses = 0, AverageMeter()", update)
    assert [note.text for note in made.to_decide] == ([] if alike else [LEFT])


def test_meters_of_one_class_are_summed_in_a_loop_but_those_of_times():
    made = converted(
        start="losses, meter, took = AverageMeter(), AverageMeter(), AverageMeter()",
        update="""
            losses.update(loss.item(), len(x))
            meter.update(hits.item())
            took.update(time.time() - begin)
        """,
        after="print(losses.avg, meter.avg, took.avg)",
        before="import time",
    )
    expected = """
        for meter1 in (losses, meter):
            meter1.sum = sum(hvd.allgather_object(meter1.sum))
            meter1.count = sum(hvd.allgather_object(meter1.count))
            meter1.avg = meter1.sum / meter1.count
    """
    assert has(made, expected) and "took.sum" not in made.after and not made.to_decide


def test_the_quotient_may_be_a_property_and_the_names_are_free():
    made = converted(
        "losses = Running()", "losses.add(loss.item())", "print(losses.mean)", kind=PROPERTY
    )
    expected = """
        losses.total = sum(hvd.allgather_object(losses.total))
        losses.n = sum(hvd.allgather_object(losses.n))
        # Step 7"""
    assert expected.replace("        ", "    ").strip() in made.after and not made.to_decide
    made = converted(
        "losses.show()",
        "losses.add(loss.item())",
        "print(losses.mean)",
        "losses = Running()",
        PROPERTY,
    )
    assert [note.text for note in made.to_decide] == [LEFT]


def test_a_meter_is_read_through_what_holds_it_or_not_at_all():
    assert "allgather_object" not in converted(after="pass").after
    held = "losses = AverageMeter()\nprogress = ProgressMeter(len(loader), [losses])"
    assert has(converted(held, after="progress.display(1)"), NUMBERS)


FUNCTION = """
import torch
from torch.utils.data import DataLoader
{kind}
def train(losses, loader, model, optimizer):
    for x, y in loader:
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), len(x))

model = make_model()
loader = DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = AverageMeter()
for epoch in range(3):
    {before}
    train(losses, loader, model, optimizer)
    print(losses.avg)
"""


@pytest.mark.parametrize(
    ("before", "anew"),
    [
        ("losses.reset()", True),
        ("losses = AverageMeter()", True),
        ("pass", False),
        ("losses.reset()\n    train(losses, loader, model, optimizer)", False),
    ],
)
def test_a_meter_that_a_function_is_given_begins_anew_where_it_is_called(before, anew):
    made = done(FUNCTION.format(kind=METER, before=before))
    assert has(made, NUMBERS) == anew
    assert [note.text for note in made.to_decide] == ([] if anew else [LEFT])


@pytest.mark.parametrize(
    ("start", "anew"),
    [("self.losses.reset()", True), ("self.losses = AverageMeter()", True), ("pass", False)],
)
def test_a_meter_may_be_an_attribute(start, anew):
    made = done(f"""
import torch
{METER}
class Trainer:
    def __init__(self):
        self.model = make_model()
        self.loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses = AverageMeter()

    def epoch(self):
        {start}
        for x, y in self.loader:
            loss = loss_of(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.update(loss.item(), len(x))
        return self.losses.avg
""")
    assert ("self.losses.avg = self.losses.sum / self.losses.count" in made.after) == anew
    assert [note.text for note in made.to_decide] == ([] if anew else [f"self.{LEFT}"])


def test_a_meter_to_which_two_loops_add_is_left_to_the_author():
    loop = """
        for x, y in loader:
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.update(loss.item(), len(x))
    """
    made = converted(after=f"{dedent(loop)}print(losses.avg)")
    assert [note.text for note in made.to_decide] == [LEFT, LEFT]
    made = converted(after=f"print(losses.avg)\nlosses.reset(){dedent(loop)}print(losses.avg)")
    assert made.after.count(indent(NUMBERS.strip(), "    ")) == 2 and not made.to_decide
    tests = dedent(loop).replace("loss.backward()", "loss").replace("loader", "others")
    made = converted(after=f"{tests}print(losses.avg)")
    assert has(made, NUMBERS) and not made.to_decide


def test_a_function_for_training_and_tests_sums_what_its_meters_divide():
    made = done(f"""
import torch
{METER}
def run(model, loader, optimizer, train):
    losses = AverageMeter()
    for x, y in loader:
        loss = loss_of(model(x), y)
        if train:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.update(loss.item(), len(x))
    return losses.avg

model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, 8, True)
run(model, loader, optimizer, True)
run(model, torch.utils.data.DataLoader(others, 8), optimizer, False)
""")
    assert has(made, NUMBERS) and not made.to_decide
