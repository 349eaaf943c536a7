"""Where a measurement comes from: the code, the machine that submitted it, the command."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from qsgd_hpc import __version__

__all__ = ["git_state", "submission"]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return {"commit", "dirty"} of the repository that holds `folder`; None outside of one.

    Dirty means that tracked files differ from the commit; untracked files do not count.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "-uno"))}


def submission(script: Path) -> dict[str, Any]:
    """Return what is known of a measurement when its job is submitted.

    What only the job itself can know (its host, processor, frameworks, MPI library) comes with
    every line that the script records.
    """
    return {
        "git": git_state(script.parent),
        "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
        "submitted_from": socket.gethostname(),
        "qsgd_hpc": __version__,
        "python": sys.version.split()[0],
    }


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
