"""Submission of requests: check all, register, then submit each job."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from qsgd_hpc._notices import tell
from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.current import chain, continued_by, get
from qsgd_hpc.jobs.events import read_events
from qsgd_hpc.jobs.model import Job, JobRequest, JobState, dependency
from qsgd_hpc.jobs.processes import alive
from qsgd_hpc.jobs.request.prepare import prepare
from qsgd_hpc.jobs.request.validate import default_stop_before
from qsgd_hpc.jobs.schedulers import scheduler
from qsgd_hpc.jobs.schedulers.common import SETTLE_S, Dependency, UnconfirmedError, mark
from qsgd_hpc.jobs.script import Place, Tools, render_script
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = ["render", "resubmit", "submit", "submit_all"]

ASK_AGAIN_S = 2.0


def submit(request: JobRequest) -> Job:
    """Check, render, register and submit a job, or all parts of a chain; return the first.

    Raises:
        UsageError, LaunchError, KeyboardInterrupt: as :func:`submit_all`.
    """
    return submit_all(request)[0]


def submit_all(
    request: JobRequest,
    tell: Callable[[str], object] = lambda _note: None,
    known: Callable[[Job], object] = lambda _job: None,
) -> list[Job]:
    """Like :func:`submit`, but return all parts of a chain, in the order of execution.

    Args:
        request: the job.
        tell: called with each note about the site.
        known: called with each job that another submission with the same key has created.
    Raises:
        UsageError: all faults of the request, one per line.
        LaunchError: the scheduler refused a job, which does not stay registered; earlier parts of
            the chain are cancelled, and the message reports the result for each.
        KeyboardInterrupt: Ctrl-C during the submission, which is completed first.
    """
    filled, site = prepare(request, dry_run=False, tell=tell)
    with _interrupts_deferred() as jobs:
        created: list[Job] = []
        for part in range(filled.chain):
            previous, own = jobs[-1] if jobs else None, filled
            if previous is not None:
                # If a job of --after does not complete, no part may run, not only the first.
                own = dataclasses.replace(own, after=(*own.after, f"any:{previous.id}"))
            if own.key and part:
                own = dataclasses.replace(own, key=f"{own.key}\n{part}")
            try:
                job, is_new = _submit_once(own, site, previous=previous)
                jobs.append(job)
                (created.append if is_new else known)(job)
            except (LaunchError, UsageError) as error:
                jobs.clear()
                said = _cancel_parts(created)
                if not said:
                    raise
                raise type(error)("\n".join([str(error), *said])) from None
        return jobs


def resubmit(
    job_id: str,
    changes: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
    tell: Callable[[str], object] = lambda _note: None,
) -> Job:
    """Submit a job again after it has ended; its script resumes from the last checkpoint.

    Nodes whose failure ended the job are excluded if the scheduler supports it.

    Args:
        job_id: a job that has ended.
        changes: changed fields of :class:`JobRequest`, such as ``walltime_min``.
        force: submit even if the job is complete, its script still runs, or another one
            continues it.
        tell: called with each note about the site.

    Raises:
        UsageError: there is no such job, there is nothing to continue, or the changed request is
            faulty.
        LaunchError: the scheduler refused the job.
    """
    job = get(job_id)
    if fault := None if force and job.state.ended else _resubmit_fault(job):
        raise UsageError(fault)
    fresh: dict[str, Any] = {"key": None, "after": (), "chain": 1}
    if SCHEDULERS[job.scheduler].excludes:
        fresh["exclude"] = tuple(dict.fromkeys((*job.request.exclude, *job.progress.bad_nodes)))
    before, walltime_min = job.request.stop_before_min, job.request.walltime_min
    if walltime_min is not None and before == default_stop_before(walltime_min):
        fresh["stop_before_min"] = None  # not chosen by the user: that of the new walltime
    request = dataclasses.replace(job.request, **{**fresh, **(changes or {})})
    filled, site = prepare(request, dry_run=False, tell=tell)
    with _interrupts_deferred() as submitted:
        submitted.append(_submit_once(filled, site, resumes=job)[0])
    return submitted[0]


def _resubmit_fault(job: Job) -> str | None:
    """Return why a job should not be submitted again, with the remedy, or None."""
    if not job.state.ended:
        return (
            f"{job.id} is {job.state.value}, so there is nothing to resubmit yet. Cancel it first "
            f"(`qsgd-hpc cancel {job.id}`), or wait for its end."
        )
    if job.state is JobState.COMPLETED:
        return f"{job.id} is COMPLETED, so nothing is left to do. Use --force to run it again."
    if job.state is JobState.LOST and alive(job.progress.pid, job.progress.identity):
        return (
            f"the script of {job.id} still runs; two trainings would write the same checkpoint. "
            f"End it with `qsgd-hpc cancel {job.id}`, or use --force."
        )
    if other := continued_by(job):
        return (
            f"{other.id} ({other.state.value}) continues {job.id}; two trainings would write "
            f"the same checkpoint. See `qsgd-hpc status {other.id}`, or use --force."
        )
    return None


def _submit_once(
    request: JobRequest, site: Site, *, previous: Job | None = None, resumes: Job | None = None
) -> tuple[Job, bool]:
    """Submit a job once for its key; return it, and whether it is new.

    Another submission with the same key may have created it.
    """
    if request.key and (known := _key_holder(request.key)) and (job := _confirmed(known)):
        return job, False
    ancestor = previous or resumes
    attempt = 0 if ancestor is None else len(_lineage(ancestor))

    def script(directory: Path) -> str:
        before = previous.directory if previous else None
        place = Place(directory, before, attempt, mark(directory), _half_done(resumes))
        return render_script(request, site, Tools.here(), place)

    job = registry.create(
        request,
        site.scheduler,
        script,
        previous=previous.id if previous else None,
        resumes=resumes.id if resumes else None,
    )
    if request.key and (winner := _claim_key(request.key, job.id)) != job.id:
        registry.remove(job)
        if known_job := _confirmed(winner):
            return known_job, False
        return _submit_once(request, site, previous=previous, resumes=resumes)
    return _to_scheduler(job), True


def _half_done(job: Job | None) -> tuple[Path, ...]:
    """Return the folders of an array that has not completed and of those that it resumes.

    An array that has completed runs again whole, so older ones do not matter.
    """
    line = _lineage(job) if job else []
    unfinished = itertools.takewhile(lambda each: each.state is not JobState.COMPLETED, line)
    return tuple(each.directory for each in unfinished)


def _to_scheduler(job: Job) -> Job:
    """Submit a registered job to its scheduler; a refused job is removed."""
    try:
        progress = scheduler(job.scheduler).submit(job, _dependencies(job))
    except LaunchError as error:
        if not isinstance(error, UnconfirmedError):
            _forget(job)
        raise
    except OSError as error:  # before the scheduler's command, which does not raise it
        _forget(job)
        raise LaunchError(f"{job.id} was not submitted: {error}") from None
    # From here on, only its runner writes the state of a local job.
    if progress.scheduler_id is not None:
        try:
            return registry.save(job, progress)
        except OSError as error:
            tell(
                f"{job.id} is submitted, as {progress.scheduler_id}, but its id cannot be recorded "
                f"({error.strerror}): free some space, then `qsgd-hpc status {job.id}` finds it"
            )
    return dataclasses.replace(job, progress=progress)


def _dependencies(job: Job) -> list[Dependency]:
    """Return the dependencies for the scheduler, without jobs that have ended.

    Raises:
        LaunchError: the scheduler has not confirmed such a job, so that none can wait for it.
    """
    found = []
    for word in job.request.after:
        kind, job_id = dependency(word)
        other = registry.load(job_id)
        if other.state.ended or other.scheduler == "local":
            continue
        if other.progress.scheduler_id is None:
            raise LaunchError(
                f"nothing was submitted: it would wait for {job_id}, which its scheduler has not "
                f"confirmed. Try again when `qsgd-hpc status {job_id}` shows a scheduler id."
            )
        found.append(Dependency(kind, other.progress.scheduler_id))
    return found


def _confirmed(job_id: str) -> Job | None:
    """Return a job of another submission under the same key, once its scheduler has it.

    That submission may still be running, or it was interrupted before the scheduler had the job,
    which is then submitted here. None: the job was refused and has no record.
    """
    notified = False
    while True:
        try:
            job = registry.load(job_id)
        except UsageError:
            return None
        if job.scheduler == "local" or job.progress.scheduler_id or job.state.final:
            return job
        if found := scheduler(job.scheduler).find(job):
            return registry.save(job, dataclasses.replace(job.progress, scheduler_id=found))
        if time.time() > job.submitted_at + SETTLE_S:
            return _to_scheduler(job)
        if not notified:
            tell(f"waiting for {job_id}, which has the same key, at most {SETTLE_S:g} s")
        notified = True
        time.sleep(ASK_AGAIN_S)


def _lineage(job: Job) -> list[Job]:
    """Return this job and the jobs whose training it continues, newest first."""
    found = [job]
    while before := job.previous or job.resumes:
        try:
            job = registry.load(before)
        except UsageError:
            break  # its record was deleted
        found.append(job)
    return found


def render(request: JobRequest, tell: Callable[[str], object] = lambda _note: None) -> str:
    """Return the job script that :func:`submit` would submit; needs no scheduler here.

    ``tell`` is called with each note about the site.

    Raises:
        UsageError: all faults of the request, one per line.
    """
    filled, site = prepare(request, dry_run=True, tell=tell)
    place = Place(registry.jobs_dir() / f"{site.name}-dry-run")
    return render_script(filled, site, Tools.here(), place)


def _cancel_parts(jobs: Sequence[Job]) -> list[str]:
    """Cancel the parts of a chain that could not be submitted completely; describe each.

    A part that never ran is removed; one that has started, or may start, keeps its record.
    """
    removed, said = [], []
    # Including an unconfirmed part. In reverse order, because the end of one lets the next start.
    for job in reversed([*jobs, *chain(jobs[-1].id)] if jobs else []):
        try:
            scheduler(job.scheduler).cancel(job)
            now = get(job.id)
        except LaunchError as error:
            said.append(f"{job.id} is not cancelled: {error} Try `qsgd-hpc cancel {job.id}`.")
            continue
        if _never_ran(now):
            _forget(now)
            removed.append(job.id)
        elif now.state.final:
            said.append(f"{job.id} had started before and is {now.state.value} now.")
        elif now.progress.scheduler_id is None and now.scheduler != "local":
            said.append(f"If {job.id} appears in `qsgd-hpc list`, use `qsgd-hpc cancel {job.id}`.")
        else:
            said.append(f"{job.id} was asked to end: see `qsgd-hpc status {job.id}`.")
    if removed:
        said.append(f"Cancelled: {', '.join(reversed(removed))}.")
    return said[::-1]


def _never_ran(job: Job) -> bool:
    """Return whether the job was cancelled before its script started."""
    started = job.progress.started_at or read_events(job.directory)
    return job.state is JobState.CANCELLED and not started


def _forget(job: Job) -> None:
    """Remove the record and the key of a job that never ran."""
    registry.remove(job)
    if job.request.key:
        _key_path(job.request.key).unlink(missing_ok=True)


@contextmanager
def _interrupts_deferred() -> Iterator[list[Job]]:
    """Defer Ctrl-C and SIGTERM until the end of the block; yield a list for the submitted jobs.

    An interrupted submission could leave a job that is not recorded. In other threads than the main
    one, this does nothing, because they receive no signals.
    """
    submitted: list[Job] = []
    if threading.current_thread() is not threading.main_thread():
        yield submitted
        return
    arrived: list[int] = []

    def defer(number: int, _frame: FrameType | None) -> None:
        if not arrived:
            tell(
                "this ends when the current submission is complete; interrupting it could "
                "leave a job that is not recorded"
            )
        arrived.append(number)

    before = {number: signal.signal(number, defer) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield submitted
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for job in submitted if arrived else ():
            tell(f"{job.id} is submitted; to cancel it: qsgd-hpc cancel {job.id}")
        for first in arrived[:1]:
            signal.raise_signal(first)


def _key_holder(key: str) -> str | None:
    """Return the id of the job that was submitted under the key, if its record exists."""
    try:
        job_id = _key_path(key).read_text("utf-8").strip()
    except OSError:
        return None
    return job_id if _has_record(job_id) else None


def _has_record(job_id: str) -> bool:
    return (registry.jobs_dir() / job_id / "request.json").is_file()


def _claim_key(key: str, job_id: str) -> str:
    """Claim the key for a job and return the id of the job that has it now.

    ``$QSGD_HOME/jobs/.keys/<hash>`` contains the id of the job that was submitted under a key. The
    file is written under a temporary name, then linked to this one. Only one of several racing
    commands succeeds, because link(2) is atomic on local file systems, NFS and Lustre.
    """
    path = _key_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = registry.unused_name(path)
    registry.write_file(draft, job_id)
    try:
        while True:
            try:
                os.link(draft, path)
                return job_id
            except FileExistsError:
                if other := _key_holder(key):
                    return other
                _discard_key(path)
    finally:
        draft.unlink(missing_ok=True)


def _discard_key(path: Path) -> None:
    """Remove a key whose job was not submitted or was deleted, unless it was claimed meanwhile."""
    aside = registry.unused_name(path)
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if _has_record(aside.read_text("utf-8")):
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()


def _key_path(key: str) -> Path:
    return (
        registry.jobs_dir() / ".keys" / hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
    )
