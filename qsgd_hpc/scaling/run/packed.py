"""A job that measures many points: start it, find it again, collect the records of its points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qsgd_hpc import jobs
from qsgd_hpc.jobs.records.events import end_of, read_events
from qsgd_hpc.jobs.script.steps import Step, step_scripts
from qsgd_hpc.scaling.define.plan import Point
from qsgd_hpc.scaling.define.study import Study
from qsgd_hpc.scaling.run import driver, single
from qsgd_hpc.scaling.run.cost import measured_s
from qsgd_hpc.scaling.run.driver import Entry, PackPlan, begun, outcome_state
from qsgd_hpc.scaling.run.progress import Progress
from qsgd_hpc.scaling.run.submitted import (
    Names,
    StudyJob,
    job_of,
    of_job,
    study_request,
    submission,
    submit_noted,
)
from qsgd_hpc.scaling.store import Attempt, AttemptFolder, PackFolder, StudyFolder, write_whole

__all__ = ["Packed", "adopt", "request", "start"]

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
            progress.seen(entry.point, self.job, single.live_speed(entry.attempt.records))

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
        asked = single.request(self.study, entry.point, entry.attempt.records)
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
        return single.collect(self.study, entry.point, entry.attempt, state, code, facts)

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


def request(study: Study, points: Sequence[Point], plan: Path) -> jobs.JobRequest:
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


def scripts(
    study: Study, asked: jobs.JobRequest, entries: Sequence[Entry]
) -> tuple[list[str], int | None]:
    """Return the scripts of a job's points, and the lines of a host in their host files.

    Raises:
        UsageError: the site refuses the job, or its launcher cannot be restricted to some nodes.
    """
    steps = [
        Step(single.request(study, e.point, e.attempt.records), e.attempt.step, e.hosts)
        for e in entries
    ]
    return step_scripts(asked, steps)


def entries_for(folder: StudyFolder, points: Sequence[Point], pack: Path) -> tuple[Entry, ...]:
    """Return an entry for the next attempt at each point."""
    return tuple(Entry(p, folder.next_attempt(p), pack / f"{p.key}.sh") for p in points)


def start(
    folder: StudyFolder,
    study: Study,
    points: Sequence[Point],
    progress: Progress,
    active: list[Any],
) -> None:
    """Submit one job for these points and add it to the active ones."""
    pack = folder.new_pack()
    asked = request(study, points, pack.plan)
    entries = entries_for(folder, points, pack.path)
    texts, per_host = scripts(study, asked, entries)
    for entry, text in zip(entries, texts, strict=True):
        entry.script.write_text(text, encoding="utf-8")
    times = measured_s(folder.attempts()[0])
    write_whole(pack.plan, PackPlan(entries, study.mode, times, per_host).to_text())
    facts = {"scripts": {str(p.script): submission(p.script) for p in study.programs}}

    def follow(job: jobs.Job) -> None:
        active.append(Packed(folder, study, job, pack, entries))

    job = submit_noted(asked, facts, pack, _names(pack), follow)
    progress.packed(job, len(points), adopted=False)


def adopt(folder: StudyFolder, study: Study) -> list[Packed]:
    """Return the packed jobs of earlier runs that may have points left to collect."""
    found = []
    collected = folder.collected()
    for pack in folder.packs():
        if pack.closed:
            continue
        job = job_of(pack, _names(pack))
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


def _names(pack: PackFolder) -> Names:
    plan = (str(pack.plan),)
    return lambda request: request.script_args == plan
