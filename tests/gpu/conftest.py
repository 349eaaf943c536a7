from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.twin import Kernels, compile_twin


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_twin(tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="session")
def kernels(twin: Path) -> Kernels:
    return Kernels(twin)
