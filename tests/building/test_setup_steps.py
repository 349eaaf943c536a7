"""A step of the set-up survives one failure, and says what it was doing when it fails for good."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Notes each try in a file, and succeeds with the second.
FAILS_ONCE = 'echo tried >> "$0"; [ "$(wc -l < "$0")" -gt 1 ]'


def twice(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / ".ci" / "twice", "installing PyTorch", *command],
        env={**os.environ, "PAUSE_S": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_step_that_fails_once_is_done_again(tmp_path: Path) -> None:
    done = twice("sh", "-c", FAILS_ONCE, str(tmp_path / "tries"))
    assert done.returncode == 0
    assert done.stdout == "== installing PyTorch\n"
    assert "installing PyTorch has failed; once more" in done.stderr


def test_a_step_that_fails_twice_says_what_and_how() -> None:
    done = twice("sh", "-c", "exit 4")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("== cannot go on: installing PyTorch has failed twice")
    assert last.endswith("the command was: sh -c exit 4")


def test_every_step_that_downloads_is_done_so() -> None:
    steps = (ROOT / "Makefile").read_text(encoding="utf-8").partition("setup:")[2]
    renewing = "xargs $(VENV)/bin/pip"  # by hand, and not from nothing
    for line in steps.splitlines():
        if ("pip install" in line or "/$(PIP)" in line) and renewing not in line:
            assert "$(TWICE)" in line, line
