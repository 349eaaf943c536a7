"""Every command in README.md runs, and prints what README.md says it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qsgd_hpc import env

ROOT = Path(__file__).parents[2]
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
# Numbers, host names and paths differ from machine to machine; the words around them do not.
VOLATILE = re.compile(r"\x1b\[[0-9;]*m|[0-9][0-9.,:]*(?: [kMG]?B\b)?|/[\w./-]+")
# The study of the README takes a quarter of an hour; the same command with fewer measurements.
SHORTER = {"--epochs 3 --repeats 3": "--epochs 1 --repeats 1"}
# What only several measurements have: ranges, and a verdict on the speed.
OF_SEVERAL = re.compile(r" \([0-9][0-9.,]*\)|,? (?:and|but) trains .*$")


def sessions() -> list[tuple[str, list[str]]]:
    """Return each command with the lines that are said to follow."""
    found = []
    for block in CONSOLE.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, *output = part.rstrip("\n").split("\n")
            found.append((command, output))
    return found


def masked(line: str) -> str:
    line = OF_SEVERAL.sub("", line)
    return " ".join(VOLATILE.sub("#", line).replace("#", " # ").split())


def assert_printed(expected: list[str], actual: str) -> None:
    """Each expected line is there, in this order; ``...`` stands for any lines."""
    lines = iter([masked(line) for line in actual.splitlines()])
    for line in expected:
        if line.strip() == "...":
            continue
        assert masked(line) in lines, f"README says {line!r}; printed was:\n{actual}"


@pytest.mark.slow
def test_every_command_prints_what_the_readme_says(tmp_path):
    """In order and in one folder, as a reader would."""
    if not env.is_set("QSGD_DATA"):
        pytest.skip("the README's numbers are of the real MNIST; set QSGD_DATA to its folder")
    (tmp_path / "tutorials").symlink_to(ROOT / "tutorials")
    commands = sessions()
    assert len(commands) >= 6
    environ = {
        **os.environ,
        "QSGD_HOME": str(tmp_path / "home"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
    }
    for command, expected in commands:
        for long, short in SHORTER.items():
            command = command.replace(long, short)
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        refused = any(line.startswith("qsgd-hpc: ") for line in expected)
        assert (done.returncode == 0) != refused, f"{command}\n{done.stdout}"
        assert "Traceback" not in done.stdout
        assert_printed(expected, done.stdout)


def test_links_of_every_page_lead_somewhere():
    """Relative links in the Markdown pages name files that exist."""
    pages = [p for p in ROOT.rglob("*.md") if not set(p.parts) & {".venv", ".venv-openmpi", "demo"}]
    assert ROOT / "README.md" in pages
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_settings_page_lists_every_variable():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    for name, row in env.TABLE.items():
        assert f"| `{name}` |" in page
        assert row.what in page
