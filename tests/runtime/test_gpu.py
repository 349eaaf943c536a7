"""The kernels that the build has made are those that are used."""

from __future__ import annotations

from pathlib import Path

import qsgd_hpc
from qsgd_hpc.runtime import gpu


def test_kernels_are_found_where_they_were_built(monkeypatch):
    monkeypatch.delenv("QSGD_GPU_LIBRARY", raising=False)
    built = list(Path(qsgd_hpc.__file__).parent.rglob("_gpu.*so"))
    assert gpu.library() == (str(built[0]) if built else None)
    if built:
        assert gpu.device_type(str(built[0])) == "cuda"


def test_kernels_can_be_left_unused(monkeypatch):
    monkeypatch.setenv("QSGD_GPU_LIBRARY", "none")
    assert gpu.library() is None
