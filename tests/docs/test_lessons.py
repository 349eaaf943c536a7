"""Every command of every lesson runs and prints what the lesson says; its code is real code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qsgd_hpc import env
from tests.docs.pages import Session, assert_printed, assert_quotes, run_page, sessions

TUTORIALS = Path(__file__).parents[2] / "tutorials"
NEEDS_DATA = "<!-- test: needs data -->"
LESSONS = sorted(page.parent.relative_to(TUTORIALS) for page in TUTORIALS.glob("**/README.md"))


@pytest.mark.serial
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lesson", LESSONS, ids=str)
def test_every_command_prints_what_the_lesson_says(lesson: Path, tmp_path: Path) -> None:
    page = TUTORIALS / lesson / "README.md"
    if not sessions(page):
        pytest.skip("no commands in it")
    if NEEDS_DATA in page.read_text(encoding="utf-8") and not env.is_set("QSGD_DATA"):
        pytest.skip("its numbers are of real data; set QSGD_DATA to their folder")
    shutil.copytree(TUTORIALS, tmp_path / "tutorials", ignore=shutil.ignore_patterns("__pycache__"))
    run_page(page, tmp_path / "tutorials" / lesson, home=tmp_path / "home")


@pytest.mark.parametrize("lesson", LESSONS, ids=str)
def test_code_of_the_lesson_is_that_of_its_scripts(lesson: Path) -> None:
    assert_quotes(TUTORIALS / lesson / "README.md")


@pytest.mark.parametrize(
    ("expected", "printed", "right"),
    [
        (("loss 0.31", "done"), "loss 0.29\ndone\n", True),
        (("loss 0.31",), "error 0.29\n", False),
        (("weight 0.31", "loss 0.002"), "weight -0.29\nloss 9e-05\n", True),
        (("a", "..."), "a\nb\nc\n", True),
        (("a",), "a\nb\n", False),
        (("a", "c"), "a\nb\nc\n", False),
        (("a", "...", "c"), "a\nb\nc\n", True),
        ((), "anything\n", False),
        ((), "", True),
    ],
)
def test_a_page_that_says_something_else_is_found(expected, printed, right) -> None:
    session = Session("command", expected, exact=False)
    if right:
        assert_printed(session, printed)
        return
    with pytest.raises(AssertionError):
        assert_printed(session, printed)


def test_numbers_of_an_exact_block_count() -> None:
    with pytest.raises(AssertionError):
        assert_printed(Session("command", ("loss 0.31",), exact=True), "loss 0.29\n")


def test_code_that_no_script_has_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("if True:\n    import os\n    print(os.name)\n")
    page = tmp_path / "README.md"
    page.write_text("```python\nimport os\nprint(os.name)\n```\n")
    assert_quotes(page)
    page.write_text("```diff\n-import sys\n+import os\n```\n")
    with pytest.raises(AssertionError, match="import sys"):
        assert_quotes(page)
    page.write_text("```python\nimport sys\n```\n")
    with pytest.raises(AssertionError, match="import sys"):
        assert_quotes(page)
