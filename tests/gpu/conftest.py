from __future__ import annotations

from pathlib import Path

import pytest

from qsgd_hpc.runtime import gpu
from tests.gpu.memory import DeviceMemory, HostMemory, has_device
from tests.gpu.twin import Kernels


@pytest.fixture(scope="session", params=["twin", *(["device"] if has_device() else [])])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels on the CPU, and where there is a GPU, on it."""
    if request.param == "twin":
        return Kernels(request.getfixturevalue("twin"), HostMemory())
    return Kernels(Path(gpu.library()), DeviceMemory())
