"""Fixtures of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qsgd_hpc import jobs
from tests.jobs.fake_schedulers import fakes, impatient, settled

__all__ = ["fakes", "impatient", "own", "place", "settled"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's profiles."""
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))
    monkeypatch.delenv("QSGD_SITE", raising=False)
    folder = tmp_path / "sites"
    folder.mkdir()
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder whose jobs start one plain process instead of ranks."""
    home = tmp_path / "home"
    (home / "sites").mkdir(parents=True)
    (home / "sites" / "local.yaml").write_text("launcher: {argv: [env]}\n")
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setenv("QSGD_HOME", str(home))
    monkeypatch.setenv("QSGD_SITE", "local")
    monkeypatch.chdir(folder)
    yield folder
    for job in jobs.list_jobs():
        jobs.cancel(job.id)
