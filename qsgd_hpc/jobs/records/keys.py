"""Idempotency keys: a submission with a key happens only once.

``$QSGD_HOME/jobs/.keys/<hash>`` contains the id of the job that was submitted under a key. The file
is written under a temporary name, then linked to this one. Only one of several racing commands
succeeds, because link(2) is atomic on local file systems, NFS and Lustre.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

from qsgd_hpc.jobs.records import registry

__all__ = ["claim", "holder", "release"]


def holder(key: str) -> str | None:
    """Return the id of the job that was submitted under the key, if its record exists."""
    try:
        job_id = _path(key).read_text("utf-8").strip()
    except OSError:
        return None
    return job_id if _has_record(job_id) else None


def _has_record(job_id: str) -> bool:
    return (registry.jobs_dir() / job_id / "request.json").is_file()


def claim(key: str, job_id: str) -> str:
    """Claim the key for a job and return the id of the job that has it now."""
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    registry.write_file(draft, job_id)
    try:
        while True:
            try:
                os.link(draft, path)
                return job_id
            except FileExistsError:
                if other := holder(key):
                    return other
                _discard(path)
    finally:
        draft.unlink(missing_ok=True)


def _discard(path: Path) -> None:
    """Remove a key whose job was not submitted or was deleted, unless it was claimed meanwhile."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if _has_record(aside.read_text("utf-8")):
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()


def release(key: str) -> None:
    """Release the key, because the scheduler refused its job."""
    _path(key).unlink(missing_ok=True)


def _path(key: str) -> Path:
    return (
        registry.jobs_dir() / ".keys" / hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
    )
