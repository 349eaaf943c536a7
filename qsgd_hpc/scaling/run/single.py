"""A job that measures one point: start it, find it again, collect its records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

from qsgd_hpc import jobs
from qsgd_hpc.scaling.define.plan import Point, environment, global_batch, script_args
from qsgd_hpc.scaling.define.study import Study
from qsgd_hpc.scaling.run.progress import Progress
from qsgd_hpc.scaling.run.submitted import (
    Names,
    StudyJob,
    job_of,
    never_taken,
    of_job,
    study_request,
    submission,
    submit_noted,
)
from qsgd_hpc.scaling.store import Attempt, AttemptFolder, StudyFolder, parse_records, throughput

__all__ = ["Single", "collect", "left_behind", "live_speed", "request", "start"]


@dataclass
class Single(StudyJob):
    """A job of one point that is queued or running."""

    point: Point
    place: AttemptFolder
    collected: bool = False

    def look(self, progress: Progress) -> None:
        """Report the point's speed."""
        progress.seen(self.point, self.job, live_speed(self.place.records))

    def news(self) -> bool:
        """Return whether there is progress that can be seen without a query to the scheduler."""
        return False

    def collect(self, *, over: bool) -> Iterator[tuple[Attempt, Path]]:
        """Yield the point's attempt and its log once its job is over."""
        if over and never_taken(self.job):
            self.place.write_note({})  # without a job id, so that no job is searched
        elif over and not self.collected:
            try:
                copyfile(jobs.output(self.job.id), self.place.log)
            except OSError:
                self.place.log.write_text("(the job left no output)\n", encoding="utf-8")
            note = self.place.note() or of_job({}, self.job.request, self.job)
            del note["job_id"]
            began, ended = self.job.progress.started_at, self.job.progress.ended_at
            if began is not None and ended is not None:
                note["seconds"] = max(0.0, ended - began)
            state, code = self.job.state.value, self.job.exit_code
            attempt = collect(self.study, self.point, self.place, state, code, note)
            self.folder.append(attempt)
            self.collected = True
            yield attempt, self.place.log

    def unreached(self) -> list[Point]:
        """Return the point in a list if no scheduler has accepted its job."""
        return [self.point] if never_taken(self.job) else []


def request(study: Study, point: Point, records: Path) -> jobs.JobRequest:
    """Return the job of one point; `records` is the file for its script's records."""
    return study_request(
        study,
        script=study.program(point.case).script,
        script_args=script_args(study, point),
        nodes=point.nodes,
        network=point.case.network or None,
        name=f"scale-n{point.nodes}-b{point.bits}",
        env=environment(study, point, str(records)),
    )


def start(
    folder: StudyFolder, study: Study, point: Point, progress: Progress, active: list[Any]
) -> None:
    """Submit a point's job, or find its job of an earlier run, and add it to the active ones."""
    left = left_behind(folder, study, point)
    if left is not None:
        active.append(left)
        return progress.started(point, left.job, adopted=True)
    place = folder.new_attempt(point)
    asked = request(study, point, place.records)

    def follow(job: jobs.Job) -> None:
        active.append(Single(folder, study, job, point, place))

    job = submit_noted(asked, submission(asked.script), place, _names(place), follow)
    progress.started(point, job, adopted=False)


def _names(place: AttemptFolder) -> Names:
    records = str(place.records)
    return lambda request: request.env.get("QSGD_RECORDS") == records


def left_behind(folder: StudyFolder, study: Study, point: Point) -> Single | None:
    """Return a running or ended job of an earlier run whose records were not collected."""
    collected = folder.collected()
    for place in reversed(folder.attempt_folders(point)):
        if (point.key, place.number) in collected:
            return None
        job = job_of(place, _names(place))
        if job is not None:
            return Single(folder, study, job, point, place)
    return None


def collect(
    study: Study,
    point: Point,
    place: AttemptFolder,
    state: str,
    exit_code: int | None,
    provenance: dict[str, Any],
) -> Attempt:
    """Create the attempt from the script's records, however the job ended."""
    try:
        text = place.records.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    records, torn = parse_records(text)
    return Attempt(
        point=point,
        number=place.number,
        state=state,
        exit_code=exit_code,
        records=records,
        torn_lines=torn,
        provenance=provenance,
        global_batch=global_batch(study.mode, point.case, point.ranks),
    )


def live_speed(path: Path) -> tuple[float, str] | None:
    """Return the newest throughput that a running script has recorded, with its unit."""
    try:
        records, _ = parse_records(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    speeds = [(value, unit) for value, unit in map(throughput, records) if value]
    return speeds[-1] if speeds else None
