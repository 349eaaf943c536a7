"""What tests of pure functions share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's profiles."""
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))
    monkeypatch.delenv("QSGD_SITE", raising=False)
    folder = tmp_path / "sites"
    folder.mkdir()
    return folder
