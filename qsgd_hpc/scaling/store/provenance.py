"""Provenance of a measurement: the code, the machine that submitted it, the command."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsgd_hpc import __version__
from qsgd_hpc.jobs import Job, JobRequest

__all__ = ["git_state", "of_job", "submission"]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return {"commit", "dirty"} of the repository that contains `folder`; None if there is none.

    Dirty means that tracked files differ from the commit; untracked files do not count.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "-uno"))}


def submission(script: Path) -> dict[str, Any]:
    """Return the provenance that is known when a job is submitted.

    Facts that only the job can determine (host, processor, frameworks, MPI library) are in every
    line that the script records.
    """
    return {
        "git": git_state(script.parent),
        "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
        "submitted_from": socket.gethostname(),
        "modules": [m for m in os.environ.get("LOADEDMODULES", "").split(":") if m],
        "qsgd_hpc": __version__,
        "python": sys.version.split()[0],
    }


def of_job(facts: Mapping[str, Any], asked: JobRequest, job: Job) -> dict[str, Any]:
    """Return the provenance of a submitted job: these facts, its request and its id."""
    return {
        **facts,
        "job": {
            "id": job.id,
            "site": job.site,
            "scheduler": job.scheduler,
            "submitted_at": job.submitted_at,
        },
        "command": [str(asked.script), *asked.script_args],
        "env": dict(asked.env),
        "job_id": job.id,
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
