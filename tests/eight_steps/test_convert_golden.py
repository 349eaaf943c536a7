"""Twelve scripts as strangers write them, and what becomes of each, to the character.

`QSGD_UPDATE_GOLDEN=1 pytest tests/eight_steps/test_convert_golden.py` writes the expected ones:
read the difference.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

import pytest

from qsgd_hpc.eight_steps.check import check
from qsgd_hpc.eight_steps.convert import Conversion, convert
from qsgd_hpc.eight_steps.convert.cli import to_decide
from qsgd_hpc.eight_steps.reading import parse

FOLDER = Path(__file__).parents[1] / "convert"
SERIAL = sorted((FOLDER / "serial").glob("*.py"))
EACH = pytest.mark.parametrize("script", SERIAL, ids=lambda path: path.stem)


def done(script: Path) -> Conversion:
    return convert(script.read_bytes(), Path(script.name))


def test_there_are_twelve_scripts_of_five_kinds():
    kinds = [path.stem.partition("_")[0] for path in SERIAL]
    counts = {kind: kinds.count(kind) for kind in kinds}
    assert counts == {"torch": 4, "keras": 3, "tf2": 3, "tf1": 1, "jax": 1}


@EACH
def test_the_distributed_script_is_as_expected(script):
    expected = FOLDER / "distributed" / script.name
    made = done(script).after
    if os.environ.get("QSGD_UPDATE_GOLDEN"):
        expected.parent.mkdir(exist_ok=True)
        expected.write_text(made)
    assert made == expected.read_text()


@EACH
def test_it_is_python_and_nothing_is_left_to_convert(script):
    first = done(script)
    compile(first.after, script.name, "exec")
    second = convert(first.after, Path(script.name))
    assert first.changed and not second.changed
    assert second.after == first.after


@EACH
def test_only_lines_that_a_step_touches_are_changed(script):
    """Every line of the serial script is there still, in order, but for arguments and indents."""
    first = done(script)
    before, after = first.before.splitlines(), first.after.splitlines()
    pairs = difflib.SequenceMatcher(
        None, [line.strip() for line in before], [line.strip() for line in after], autojunk=False
    )
    lost = [
        line
        for tag, start, end, _, _ in pairs.get_opcodes()
        if tag in ("replace", "delete")
        for line in before[start:end]
    ]
    assert len(lost) <= 8, lost
    comments = [line.strip() for line in before if line.strip().startswith("#")]
    kept = [line.strip() for line in after if line.strip() in comments]
    assert kept == comments


@EACH
def test_each_step_has_its_comment(script):
    after = done(script).after
    numbers = {int(number) for number in re.findall(r"# Step (\d)", after)}
    assert numbers >= {1, 2, 3, 4, 5, 6, 7}, numbers


@EACH
def test_what_is_left_to_decide_is_marked_and_listed(script):
    made = done(script)
    lines = made.after.splitlines()
    listed = to_decide(made, "new.py").splitlines()[1:]
    assert made.after.count("# qsgd-hpc: TODO") == len(made.to_decide) == len(listed)
    for each in listed:
        _, number, _ = each.split(":", 2)
        assert "# qsgd-hpc: TODO" in lines[int(number) - 1]


@EACH
def test_the_check_of_distributed_scripts_finds_nothing_missing(script):
    assert check(parse(done(script).after, Path(script.name))) == ()
