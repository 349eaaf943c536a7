"""Every command in README.md runs, and prints what README.md says it prints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from qsgd_hpc import env
from tests.docs.pages import masked, repository_pages, run_page, sessions

ROOT = Path(__file__).parents[2]
# The study of the README takes a quarter of an hour; the same command with fewer measurements.
SHORTER = {"--epochs 3 --repeats 3": "--epochs 1 --repeats 1"}
# What only several measurements have: ranges, and a verdict on the speed; one is told in the past.
OF_SEVERAL = re.compile(r" \([0-9][0-9.,]*\)|,? (?:and|but) (?:trains|trained|shows) .*$")


# Those that train or measure, and what needs the results of those.
SLOW = re.compile(
    r"qsgd-hpc (run -np 2 --bits 4|submit --site local|wait|logs|scale|predict|bench)"
)


def without_ranges(line: str) -> str:
    return masked(OF_SEVERAL.sub("", line).replace(" sends ", " sent "))


@pytest.mark.serial
@pytest.mark.timeout(1800)
def test_every_command_prints_what_the_readme_says(tmp_path):
    """In order and in one folder, as a reader would."""
    if not env.is_set("QSGD_DATA"):
        pytest.skip("the README's numbers are of the real MNIST; set QSGD_DATA to its folder")
    shutil.copytree(ROOT / "tutorials", tmp_path / "tutorials")
    page = ROOT / "README.md"
    assert len(sessions(page)) >= 6
    run_page(page, tmp_path, home=tmp_path / "home", shorter=SHORTER, mask=without_ranges)


@pytest.mark.gate
@pytest.mark.serial
def test_quick_commands_print_what_the_readme_says(tmp_path):
    """Those that take seconds, in order and in one folder."""
    shutil.copytree(ROOT / "tutorials", tmp_path / "tutorials")
    page = ROOT / "README.md"
    quick = [each.command for each in sessions(page) if not SLOW.match(each.command)]
    assert len(quick) >= 5
    run_page(page, tmp_path, home=tmp_path / "home", wanted=lambda c: not SLOW.match(c))


def test_links_of_every_page_lead_somewhere():
    """Relative links in the Markdown pages name files that exist."""
    assert ROOT / "README.md" in repository_pages()
    for page in repository_pages():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_settings_page_lists_every_variable():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    for name, row in env.TABLE.items():
        assert f"| `{name}` |" in page
        assert row.what in page
        for twin in row.twins:
            assert re.search(rf"^\| `{twin.name}` \|.*`{name}`", page, re.M), twin.name
