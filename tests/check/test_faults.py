"""Each planted fault is found at its line and nothing else is called an error; clean is clean."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qsgd_hpc.eight_steps.check import RULES, Severity, check, fix
from qsgd_hpc.eight_steps.reading import Script, parse, read
from tests.check.faults import CLEAN, FAULTS, Fault
from tests.check.table import table

ROOT = Path(__file__).parents[2]
CLEAN_SCRIPTS = sorted(CLEAN.glob("*.py"))
# Scripts of this repository that take all steps, some of them in modules beside them. The gate
# reads those that a newcomer runs first.
TUTORIALS = sorted(p for p in ROOT.glob("tutorials/**/*.py") if "hvd.init()" in p.read_text())
OTHERS = sorted(
    path
    for pattern in (
        "scaling/workloads/*/*.py",
        "benchmarks/*/train.py",
        "tests/horovod_scripts/*.py",
        "tests/convert/distributed/*.py",
    )
    for path in ROOT.glob(pattern)
)
OURS = [*TUTORIALS, *(pytest.param(path, marks=pytest.mark.full) for path in OTHERS)]
# What silences a finding knows nothing of its rule: one fault of each script stands for all.
ONE_OF_EACH = {fault.script: fault for fault in reversed(FAULTS)}.values()
SILENCED = [
    pytest.param(f, marks=() if f in ONE_OF_EACH else pytest.mark.full, id=f.name) for f in FAULTS
]
ODD = "\f\v\x1c\x85\u2028\u2029\U0001f600\t"
ENDS = ("\n", "\r\n", "\r")


def planted(fault: Fault) -> Script:
    return parse(fault.text, CLEAN / f"{fault.script}.py")


@pytest.mark.parametrize("path", CLEAN_SCRIPTS, ids=lambda path: path.stem)
def test_a_script_with_all_steps_has_no_finding(path):
    assert check(read(path)) == ()


@pytest.mark.full
@pytest.mark.parametrize("path", OURS, ids=lambda path: "-".join(path.parts[-2:]))
def test_no_script_of_this_repository_has_an_error(path):
    assert [each for each in check(read(path)) if each.severity is Severity.ERROR] == []


def test_the_scripts_of_this_repository_are_there():
    assert len(CLEAN_SCRIPTS) == 6
    assert len(TUTORIALS) > 10 and len(OTHERS) > 10


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_at_its_line(fault):
    found = check(planted(fault))
    assert [(each.rule.id, each.line) for each in found if each.rule.id == fault.rule] == [
        (fault.rule, fault.line)
    ]
    others = [each for each in found if each.rule.id != fault.rule]
    assert [each for each in others if each.severity is Severity.ERROR] == []


def odd_layout(fault: Fault) -> bytes:
    """Return the fault among line ends of all kinds, tabs, form feeds and characters like these."""
    draw = random.Random(fault.name)
    tabs = draw.random() < 0.5
    text = "\ufeff" * draw.randrange(2)
    for line in fault.text.split("\n"):
        if draw.random() < 0.2:
            text += f"# {draw.choice(ODD)}{draw.choice(ODD)}{draw.choice(ENDS)}"
        indent = len(line) - len(line.lstrip(" "))
        text += "\f" * (line != "" and draw.random() < 0.1)
        text += "\t" * (indent // 4) if tabs else " " * indent
        text += line[indent:] + draw.choice(ENDS)
    return text.encode()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fix_makes_its_finding_go_away_and_is_idempotent(fault):
    script = parse(odd_layout(fault), CLEAN / f"{fault.script}.py")
    said = [each.rule.id for each in check(script) if each.fixable]
    fixed = fix(script)
    left = [each.rule.id for each in fixed.left]
    assert (fault.rule not in left) == fault.fixable == (fault.rule in said)
    assert fixed.count >= len(said)
    assert not any(each.fixable for each in fixed.left)
    again = fix(fixed.script)
    assert again.script.text == fixed.script.text
    assert again.count == 0
    compile(fixed.script.text.encode(fixed.script.encoding), "fixed", "exec")


@pytest.mark.parametrize("fault", SILENCED)
def test_a_comment_silences_a_fault(fault):
    lines = fault.text.split("\n")
    line = lines[fault.line - 1]
    indent = line[: len(line) - len(line.lstrip())]
    lines.insert(fault.line - 1, f"{indent}# qsgd-hpc: ignore[{fault.rule}] on purpose")
    found = check(parse("\n".join(lines), CLEAN / f"{fault.script}.py"))
    assert fault.rule not in [each.rule.id for each in found]


def test_every_rule_has_a_fault():
    assert {each.id for each in RULES} == {each.rule for each in FAULTS}


def test_the_page_shows_what_is_said_of_twelve_faults():
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    assert table().count("\n") == 14
    assert table() in page
    assert f"and plant {len(FAULTS) - 12} more" in page
