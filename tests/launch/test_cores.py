"""The cores of a process: its affinity, or the CPU quota of its container if that is less."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qsgd_hpc.launch.command import usable_cores

V1 = {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "5000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
        ("0::/pod/me\n", {"pod/cpu.max": "300000 100000\n", "pod/me/cpu.max": "max 100000"}, 3),
        ("0::/docker/of_the_host\n", {"cpu.max": "200000 100000"}, 2),
        ("9:name=systemd:/\n1:cpu:/\n0::/\n", V1, 2),
        ("1:cpu:/\n", {**V1, "cpu/cpu.cfs_quota_us": "-1"}, 8),
        ("1:cpuset:/\n", V1, 8),
        ("0::/\n", {"cpu.max": "two\n"}, 8),
        (None, {}, 8),
    ],
)
def test_cores_are_those_that_the_quota_leaves(
    membership: str | None,
    files: dict[str, str],
    cores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    if membership is not None:
        (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores(tmp_path / "membership", tmp_path / "mounted") == cores
