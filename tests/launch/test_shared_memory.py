"""Shared memory of a dead run is removed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qsgd_hpc.launch.supervise import sweep_shared_memory

# Keeps a file in use until its stdin closes.
USER = """
import mmap, os, sys
file = os.open(sys.argv[2], os.O_RDWR)
if sys.argv[1] == "maps":
    memory = mmap.mmap(file, 4096)
    os.close(file)
print("ready", flush=True)
sys.stdin.read()
"""


def left(folder: Path, name: str) -> Path:
    file = folder / name
    file.write_bytes(bytes(4096))
    return file


@pytest.mark.parametrize("name", ["mpich_shm_6a66b4e8_0", "sm_segment.nid001.0.b39c0001.1"])
def test_what_nobody_uses_is_removed(tmp_path: Path, name: str) -> None:
    file = left(tmp_path, name)
    assert sweep_shared_memory(time.time() - 60, str(tmp_path)) == [name]
    assert not file.exists()


def test_what_no_mpi_has_named_stays(tmp_path: Path) -> None:
    file = left(tmp_path, "torch_4711_0")
    assert sweep_shared_memory(0, str(tmp_path)) == []
    assert file.exists()


def test_what_is_older_than_the_run_stays(tmp_path: Path) -> None:
    file = left(tmp_path, "mpich_shm_1_0")
    os.utime(file, (1000, 1000))
    assert sweep_shared_memory(time.time(), str(tmp_path)) == []
    assert file.exists()


@pytest.mark.parametrize("how", ["maps", "opens"])
def test_what_a_living_process_uses_stays_until_it_ends(tmp_path: Path, how: str) -> None:
    file, free = left(tmp_path, "mpich_shm_1_0"), left(tmp_path, "mpich_shm_2_0")
    with subprocess.Popen(
        [sys.executable, "-c", USER, how, file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as user:
        assert user.stdout is not None and user.stdout.readline() == "ready\n"
        assert sweep_shared_memory(0, str(tmp_path)) == [free.name]
        assert file.exists()
        user.communicate("")
    assert sweep_shared_memory(0, str(tmp_path)) == [file.name]


def test_a_machine_without_shared_memory_has_nothing_to_remove(tmp_path: Path) -> None:
    assert sweep_shared_memory(0, str(tmp_path / "none")) == []
