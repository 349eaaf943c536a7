"""The number of cores that this process can use: those of its affinity, within its CPU quota.

Containers are often limited by a quota (``docker run --cpus=2``, a Kubernetes limit). All cores of
the machine are then visible, and as many threads would be stopped for most of the time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["usable_cores"]


def usable_cores(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the number of cores, at least 1; a quota of 1.5 cores counts as 2.

    Args:
        membership: the kernel's list of this process's control groups.
        root: the folder in which these are mounted.
    """
    cores = len(os.sched_getaffinity(0))
    for folder in _groups(membership, root):
        with contextlib.suppress(OSError, ValueError):
            quota_us, period_us = _quota(folder)
            cores = min(cores, max(1, -(-quota_us // period_us)))
    return cores


def _groups(membership: Path, root: Path) -> Iterator[Path]:
    """Yield the folders whose quotas apply to this process: its groups and those above them."""
    try:
        lines = membership.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        own = root / controllers if controllers else root
        # Without a namespace of its own, a container sees its path on the host, at another root.
        inner = Path(path.lstrip("/"))
        yield from (own / each for each in (inner, *inner.parents))


def _quota(folder: Path) -> tuple[int, int]:
    """Return time and period of a quota, in microseconds.

    Raises:
        OSError, ValueError: there is none.
    """
    if (both := folder / "cpu.max").exists():
        quota_us, period_us = map(int, both.read_text().split())  # ValueError for "max"
        return quota_us, period_us
    quota_us = int((folder / "cpu.cfs_quota_us").read_text())
    if quota_us <= 0:
        raise ValueError("no limit")
    return quota_us, int((folder / "cpu.cfs_period_us").read_text())
