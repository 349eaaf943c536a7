"""Give each host of the network an equal, fixed share of the cores, through control groups.

Four hosts on two cores would otherwise compute at half the speed of one host alone, and no study
could tell that from communication.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# Short, so that a rank which has used up its share does not keep its peers waiting for long.
PERIOD_US = 10_000
VARIABLE = "QSGD_SHAPED_CPU_GROUPS"


class CpuShareError(Exception):
    """The shares cannot be set here; the message has the remedy."""


def _parent() -> tuple[Path, bool]:
    """Return the folder in which groups are made, and whether it is of version 2."""
    if (ROOT / "cpu" / "cpu.cfs_quota_us").exists() or (ROOT / "cpu" / "cgroup.procs").exists():
        return ROOT / "cpu", False
    control = ROOT / "cgroup.subtree_control"
    if control.exists():
        with contextlib.suppress(OSError):
            control.write_text("+cpu")
        if "cpu" in control.read_text().split():
            return ROOT, True
    raise CpuShareError("--cpus needs the cpu controller of control groups; leave the option out")


def _remove(group: Path) -> None:
    for _ in range(50):  # the last process of a host may still be on its way out
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return


@contextlib.contextmanager
def shares(hosts: Sequence[str], cpus: float) -> Iterator[dict[str, str]]:
    """Make a group for every host and yield the variable that tells enter_host.py where they are.

    Args:
        hosts: their names.
        cpus: cores of each, such as 0.5.
    Raises:
        CpuShareError: control groups cannot be used here.
    """
    parent, second = _parent()
    quota_us = int(cpus * PERIOD_US)
    groups = [parent / host for host in hosts]
    try:
        for group in groups:
            group.mkdir(exist_ok=True)
            if second:
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        yield {VARIABLE: str(parent)}
    except OSError as error:
        raise CpuShareError(
            f"--cpus {cpus}: {error.filename}: {error.strerror}; it needs root and writable "
            "control groups, or leave the option out"
        ) from None
    finally:
        for group in groups:
            _remove(group)


def enter(host: str) -> None:
    """Put this process, and all that it starts, under the host's share; nothing without one."""
    parent = os.environ.get(VARIABLE)
    if parent:
        (Path(parent) / host / "cgroup.procs").write_text(str(os.getpid()))
