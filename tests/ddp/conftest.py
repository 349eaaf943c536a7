"""Tests here start ranks of torch.distributed, once for all; none of them needs MPI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ddp.ranks import Ranks

pytest.importorskip("torch")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Yield processes that run functions together; they must end cleanly."""
    together = Ranks(tmp_path_factory.mktemp("ranks"))
    yield together
    assert together.close() == [0, 0, 0, 0]
