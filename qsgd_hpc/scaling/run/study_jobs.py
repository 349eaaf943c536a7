"""The jobs of a study, of one point or of many: start them, find them again, collect records.

A job is noted in a folder, with its provenance, so that it survives interruptions.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile
from typing import Any

from qsgd_hpc import __version__, jobs
from qsgd_hpc.errors import QsgdError
from qsgd_hpc.jobs.events import end_of, read_events
from qsgd_hpc.jobs.registry import write_file
from qsgd_hpc.jobs.schedulers.common import ask
from qsgd_hpc.jobs.script import Step, step_scripts
from qsgd_hpc.scaling.define.study import Point, Study, environment, global_batch, script_args
from qsgd_hpc.scaling.run import driver
from qsgd_hpc.scaling.run.cost import measured_s
from qsgd_hpc.scaling.run.driver import Entry, PackPlan, begun, outcome_state
from qsgd_hpc.scaling.run.progress import Progress
from qsgd_hpc.scaling.store import (
    Attempt,
    AttemptFolder,
    JobFolder,
    PackFolder,
    StudyFolder,
    parse_records,
    throughput,
)

__all__ = [
    "Packed",
    "Single",
    "StudyJob",
    "adopt_packs",
    "entries_for",
    "left_behind",
    "never_taken",
    "pack_request",
    "pack_scripts",
    "point_request",
    "start_pack",
    "start_point",
]

# After a restart, a scheduler may not list a job for some time.
LOST_LOOKS = 4


@dataclass
class StudyJob:
    """A job of a study that is queued or running."""

    folder: StudyFolder
    study: Study
    job: jobs.Job
    lost: int = field(default=0, kw_only=True)

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return self.job.request.nodes

    def over(self) -> bool:
        """Return whether the job has ended; LOST counts only after several queries."""
        self.lost = self.lost + 1 if self.job.state is jobs.JobState.LOST else 0
        return self.job.state.final or self.lost >= LOST_LOOKS


def study_request(study: Study, **own: Any) -> jobs.JobRequest:
    """Return the request of a job with the study's settings and its own."""
    return jobs.JobRequest(
        ranks_per_node=study.ranks_per_node,
        walltime_min=study.walltime_min,
        queue=study.queue,
        account=study.account,
        filesystems=study.filesystems,
        python=study.python,
        site=study.site,
        workdir=study.workdir,
        **own,
    )


def submit_noted(
    asked: jobs.JobRequest,
    facts: Mapping[str, Any],
    place: JobFolder,
    follow: Callable[[jobs.Job], None],
) -> jobs.Job:
    """Submit a job, record it in its folder, and call `follow`, also after an interrupt.

    Args:
        asked: the requested job.
        facts: further values to record.
        place: its folder.
        follow: is called with the job if it was submitted, also before an interrupt is raised.
    """
    try:
        job = jobs.submit(asked)
        place.write_note(of_job(facts, asked, job))
    except BaseException:
        submitted = job_of(place)  # an interrupt can arrive during the submission
        if submitted is not None:
            follow(submitted)
        raise
    follow(job)
    return job


def job_of(place: JobFolder) -> jobs.Job | None:
    """Return the job that was submitted for a folder, if known."""
    note = place.note()
    if note is not None:
        try:
            return jobs.get(str(note["job_id"]))
        except (QsgdError, KeyError):
            return None  # the job's registry was cleaned; the point is measured again
    # After a kill between submitting and writing the note, the job is found by its request.
    return next((j for j in jobs.list_jobs() if place.is_of(j.request)), None)


def never_taken(job: jobs.Job) -> bool:
    """Return whether no scheduler accepted a job, because its submission was interrupted."""
    progress = job.progress  # local jobs have no scheduler_id
    began = progress.scheduler_id is not None or progress.started_at is not None
    return progress.state is jobs.JobState.LOST and not began


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


def of_job(facts: Mapping[str, Any], asked: jobs.JobRequest, job: jobs.Job) -> dict[str, Any]:
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
    answer = ask(["git", "-C", str(folder), *words])
    return answer.out.strip() if answer.code == 0 else None


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
            attempt = attempt_of(self.study, self.point, self.place, state, code, note)
            self.folder.append(attempt)
            self.collected = True
            yield attempt, self.place.log

    def unreached(self) -> list[Point]:
        """Return the point in a list if no scheduler has accepted its job."""
        return [self.point] if never_taken(self.job) else []


def point_request(study: Study, point: Point, records: Path) -> jobs.JobRequest:
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


def start_point(
    folder: StudyFolder, study: Study, point: Point, progress: Progress, active: list[Any]
) -> None:
    """Submit a point's job, or find its job of an earlier run, and add it to the active ones."""
    left = left_behind(folder, study, point)
    if left is not None:
        active.append(left)
        return progress.started(point, left.job, adopted=True)
    place = folder.new_attempt(point)
    asked = point_request(study, point, place.records)

    def follow(job: jobs.Job) -> None:
        active.append(Single(folder, study, job, point, place))

    job = submit_noted(asked, submission(asked.script), place, follow)
    progress.started(point, job, adopted=False)


def left_behind(folder: StudyFolder, study: Study, point: Point) -> Single | None:
    """Return a running or ended job of an earlier run whose records were not collected."""
    collected = folder.collected()
    for place in reversed(folder.attempt_folders(point)):
        if (point.key, place.number) in collected:
            return None
        job = job_of(place)
        if job is not None:
            return Single(folder, study, job, point, place)
    return None


def attempt_of(
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


DRIVER = Path(driver.__file__).with_name("__main__.py")


@dataclass
class Packed(StudyJob):
    """A packed job that is queued or running."""

    pack: PackFolder
    entries: tuple[Entry, ...]
    collected: set[str] = field(default_factory=set)
    announced: set[str] = field(default_factory=set)

    def look(self, progress: Progress) -> None:
        """Report running points and their speeds."""
        for entry in begun(self.entries):
            if entry.point.key in self.collected:
                continue
            if entry.point.key not in self.announced:
                self.announced.add(entry.point.key)
                progress.started(entry.point, self.job, adopted=False)
            progress.seen(entry.point, self.job, live_speed(entry.attempt.records))

    def news(self) -> bool:
        """Return whether a point has begun or ended since look() or collect()."""
        return any(
            e.point.key not in self.announced or e.attempt.outcome() is not None
            for e in begun(self.entries)
            if e.point.key not in self.collected
        )

    def collect(self, *, over: bool) -> Iterator[tuple[Attempt, Path]]:
        """Yield the attempts that have ended and their logs; if the job is over, all begun ones."""
        started = begun(self.entries)
        for entry in started:
            if entry.point.key in self.collected:
                continue
            outcome = entry.attempt.outcome()
            if outcome is None and over:
                outcome = _own_record(entry.attempt)
            if outcome is None and not over:
                continue
            attempt = self._attempt(entry, outcome, over=over, is_last=entry is started[-1])
            self.folder.append(attempt)
            self.collected.add(entry.point.key)
            yield attempt, entry.attempt.log
        if over:
            self.pack.close()

    def _attempt(
        self, entry: Entry, outcome: dict[str, Any] | None, *, over: bool, is_last: bool
    ) -> Attempt:
        job_state = self.job.state.value
        state, code = outcome_state(outcome, job_state, is_last=is_last and over)
        # The provenance of this point: its script's facts, and its own command and variables.
        facts = dict(self.pack.note() or of_job({}, self.job.request, self.job))
        scripts = facts.pop("scripts", {})
        facts.pop("job_id", None)
        asked = point_request(self.study, entry.point, entry.attempt.records)
        facts |= scripts.get(str(asked.script), {})
        facts |= {
            "command": [str(asked.script), *asked.script_args],
            "env": dict(asked.env),
            "pack": self.pack.path.name,
            "held_nodes": self.nodes,
        }
        for name in ("seconds", "nodes"):
            if outcome and name in outcome:
                facts[name] = outcome[name]
        facts.setdefault("seconds", self._until_the_end(entry))
        return attempt_of(self.study, entry.point, entry.attempt, state, code, facts)

    def _until_the_end(self, entry: Entry) -> float | None:
        """Return the seconds of a point that was cut off by the end of its job."""
        began = next((e.get("at") for e in read_events(entry.attempt.step)), None)
        ended = self.job.progress.ended_at
        return None if began is None or ended is None else max(0.0, ended - began)

    def unreached(self) -> list[Point]:
        """Return the points that the job never began."""
        return [e.point for e in self.entries if not e.attempt.path.is_dir()]


def _own_record(place: AttemptFolder) -> dict[str, Any] | None:
    """Return the outcome of a step from its own record, if its driver was killed before writing."""
    events = {e["event"]: e for e in read_events(place.step)}
    end, start_ = events.get("end", {}), events.get("start", {})
    code = end.get("exit_code")
    if code != 0 or not isinstance(start_.get("at"), int | float):
        return None
    state, _ = end_of(code)
    return {"state": state.value, "exit_code": code, "seconds": end["at"] - start_["at"]}


def pack_request(study: Study, points: Sequence[Point], plan: Path) -> jobs.JobRequest:
    """Return the job that measures these points; `plan` is the file that its driver reads."""
    return study_request(
        study,
        script=DRIVER,
        script_args=(str(plan),),
        nodes=max(p.nodes for p in points),
        name=f"scale-{len(points)}-points",
        alone=True,
        # The driver itself checks which points still fit.
        stop_before_min=0.0,
    )


def pack_scripts(
    study: Study, asked: jobs.JobRequest, entries: Sequence[Entry]
) -> tuple[list[str], int | None]:
    """Return the scripts of a job's points, and the lines of a host in their host files.

    Raises:
        UsageError: the site refuses the job, or its launcher cannot be restricted to some nodes.
    """
    steps = [
        Step(point_request(study, e.point, e.attempt.records), e.attempt.step, e.hosts)
        for e in entries
    ]
    return step_scripts(asked, steps)


def entries_for(folder: StudyFolder, points: Sequence[Point], pack: Path) -> tuple[Entry, ...]:
    """Return an entry for the next attempt at each point."""
    return tuple(Entry(p, folder.next_attempt(p), pack / f"{p.key}.sh") for p in points)


def start_pack(
    folder: StudyFolder,
    study: Study,
    points: Sequence[Point],
    progress: Progress,
    active: list[Any],
) -> None:
    """Submit one job for these points and add it to the active ones."""
    pack = folder.new_pack()
    asked = pack_request(study, points, pack.plan)
    entries = entries_for(folder, points, pack.path)
    texts, per_host = pack_scripts(study, asked, entries)
    for entry, text in zip(entries, texts, strict=True):
        entry.script.write_text(text, encoding="utf-8")
    times = measured_s(folder.attempts()[0])
    write_file(pack.plan, PackPlan(entries, study.mode, times, per_host).to_text())
    facts = {"scripts": {str(p.script): submission(p.script) for p in study.programs}}

    def follow(job: jobs.Job) -> None:
        active.append(Packed(folder, study, job, pack, entries))

    job = submit_noted(asked, facts, pack, follow)
    progress.packed(job, len(points), adopted=False)


def adopt_packs(folder: StudyFolder, study: Study) -> list[Packed]:
    """Return the packed jobs of earlier runs that may have points left to collect."""
    found = []
    collected = folder.collected()
    for pack in folder.packs():
        if pack.closed:
            continue
        job = job_of(pack)
        try:
            plan = PackPlan.from_text(pack.plan.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError):
            job = None  # the plan is incomplete, so nothing was submitted
        if job is None:
            pack.close()
            continue
        had = {e.point.key for e in plan.entries if (e.point.key, e.attempt.number) in collected}
        found.append(Packed(folder, study, job, pack, plan.entries, had, set(had)))
    return found
