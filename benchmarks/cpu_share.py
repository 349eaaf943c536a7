#!/usr/bin/env python3
"""Run a command on a fixed share of a core, through control groups; needs root.

    sudo qsgd-hpc run -np 4 --network 1gbit python benchmarks/cpu_share.py 0.45 -- python train.py

Four hosts on two cores compute at half the speed of one host alone, which a study could not
distinguish from communication. With a share that is available to all of them at the same time, each
host computes as fast as one host alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "qsgd-share-"
# Short, so that the other ranks do not wait long for a rank that has used up its share.
PERIOD_US = 10_000
PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class CpuShareError(Exception):
    """The share is not available on this machine; the message has the remedy."""


def parent() -> tuple[Path, bool]:
    """Return the folder for new groups, and whether it is of version 2."""
    if (ROOT / "cpu" / "cpu.cfs_quota_us").exists() or (ROOT / "cpu" / "cgroup.procs").exists():
        return ROOT / "cpu", False
    control = ROOT / "cgroup.subtree_control"
    if control.exists():
        with contextlib.suppress(OSError):
            control.write_text("+cpu")
        if "cpu" in control.read_text().split():
            return ROOT, True
    raise CpuShareError("there is no cpu controller of control groups here; run without a share")


def sweep(folder: Path) -> None:
    """Remove the groups of runs that were killed."""
    for left in folder.glob(f"{PREFIX}*"):
        # A group that is still empty may belong to a run that is starting.
        if not Path("/proc", left.name.removeprefix(PREFIX)).exists():
            with contextlib.suppress(OSError):
                left.rmdir()


def _remove(group: Path) -> None:
    """Wait until the last process of a group has ended, then remove the group."""
    for _ in range(50):
        with contextlib.suppress(OSError):
            group.rmdir()
        if not group.exists():
            return
        time.sleep(0.1)


@contextlib.contextmanager
def group(cpus: float) -> Iterator[Path]:
    """Make a group with that many cores and yield it; remove it at the end.

    Raises:
        CpuShareError: it cannot be made here.
    """
    folder, second = parent()
    own = folder / f"{PREFIX}{os.getpid()}"
    quota_us = int(cpus * PERIOD_US)
    try:
        sweep(folder)
        own.mkdir()
        if second:
            (own / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (own / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (own / "cpu.cfs_quota_us").write_text(str(quota_us))
    except OSError as error:
        raise CpuShareError(
            f"{error.filename}: {error.strerror}; this needs root and writable control groups, or "
            "run without a share"
        ) from None
    try:
        yield own
    finally:
        _remove(own)


def run(command: list[str], inside: Path) -> int:
    """Run a command in a group to its end, passing signals on; return its code."""

    def enter() -> None:
        (inside / "cgroup.procs").write_text(str(os.getpid()))

    # An MPI launcher may communicate with its ranks through an open descriptor.
    process = subprocess.Popen(command, preexec_fn=enter, close_fds=False)
    for number in PASSED:
        signal.signal(number, lambda n, _: process.send_signal(n))
    return process.wait()


def main(words: list[str]) -> int:
    """Run the command of the command line; return its exit code."""
    command = words[2:] if words[1:2] == ["--"] else words[1:]
    try:
        cpus = float(words[0]) if words else 0.0
    except ValueError:
        cpus = 0.0
    if not 0.05 <= cpus <= 1 or not command:
        print("cpu_share.py: expected a share from 0.05 to 1 and a command", file=sys.stderr)
        return 2
    try:
        with group(cpus) as own:
            code = run(command, own)
    except (CpuShareError, OSError) as error:
        print(f"cpu_share.py: {error}", file=sys.stderr)
        return 2
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
