"""Run a study: submit its points as jobs, follow them, collect what their scripts recorded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile
from typing import Any, Protocol

from qsgd_hpc import jobs
from qsgd_hpc.errors import QsgdError, UsageError
from qsgd_hpc.scaling.attempts import RECORD_HINT, Attempt, finished, parse_records
from qsgd_hpc.scaling.folder import AttemptFolder, StudyFolder
from qsgd_hpc.scaling.plan import Point, environment, plan, script_args
from qsgd_hpc.scaling.provenance import submission
from qsgd_hpc.scaling.study import Study

__all__ = ["Watcher", "check_sizes", "request", "run"]


# A scheduler that is restarted may not know a job for a while.
LOST_LOOKS = 4


class Watcher(Protocol):
    """What is told of a study's course; progress.py shows it to a person."""

    def started(self, point: Point, job: jobs.Job, *, adopted: bool) -> None:
        """A job of this run was submitted, or one of an earlier run was found still running."""

    def seen(self, point: Point, job: jobs.Job, images_per_s: float | None) -> None:
        """A job was looked at."""

    def ended(self, point: Point, attempt: Attempt, log: Path) -> None:
        """A job ended and its records are in the collection."""


@dataclass
class _Active:
    point: Point
    folder: AttemptFolder
    job: jobs.Job
    lost: int = 0

    def has_ended(self) -> bool:
        """Tell whether nothing more will come; LOST must be the answer several times."""
        if self.job.state is not jobs.JobState.LOST:
            self.lost = 0
            return self.job.state.ended
        self.lost += 1
        return self.lost >= LOST_LOOKS


def request(study: Study, point: Point, records: Path) -> jobs.JobRequest:
    """Return the job of one point; `records` is the file its script appends to."""
    return jobs.JobRequest(
        script=study.script,
        script_args=script_args(study, point),
        nodes=point.nodes,
        ranks_per_node=study.ranks_per_node,
        walltime_min=study.walltime_min,
        queue=study.queue,
        account=study.account,
        filesystems=study.filesystems,
        site=study.site,
        name=f"scale-n{point.nodes}-b{point.bits}",
        env=environment(study, point, str(records)),
        workdir=study.workdir,
    )


def check_sizes(study: Study) -> None:
    """Have the site check each size before anything runs.

    Raises:
        UsageError: all faults of all sizes, each said once.
    """
    faults: dict[str, None] = {}
    for point in {p.nodes: p for p in plan(study)}.values():
        try:
            jobs.render(request(study, point, study.workdir / "records.jsonl"))
        except UsageError as error:
            faults.update(dict.fromkeys(str(error).splitlines()))
    if faults:
        raise UsageError("\n".join(faults))


def run(
    folder: StudyFolder, study: Study, watcher: Watcher, *, in_flight: int, poll_s: float
) -> list[Attempt]:
    """Measure every point that is not finished; return the attempts that failed in this run.

    Finished points are skipped and failed ones tried again. A job that an interrupted run left
    behind is followed to its end, not started twice. However this ends, an exception included,
    every job that it had going is cancelled and recorded first.

    Args:
        folder: where the study lives; :meth:`StudyFolder.create` was called.
        study: the definition.
        watcher: is told of every step.
        in_flight: jobs that may be queued or running at a time.
        poll_s: seconds between two looks at the jobs.
    Raises:
        UsageError: a script ended well but recorded nothing, or a job was refused.
    """
    done = finished(folder.attempts()[0])
    waiting = deque(p for p in plan(study) if p.key not in done)
    active: list[_Active] = []
    failed: list[Attempt] = []
    with _cancelling(folder, study, active):
        while waiting or active:
            while waiting and len(active) < in_flight:
                active.append(_start(folder, study, waiting.popleft(), watcher))
            for each in list(active):
                each.job = jobs.get(each.job.id)
                watcher.seen(each.point, each.job, _live_speed(each.folder.records))
                if not each.has_ended():
                    continue
                active.remove(each)
                attempt = _collect(folder, each)
                watcher.ended(each.point, attempt, each.folder.log)
                if attempt.silent:
                    raise UsageError(
                        f"{study.script.name} ended without an error but recorded no result, so "
                        f"there is nothing to measure.\n{RECORD_HINT}"
                    )
                if attempt.fault is not None:
                    failed.append(attempt)
            if active:
                time.sleep(poll_s)
    return failed


def _start(folder: StudyFolder, study: Study, point: Point, watcher: Watcher) -> _Active:
    left = _left_behind(folder, point)
    if left is not None:
        watcher.started(point, left.job, adopted=True)
        return left
    place = folder.new_attempt(point)
    asked = request(study, point, place.records)
    facts = submission(study.script)
    job = jobs.submit(asked)
    place.write_note({**_provenance(facts, asked, job), "job_id": job.id})
    watcher.started(point, job, adopted=False)
    return _Active(point, place, job)


def _left_behind(folder: StudyFolder, point: Point) -> _Active | None:
    """Return the job of an earlier run whose records were not collected, running or ended."""
    collected = {a.number for a in folder.attempts()[0] if a.point == point}
    for place in reversed(folder.attempt_folders(point)):
        if place.number in collected:
            return None
        job = _job_of(place)
        if job is not None:
            return _Active(point, place, job)
    return None


def _job_of(place: AttemptFolder) -> jobs.Job | None:
    note = place.note()
    if note is not None:
        try:
            return jobs.get(str(note["job_id"]))
        except (QsgdError, KeyError):
            return None  # its registry was cleaned; the point is measured again
    # Killed between submitting and writing the note: the job itself names its records.
    records = str(place.records)
    return next((j for j in jobs.list_jobs() if j.request.env.get("QSGD_RECORDS") == records), None)


def _collect(folder: StudyFolder, ended: _Active) -> Attempt:
    try:
        text = ended.folder.records.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    records, torn = parse_records(text)
    try:
        copyfile(jobs.output(ended.job.id), ended.folder.log)
    except OSError:
        ended.folder.log.write_text("(the job left no output)\n", encoding="utf-8")
    note = ended.folder.note() or _provenance({}, ended.job.request, ended.job)
    attempt = Attempt(
        point=ended.point,
        number=ended.folder.number,
        state=ended.job.state.value,
        exit_code=ended.job.exit_code,
        records=records,
        torn_lines=torn,
        provenance={k: v for k, v in note.items() if k != "job_id"},
    )
    folder.append(attempt)
    return attempt


@contextmanager
def _cancelling(folder: StudyFolder, study: Study, active: list[_Active]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for each in active:
            try:
                jobs.cancel(each.job.id)
                each.job = jobs.wait([each.job.id], timeout_s=30)[0]
                _collect(folder, replace(each))
            except QsgdError:
                continue  # the next run finds it by its note
        raise


def _provenance(facts: Mapping[str, Any], asked: jobs.JobRequest, job: jobs.Job) -> dict[str, Any]:
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
    }


def _live_speed(path: Path) -> float | None:
    try:
        records, _ = parse_records(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    speeds = [r["images_per_s"] for r in records if isinstance(r.get("images_per_s"), int | float)]
    return speeds[-1] if speeds else None
