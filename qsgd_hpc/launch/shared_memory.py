"""Remove shared-memory files that MPI does not remove when its ranks are killed.

MPICH and Open MPI have such files in /dev/shm while a job runs and remove them in ``MPI_Finalize``,
which a killed rank does not call; the memory would then be lost until the machine restarts.
Supervisors call this on the node of a rank that has ended; it uses the standard library only.

A file is removed if its name is an MPI's, it belongs to this user, it is not older than the run,
and no living process has it mapped or open. MPI maps its files as long as a rank of the job lives,
so files of other jobs are never removed.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["sweep"]

FOLDER = "/dev/shm"
# MPICH 4 and later, MPICH 3; Open MPI 5, Open MPI 4.
PREFIXES = ("mpich_shm_", "mpich_shar_tmp", "sm_segment.", "vader_segment.")
# Time stamps of files lag behind the clock by up to a tick of the kernel.
TICK_S = 0.05


def sweep(since_s: float, folder: str = FOLDER) -> list[str]:
    """Remove the shared-memory files of an ended run.

    Args:
        since_s: beginning of the run, in seconds since 1970; older files are not its own.
        folder: the folder of shared memory.

    Returns:
        The names of the removed files.
    """
    left = set(_candidates(since_s, folder))
    for pid in _own_processes() if left else ():
        left -= _used_by(pid, left)
        if not left:
            break
    removed = []
    for path in sorted(left):
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108 (pathlib is slow to import)
            removed.append(os.path.basename(path))  # noqa: PTH119
    return removed


def _candidates(since_s: float, folder: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                is_own = facts.st_uid == os.getuid() and facts.st_mtime >= since_s - TICK_S
                if entry.name.startswith(PREFIXES) and is_own:
                    found.append(entry.path)
    return found


def _own_processes() -> list[int]:
    found = []
    with os.scandir("/proc") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                    found.append(int(entry.name))
    return found


def _used_by(pid: int, paths: set[str]) -> set[str]:
    """Return which of the files a process has mapped or open.

    Ended processes use none. Processes that their owner may not inspect are not ranks, because MPI
    itself inspects the memory of ranks.
    """
    used = set()
    try:
        # Check descriptors before maps: a starting rank opens, maps and closes its file, and would
        # be missed in the opposite order.
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(FileNotFoundError):
                used |= paths & {os.readlink(f"/proc/{pid}/fd/{name}")}  # noqa: PTH115
        with open(f"/proc/{pid}/maps") as lines:  # noqa: PTH123
            for line in lines:
                # Address, rights, offset, device and inode have no slash; the path begins with one.
                used |= paths & {"/" + line.rstrip("\n").partition("/")[2]}
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return used
