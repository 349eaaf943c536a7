"""The jobs of a user: one directory each under $QSGD_HOME/jobs, no database.

``<id>/request.json``  the request with all defaults filled in; never changed
``<id>/script.sh``     the job script; never changed
``<id>/state.json``    the job's progress; its modification time is that of the last confirmation
``<id>/events.jsonl``  the job's own events: start, stop request, end
``<id>/runner.json``   local jobs: the process that owns the job, and on which host
``<id>/output.log``    output of all ranks

Records are not lost or duplicated if commands race, also on NFS and Lustre: a record is written
completely under a temporary name and gets its id by one rename of the directory, which fails if
the id exists; every file is replaced by rename, so a reader sees the old or the new content; and
each job's state has one writer: its runner, or the process that queries the scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.model import Job, JobRequest, JobState, Progress
from qsgd_hpc.jobs.words import did_you_mean
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = [
    "confirm",
    "create",
    "ids",
    "jobs_dir",
    "load",
    "number",
    "progress_from_json",
    "progress_to_json",
    "read_json",
    "remove",
    "request_from_json",
    "request_to_json",
    "save",
    "unused_name",
    "write_file",
]

_TYPES = {each.name: str(each.type) for each in dataclasses.fields(JobRequest)}
_PATHS = tuple(name for name, kind in _TYPES.items() if kind.startswith("Path"))
_LISTS = tuple(name for name, kind in _TYPES.items() if kind.startswith("tuple"))
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*-(?P<number>[1-9][0-9]*)")


def jobs_dir() -> Path:
    """Return the folder of all job directories."""
    return env.home() / "jobs"


def number(job_id: str) -> int:
    """Return the running number in an id such as ``local-7``."""
    match = _ID.fullmatch(job_id)
    return int(match["number"]) if match else 0


def ids() -> list[str]:
    """Return the ids of all jobs, oldest first."""
    root = jobs_dir()
    if not root.is_dir():
        return []
    found = []
    for entry in os.scandir(root):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if _ID.fullmatch(entry.name) and (root / entry.name / "request.json").is_file():
                found.append((entry.stat().st_ctime_ns, entry.name))
    return [name for _, name in sorted(found, key=lambda pair: (number(pair[1]), pair[0]))]


def create(
    request: JobRequest,
    scheduler: str,
    render: Callable[[Path], str],
    *,
    previous: str | None = None,
    resumes: str | None = None,
) -> Job:
    """Write the record of a new job with the next free id of its site.

    Args:
        request: the request with all defaults filled in.
        scheduler: the module of its scheduler.
        render: returns the job script for a job in the given directory.
        previous: the job whose training this one continues when it has ended.
        resumes: the ended job of which this one is a resubmission.

    Raises:
        UsageError: $QSGD_HOME cannot be written, or what ``render`` raises.
    """
    root = jobs_dir()
    record = {
        "scheduler": scheduler,
        "submitted_at": time.time(),
        "previous": previous,
        "resumes": resumes,
        "request": request_to_json(request),
    }
    draft = root / f".draft-{os.getpid()}-{time.monotonic_ns()}"
    try:
        draft.mkdir(parents=True)
        write_file(draft / "request.json", json.dumps(record, indent=2))
        write_file(draft / "state.json", json.dumps(progress_to_json(Progress())))
        job_id = _publish(draft, str(request.site), render)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise UsageError(
            f"cannot register the job in {root}: {error.strerror or error}. Free some space "
            "there, or set QSGD_HOME to a writable folder."
        ) from None
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return load(job_id)


def _publish(draft: Path, site: str, render: Callable[[Path], str]) -> str:
    """Rename the draft to the next free id; two commands cannot get the same one."""
    taken = [number(path.name) for path in draft.parent.glob(f"{site}-*")]
    candidate = max(taken, default=0) + 1
    while True:
        target = draft.parent / f"{site}-{candidate}"
        # The script names the job's directory, so it is written once that is known.
        write_file(draft / "script.sh", render(target))
        (draft / "script.sh").chmod(0o755)
        try:
            draft.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            candidate += 1
        else:
            _sync(draft.parent)
            return target.name


def load(job_id: str) -> Job:
    """Read the record of one job.

    Raises:
        UsageError: there is no such job, or its record is damaged.
    """
    directory = jobs_dir() / job_id
    path = directory / "request.json"
    record = read_json(path) if _ID.fullmatch(job_id) else None
    if record is None and job_id not in (known := ids()):
        hint = did_you_mean(job_id, known[-50:]) if known else "No job has been submitted yet."
        raise UsageError(f"no job '{job_id}' in {jobs_dir()}. {hint} See `qsgd-hpc list`.")
    try:
        record = record or {}
        return Job(
            id=job_id,
            site=record["request"]["site"],
            scheduler=_known(record["scheduler"]),
            request=request_from_json(record["request"]),
            directory=directory,
            submitted_at=float(record["submitted_at"]),
            previous=record.get("previous"),
            resumes=record.get("resumes"),
            progress=progress_from_json(read_json(directory / "state.json")),
            known_at=_changed_at(directory / "state.json"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"job '{job_id}': damaged record {path} ({error!r}). "
            "Delete the directory to forget the job."
        ) from None


def _known(scheduler: str) -> str:
    if scheduler not in SCHEDULERS:
        raise ValueError(f"unknown scheduler {scheduler!r}")
    return scheduler


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def save(job: Job, progress: Progress) -> Job:
    """Record a new state and return the job with it."""
    write_file(job.directory / "state.json", json.dumps(progress_to_json(progress)))
    return dataclasses.replace(job, progress=progress, known_at=time.time())


def confirm(job: Job) -> Job:
    """Record that the state is still valid, without writing it again."""
    with contextlib.suppress(OSError):
        os.utime(job.directory / "state.json")
    return dataclasses.replace(job, known_at=time.time())


def remove(job: Job) -> None:
    """Remove the record of a job that was never submitted to its scheduler."""
    shutil.rmtree(job.directory, ignore_errors=True)


def unused_name(path: Path) -> Path:
    """Return a name beside a file that no other command uses, for a draft of it."""
    return path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")


def write_file(path: Path, text: str) -> None:
    """Replace a file atomically; after a crash it has the old or the new text."""
    draft = unused_name(path)
    try:
        with draft.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Make a rename in the folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # network file systems without this write directories synchronously
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, or None if it is missing or invalid."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def request_to_json(request: JobRequest) -> dict[str, Any]:
    """Return the content of request.json for a request."""
    plain = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    for name in _PATHS:
        plain[name] = None if plain[name] is None else str(plain[name])
    plain["env"] = dict(request.env)
    plain["array"] = {key: list(values) for key, values in request.array.items()}
    return plain


def request_from_json(fields: Mapping[str, Any]) -> JobRequest:
    """Return the request; keys missing in records of older versions get their defaults."""
    values = dict(fields)
    for name in _PATHS:
        values[name] = Path(values[name]) if values.get(name) is not None else None
    for name in _LISTS:
        values[name] = tuple(values.get(name, ()))
    values["array"] = {key: tuple(given) for key, given in values.get("array", {}).items()}
    return JobRequest(**values)


def progress_to_json(progress: Progress) -> dict[str, Any]:
    """Return the content of state.json."""
    fields = {**dataclasses.asdict(progress), "state": progress.state.value}
    del fields["silence"]
    return fields


def progress_from_json(fields: Mapping[str, Any] | None) -> Progress:
    """Return the progress; LOST if the state file is missing or damaged."""
    if fields is None:
        return Progress(JobState.LOST, why="its state file is missing or damaged")
    bad_nodes = tuple(fields.get("bad_nodes", ()))
    known: dict[str, Any] = {**fields, "state": JobState(fields["state"]), "bad_nodes": bad_nodes}
    return Progress(**known)
