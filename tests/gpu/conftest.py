from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from qsgd_hpc.runtime import gpu
from tests.gpu.memory import DeviceMemory, HostMemory, has_device
from tests.gpu.twin import Kernels, compile_twin


@pytest.fixture(scope="session")
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, compiled for the CPU once for all of pytest-xdist's workers."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    with (folder / "twin.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compile_twin(folder)


@pytest.fixture(scope="session", params=["twin", *(["device"] if has_device() else [])])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels on the CPU, and where there is a GPU, on it."""
    if request.param == "twin":
        return Kernels(request.getfixturevalue("twin"), HostMemory())
    return Kernels(Path(gpu.library()), DeviceMemory())
