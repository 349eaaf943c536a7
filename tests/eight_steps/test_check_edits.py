"""Edits change what they say and nothing else."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsgd_hpc.eight_steps.check import check, corrected, fix
from qsgd_hpc.eight_steps.check.finding import (
    Edit,
    add_argument,
    apply,
    guard,
    insert_after,
    insert_before,
    replace,
)
from qsgd_hpc.eight_steps.reading import parse
from qsgd_hpc.eight_steps.tree import diff


def changed(text: str, *groups: tuple[Edit, ...]) -> str:
    return apply(text, groups)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(x)\n", "if c:\n    f(x)\n"),
        ("f(x)  # why\n", "if c:\n    f(x)  # why\n"),
        ("if a:\n  f(x)\n", "if a:\n  if c:\n    f(x)\n"),
        ("f(\n    x,\n)\n", "if c:\n    f(\n        x,\n    )\n"),
        ("f(x)", "if c:\n    f(x)"),
        ("f(x)\r\n", "if c:\r\n    f(x)\r\n"),
    ],
)
def test_a_guard_keeps_what_it_guards(text, expected):
    source = parse(text)
    (call,) = source.calls
    found = changed(text, guard(source, call, "c"))
    assert found.split() == expected.split()
    parse(found)


@pytest.mark.parametrize(
    "text",
    ["x = f(x)\n", "a = 1; f(x)\n", "if a: f(x)\n", 'f("""\nx\n""")\n', "return_ = [f(x)]\n"],
)
def test_what_an_indent_would_break_is_left_alone(text):
    source = parse(text)
    assert guard(source, source.calls[0], "c") == ()


def test_lines_are_inserted_as_far_indented_as_their_neighbour():
    text = "def g():\n\tf(\n\t)  # why\n\treturn 1\n"
    source = parse(text)
    (call,) = source.calls
    assert changed(text, insert_before(source, call, "a", "b")) == (
        "def g():\n\ta\n\tb\n\tf(\n\t)  # why\n\treturn 1\n"
    )
    assert changed(text, insert_after(source, call, "a")) == (
        "def g():\n\tf(\n\t)  # why\n\ta\n\treturn 1\n"
    )


def test_nothing_is_inserted_before_an_elif():
    source = parse("if a:\n    pass\nelif f():\n    pass\n")
    assert insert_before(source, source.calls[0], "x") == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f()", "f(k=1)"),
        ("f(a)", "f(a, k=1)"),
        ("f(a, )", "f(a, k=1, )"),
        ("f(\n    a,\n    b=(c),\n)", "f(\n    a,\n    b=(c), k=1,\n)"),
    ],
)
def test_an_argument_is_added_behind_the_last(text, expected):
    source = parse(text)
    assert changed(text, (add_argument(source, source.calls[-1], "k=1"),)) == expected


def test_edits_that_meet_are_not_both_applied():
    text = "f(a)\n"
    source = parse(text)
    (call,) = source.calls
    groups = [(replace(source, call, "g()"),), (replace(source, call.args[0], "b"),)]
    assert apply(text, groups) == ("g()\n", 1)


places = st.tuples(st.integers(0, 30), st.integers(0, 5), st.text("xy\n", max_size=4))


@settings(deadline=None)
@given(st.text("ab\n", min_size=1, max_size=30), st.lists(places, max_size=6))
def test_what_no_edit_names_stays(text, wanted):
    def place(offset: int) -> tuple[int, int]:
        before = text[:offset]
        return before.count("\n") + 1, offset - (before.rfind("\n") + 1)

    spans = [(min(a, len(text)), min(a + n, len(text)), new) for a, n, new in wanted]
    found, count = apply(text, [(Edit(place(a), place(b), new),) for a, b, new in spans])
    kept: list[tuple[int, int, str]] = []
    for a, b, new in spans:
        if all((a, b) != (c, d) and (b <= c or a >= d) for c, d, _ in kept):
            kept.append((a, b, new))
    assert count == len(kept)
    removed = sum(b - a for a, b, _ in kept)
    added = sum(len(new) for _, _, new in kept)
    assert len(found) == len(text) - removed + added
    gone = {i for a, b, _ in kept for i in range(a, b)}
    stays = [c for i, c in enumerate(text) if i not in gone and c in "ab"]
    assert [c for c in found if c in "ab"] == stays


def test_init_and_the_gpu_come_before_the_model_moves_there():
    script = parse(
        "import torch\nimport horovod.torch as hvd\n\n\ndef main():\n"
        "    model = torch.nn.Linear(2, 2).cuda()\n"
        "    model(torch.zeros(hvd.size(), 2)).sum().backward()\n\n\nmain()\n"
    )
    lines = fix(script).script.text.split("\n")
    assert lines[5:9] == [
        "    hvd.init()",
        "    if torch.cuda.is_available():",
        "        torch.cuda.set_device(hvd.local_rank())",
        "    model = torch.nn.Linear(2, 2).cuda()",
    ]


def test_a_gpu_is_not_chosen_after_its_first_use():
    script = parse(
        "import torch\nimport horovod.torch as hvd\n\nmodel = torch.nn.Linear(2, 2).cuda()\n"
        "hvd.init()\nmodel(torch.zeros(hvd.size(), 2)).sum().backward()\n"
    )
    assert "set_device" not in fix(script).script.text


@pytest.mark.parametrize(
    ("device", "found"),
    [
        *(("'cuda:0'", True), ("torch.device('cuda:1' if cuda else 'cpu')", True)),
        *(("'cuda'", False), ("'cuda:0' if hvd.size() == 1 else 'cuda'", False)),
        ("'cuda:0'\nif distributed:\n    device = 'cuda'", False),
    ],
)
def test_a_gpu_with_a_number_is_that_of_all_ranks_in_spite_of_a_choice(device, found):
    script = parse(
        "import torch\nimport horovod.torch as hvd\n\nhvd.init()\n"
        f"torch.cuda.set_device(hvd.local_rank())\ndevice = {device}\n"
        "model(torch.zeros(hvd.size(), 2).to(device)).sum().backward()\n"
    )
    assert ("QH201" in [each.rule.id for each in check(script)]) == found


@pytest.mark.parametrize(
    "text", ["# corrects nothing\n", "(\n", "hvd.allreduce(1) if hvd.rank() else 0\n"]
)
def test_an_edit_that_does_not_mend_is_not_said_to(text):
    script = parse("import horovod.torch as hvd\nhvd.init()\nprint(1)\n")
    (found,) = check(script)
    assert corrected(script, [found], [found]) is not None
    useless = dataclasses.replace(found, edits=(Edit((3, 0), (3, 0), text),))
    assert corrected(script, [found], [useless]) is None


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
def test_a_difference_is_what_patch_takes(tmp_path):
    before, after = "a\u2028b\rc\nd", "a\u2028b\rc\ne"
    (tmp_path / "f").write_text(before, newline="", encoding="utf-8")
    text = diff(before, after, "f", "f").encode()
    subprocess.run(["patch", "--binary"], input=text, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "f").read_bytes().decode() == after
