"""Execution of a study: submit its points as jobs, follow them, collect their records."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from qsgd_hpc import jobs
from qsgd_hpc.errors import QsgdError, UsageError
from qsgd_hpc.jobs.request.prepare import prepare
from qsgd_hpc.jobs.waiting import Patience
from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.cluster.keeper import trial
from qsgd_hpc.scaling.define.study import Point, Program, Study, plan
from qsgd_hpc.scaling.run import cost
from qsgd_hpc.scaling.run.driver import JOB_ENDS
from qsgd_hpc.scaling.run.progress import Progress
from qsgd_hpc.scaling.run.study_jobs import (
    Packed,
    Single,
    adopt_packs,
    entries_for,
    left_behind,
    never_taken,
    pack_request,
    pack_scripts,
    point_request,
    start_pack,
    start_point,
)
from qsgd_hpc.scaling.store import RECORD_HINT, Attempt, StudyFolder, finished

__all__ = ["check_sizes", "run"]

LOOK_S = 0.3
# Ends of jobs after which another job may continue with the remaining points.
_GOES_ON = (*(jobs.JobState(s) for s in JOB_ENDS if s != "CANCELLED"), jobs.JobState.COMPLETED)

Active = Single | Packed


def check_sizes(study: Study) -> float | None:
    """Validate the jobs of all sizes for the site; return a job's limit in minutes.

    Raises:
        UsageError: all faults of all sizes, each once.
    """
    faults: dict[str, None] = {}
    limit_min = study.walltime_min
    for points in _job_points(study):
        try:
            limit_min = _checked(study, points).walltime_min
        except UsageError as error:
            faults.update(dict.fromkeys(str(error).splitlines()))
    if faults:
        raise UsageError("\n".join(faults))
    for network in filter(None, map(parse_network, study.networks)):
        trial(network, max(study.nodes))
    return limit_min


def _job_points(study: Study) -> list[list[Point]]:
    points = plan(study)
    if study.pack:
        return [list(points)]
    return [[p] for p in {(p.nodes, p.case): p for p in points}.values()]


def _checked(study: Study, points: Sequence[Point]) -> jobs.JobRequest:
    if not study.pack:
        asked = point_request(study, points[0], study.workdir / "records.jsonl")
    else:
        asked = pack_request(study, points, study.workdir / "plan.json")
        entries = entries_for(StudyFolder(study.workdir), points[:1], study.workdir)
        pack_scripts(study, asked, entries)
    jobs.render(asked)
    return prepare(asked, dry_run=True)[0]


@dataclass
class _Run:
    """A running study: its waiting points, its active jobs, and the decisions on them."""

    folder: StudyFolder
    study: Study
    progress: Progress
    limit_min: float | None
    waiting: deque[Point]
    active: list[Active] = field(default_factory=list)
    failed: list[Attempt] = field(default_factory=list)
    refusal: UsageError | None = None
    again: set[Point] = field(default_factory=set)

    def follow(self, in_flight: int) -> list[Attempt]:
        self._adopt()
        patience = Patience()
        while self.waiting or self.active:
            self._start(in_flight)
            patience.begin([each.job for each in self.active])
            for each in list(self.active):
                each.job = jobs.get(each.job.id)
                self._look(each)
            while self.active and not patience.over() and not any(a.news() for a in self.active):
                time.sleep(LOOK_S)
        if self.refusal is not None:
            raise self.refusal
        return self.failed

    def _adopt(self) -> None:
        """Follow the packed jobs of earlier runs, and remove their points from the waiting ones."""
        for left in adopt_packs(self.folder, self.study):
            self.active.append(left)
            taken = {e.point for e in left.entries if e.point.key not in left.collected}
            self.waiting = deque(p for p in self.waiting if p not in taken)
            self.progress.packed(left.job, len(taken), adopted=True)

    def _start(self, in_flight: int) -> None:
        if not self.study.pack:
            while self.waiting and len(self.active) < in_flight:
                if self._affords([self.waiting[0]]):
                    point = self.waiting.popleft()
                    start_point(self.folder, self.study, point, self.progress, self.active)
        elif self.waiting and not self.active:
            points = list(self.waiting)
            alone = [left_behind(self.folder, self.study, p) for p in points]
            for left in alone:  # jobs of a run without --pack
                if left is not None:
                    self.waiting.remove(left.point)
                    self.active.append(left)
                    self.progress.started(left.point, left.job, adopted=True)
            if not self.active and self._affords(points):
                self.waiting.clear()
                start_pack(self.folder, self.study, points, self.progress, self.active)

    def _affords(self, points: list[Point]) -> bool:
        """Return whether a job of these points stays below the cap; if not, stop starting jobs."""
        attempts = self.folder.attempts()[0]
        times = cost.measured_s(attempts)
        busy = sum(a.nodes for a in self.active) * (self.limit_min or 0.0) / 60
        used = cost.spent(attempts) + busy
        try:
            cost.refuse(self.study, points, times, used, self.limit_min)
        except UsageError as error:
            self.refusal = error
            self.waiting.clear()
            return False
        return True

    def _look(self, each: Active) -> None:
        over = each.over()
        each.look(self.progress)
        for attempt, log in each.collect(over=over):
            self._note(attempt, log, each)
        if over:
            self.active.remove(each)
            self._take_back(each, each.unreached())

    def _note(self, attempt: Attempt, log: Path, source: Active) -> None:
        self.progress.ended(attempt, log)
        if attempt.silent and isinstance(source, Single):
            self._leave_out(self.study.program(attempt.point.case))
        if attempt.fault is None:
            return
        if attempt.state in JOB_ENDS and self._goes_on(source):
            self.waiting.append(attempt.point)  # cut off because earlier points used the job's time
        else:
            self.failed.append(attempt)

    def _leave_out(self, program: Program) -> None:
        """Start no more jobs of a script that records nothing, unless another point has records."""
        attempts = self.folder.attempts()[0]
        if any(a.fault is None and self.study.program(a.point.case) == program for a in attempts):
            return
        self.waiting = deque(p for p in self.waiting if self.study.program(p.case) != program)
        self.refusal = self.refusal or UsageError(
            f"{program.script.name} ended without an error but recorded no result, so there is "
            f"nothing to measure.\n{RECORD_HINT}"
        )

    def _goes_on(self, ended: Active) -> bool:
        """Return whether another packed job may continue: only if this one made progress."""
        if isinstance(ended, Single) or ended.job.state not in _GOES_ON:
            return False
        own = {(e.point.key, e.attempt.number) for e in ended.entries}
        attempts = self.folder.attempts()[0]
        return any(a.fault is None and (a.point.key, a.number) in own for a in attempts)

    def _take_back(self, ended: Active, left: list[Point]) -> None:
        """Queue the points that a job did not reach again, unless it measured nothing."""
        # The scheduler never accepted the job: try once more.
        fresh = never_taken(ended.job) and self.again.isdisjoint(left)
        if fresh:
            self.again.update(left)
        elif left and not self._goes_on(ended):
            raise UsageError(
                f"{ended.job.id} ended as {ended.job.state.value} with {len(left)} points not "
                f"started. See `qsgd-hpc logs {ended.job.id}`. Use a longer --walltime, or "
                "--separate; run the same command to resume."
            )
        self.waiting.extend(left)


def run(
    folder: StudyFolder,
    study: Study,
    progress: Progress,
    *,
    in_flight: int,
    limit_min: float | None = None,
) -> list[Attempt]:
    """Measure every point that is not finished; return the attempts that failed in this run.

    Finished points are skipped and failed ones tried again. A job left by an interrupted run is
    followed to its end, not started twice. If an exception ends this function, all active jobs are
    cancelled and recorded first.

    Args:
        folder: folder of the study, after :meth:`StudyFolder.create`.
        study: the definition.
        progress: shows every event.
        in_flight: most jobs of one point that are queued or running at a time.
        limit_min: limit of a job, as returned by :func:`check_sizes`.
    Raises:
        UsageError: a script succeeded but recorded nothing, a job was refused, or the next one
            could exceed the study's node-hours.
    """
    done = finished(folder.attempts()[0])
    waiting = deque(p for p in plan(study) if p.key not in done)
    running = _Run(folder, study, progress, limit_min, waiting)
    with _cancelling(running):
        return running.follow(in_flight)


@contextmanager
def _cancelling(running: _Run) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for each in running.active:
            try:
                jobs.cancel(each.job.id)
                each.job = jobs.wait([each.job.id], timeout_s=30)[0]
                for _ in each.collect(over=True):
                    pass
            except QsgdError:
                continue  # the next run finds the job by its note
        raise
