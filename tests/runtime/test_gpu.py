"""The kernels that the build has made are those that are used."""

from __future__ import annotations

from pathlib import Path

import pytest

import qsgd_hpc
from qsgd_hpc.runtime import gpu
from tests.gpu.memory import has_device


def test_kernels_are_found_where_they_were_built(monkeypatch):
    monkeypatch.delenv("QSGD_GPU_LIBRARY", raising=False)
    built = list(Path(qsgd_hpc.__file__).parent.rglob("_gpu.*so"))
    assert gpu.library() == (str(built[0]) if built else None)
    if built:
        assert gpu.device_type(str(built[0])) == "cuda"


def test_kernels_can_be_left_unused(monkeypatch):
    monkeypatch.setenv("QSGD_GPU_LIBRARY", "none")
    assert gpu.library() is None


def test_kernels_that_the_driver_refuses_are_not_used_and_that_is_said_once(capsys):
    """As on this machine, if it has no GPU."""
    if gpu.library() is None or has_device():
        pytest.skip("it takes kernels, and no GPU for them")
    gpu.serves.cache_clear()
    assert not any(gpu.serves(0) for _ in range(2))
    said = capsys.readouterr().err
    assert said.count("qsgd-hpc: warning: GPU 0: the kernels (CUDA") == 1
    assert "copied to the host and coded there" in said


def test_own_kernels_that_do_not_load_here_end_no_job_without_gpus(monkeypatch, tmp_path, capsys):
    """As HIP's on a node without ROCm."""
    broken = tmp_path / "_gpu.so"
    broken.write_text("no library")
    monkeypatch.setattr(gpu, "_installed", lambda: str(broken))
    monkeypatch.delenv("QSGD_GPU_LIBRARY", raising=False)
    monkeypatch.delenv("QSGD_NCCL", raising=False)
    gpu.serves.cache_clear()
    assert gpu.library() is None
    assert gpu.nccl().rpartition("/")[2] == "libnccl.so.2"
    assert capsys.readouterr().err == ""
    assert not any(gpu.serves(0) for _ in range(2))
    said = capsys.readouterr().err
    assert said.count(f"warning: GPU 0: the GPU kernels cannot be loaded: {broken}") == 1
    assert "copied to the host and coded there" in said
    gpu.serves.cache_clear()


def test_nccl_is_the_one_that_is_named_or_found(twin, monkeypatch):
    monkeypatch.setenv("QSGD_NCCL", str(twin))
    monkeypatch.setenv("QSGD_GPU_LIBRARY", str(twin))
    gpu.nccl_version.cache_clear()
    assert (gpu.nccl(), gpu.nccl_version()) == (str(twin), 22703)
    monkeypatch.setenv("QSGD_NCCL", "none")
    gpu.nccl_version.cache_clear()
    assert (gpu.nccl(), gpu.nccl_version()) == ("", 0)
    monkeypatch.setenv("QSGD_NCCL", "auto")
    assert gpu.nccl() == "", "NCCL itself knows nothing of the twin's streams"
    gpu.nccl_version.cache_clear()


def test_kernels_that_work_on_a_device_serve_it(twin, monkeypatch):
    monkeypatch.setenv("QSGD_GPU_LIBRARY", str(twin))
    gpu.serves.cache_clear()
    assert gpu.serves(0)
    gpu.serves.cache_clear()
