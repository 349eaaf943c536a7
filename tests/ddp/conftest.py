"""Tests here start ranks of torch.distributed, once for all; none of them needs MPI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qsgd_hpc.errors import UsageError
from tests.ddp.ranks import Ranks
from tests.gpu.memory import has_device

pytest.importorskip("torch")
try:
    import qsgd_hpc.torch.fsdp  # noqa: F401
except UsageError:  # PyTorch is too old for it, but not for DDP
    collect_ignore = ["test_fsdp.py", "test_fsdp_kernels.py"]
PLACES = ["host", *(["device"] if has_device() else [])]


@pytest.fixture(scope="session", params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    """Where the ranks compute."""
    return str(request.param)


@pytest.fixture(scope="session")
def ranks(place: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Yield processes that run functions together; they must end cleanly."""
    together = Ranks(tmp_path_factory.mktemp("ranks"), place)
    yield together
    assert together.close() == [0, 0, 0, 0]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("serial")
    if "_learns" not in item.name:  # those train for many steps
        item.add_marker("gate")
