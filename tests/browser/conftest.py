"""One Chromium for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Browser, find


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium; the test is skipped where none is installed."""
    binary = find()
    if binary is None:
        pytest.skip("no Chromium here; `make browser` installs one on Debian")
    started = Browser(binary, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("serial")
