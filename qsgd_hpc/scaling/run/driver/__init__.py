"""The driver of a packed job: measures its points in sequence, on the job's first node.

Only the driver starts points in its job. It writes only to their folders; ``qsgd-hpc scale``
collects the study's records, now or at its next start. Its plan is in plan.json.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from qsgd_hpc.jobs.events import end_of
from qsgd_hpc.jobs.processes import adopt_orphans, members
from qsgd_hpc.jobs.script import host_lines, node_lines
from qsgd_hpc.scaling.define.study import Point
from qsgd_hpc.scaling.run.cost import expected_s
from qsgd_hpc.scaling.store import AttemptFolder

__all__ = ["Entry", "PackPlan", "drive", "fits", "outcome_state"]

# A point may take 10 % longer than similar ones, and needs some seconds to start.
SLOWER, START_S = 1.1, 5.0
JOB_ENDS = ("TIMEOUT", "CANCELLED", "NODE_FAIL", "LOST")


@dataclass(frozen=True)
class Entry:
    """One point of a packed job: its attempt, and the script that measures it on its nodes."""

    point: Point
    attempt: AttemptFolder
    script: Path

    @property
    def hosts(self) -> Path:
        """The file that names the nodes of this point."""
        return self.attempt.path / "hosts"

    def to_json(self) -> dict[str, Any]:
        return {
            "point": self.point.to_json(),
            "attempt": self.attempt.number,
            "folder": str(self.attempt.path),
            "script": str(self.script),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Entry:
        place = AttemptFolder(Path(body["folder"]), body["attempt"])
        return cls(Point.from_json(body["point"]), place, Path(body["script"]))


@dataclass(frozen=True)
class PackPlan:
    """The plan of a packed job's driver.

    Attributes:
        entries: in the order of measurement.
        mode: "strong" or "weak", for the expected times.
        times: seconds of the points measured before.
        per_host: lines per node in a step's host file; None: as in the scheduler's file.
    """

    entries: tuple[Entry, ...]
    mode: str
    times: Mapping[Point, float]
    per_host: int | None

    def to_text(self) -> str:
        """Return the plan as the text of plan.json."""
        body = {
            "mode": self.mode,
            "per_host": self.per_host,
            "times": [[p.to_json(), s] for p, s in self.times.items()],
            "entries": [e.to_json() for e in self.entries],
        }
        return json.dumps(body, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str) -> PackPlan:
        """Read the text of :meth:`to_text`; raises ValueError, KeyError or TypeError."""
        body = json.loads(text)
        return cls(
            entries=tuple(Entry.from_json(e) for e in body["entries"]),
            mode=body["mode"],
            times={Point.from_json(p): s for p, s in body["times"]},
            per_host=body["per_host"],
        )


def fits(point: Point, times: Mapping[Point, float], mode: str, left_s: float | None) -> bool:
    """Return whether a point is expected to end before its job does; `left_s` remain.

    True if its time is unknown: if it is cut off, no more is lost than by leaving the time unused.
    """
    expected = expected_s(point, times, mode)
    return left_s is None or expected is None or expected * SLOWER + START_S <= left_s


def outcome_state(
    outcome: Mapping[str, Any] | None, job_state: str, *, is_last: bool
) -> tuple[str, int | None]:
    """Return the state and exit code of a point that began in a job that has ended.

    A point without an outcome was cut off, so it has the state of the job. The last point of a job
    that was ended from outside was cut off too, whatever state its launcher reported.
    """
    cut_off = job_state if job_state in JOB_ENDS else "LOST"
    if outcome is None:
        return cut_off, None
    if outcome["state"] == "FAILED" and is_last and job_state in JOB_ENDS:
        return cut_off, outcome["exit_code"]
    return outcome["state"], outcome["exit_code"]


def begun(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries whose measurement has begun: their attempts have a folder."""
    return [e for e in entries if e.attempt.path.is_dir()]


# Seconds to wait after a failure, because it may be caused by the end of the complete job.
GRACE_S = 1.0
KILL_AFTER_S = 10.0


def drive(file: Path) -> None:
    """Measure all points of a plan that fit into the job's time; then return."""
    plan = PackPlan.from_text(file.read_text(encoding="utf-8"))
    job_dir = Path(os.environ["QSGD_JOB_DIR"])
    adopt_orphans()
    driver = _Driver(plan, job_dir, node_lines(os.environ))
    driver.run()
    if driver.ended:
        sys.exit(128 + signal.SIGTERM)


@dataclass
class _Driver:
    plan: PackPlan
    job_dir: Path
    nodes: Sequence[str]
    child: subprocess.Popen[bytes] | None = None
    ended: bool = False
    times: dict[Any, float] = field(default_factory=dict)

    def run(self) -> None:
        self.times = dict(self.plan.times)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGALRM, self._kill)
        for entry in self.plan.entries:
            if self.ended or (self.job_dir / "stop").exists():
                return
            if entry.attempt.path.exists():
                continue  # begun by an earlier start of this job
            if not fits(entry.point, self.times, self.plan.mode, self._left_s()):
                _say(
                    f"{entry.point.key}: deferred to another job, because not enough time is "
                    "left in this one"
                )
                continue
            self._measure(entry)

    def _left_s(self) -> float | None:
        try:
            return float((self.job_dir / "stop_at").read_text()) - time.time()
        except (OSError, ValueError):
            return None  # a job without a walltime

    def _measure(self, entry: Entry) -> None:
        entry.attempt.path.mkdir(parents=True)
        lines = host_lines(self.nodes, entry.point.nodes, self.plan.per_host)
        entry.hosts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        _say(f"{entry.point.key}: begins")
        began = time.time()
        code = self._run(entry)
        seconds = time.time() - began
        if code and not self.ended:
            time.sleep(GRACE_S)
        if code and self.ended:
            _say(f"{entry.point.key}: cut off by the end of the job")
            return
        state, why = end_of(code)
        entry.attempt.write_outcome(
            {
                "state": state.value,
                "exit_code": code,
                "started_at": began,
                "seconds": seconds,
                "nodes": list(dict.fromkeys(lines)),
            }
        )
        if not code:
            self.times[entry.point] = seconds
        _say(f"{entry.point.key}: {state.value} after {seconds:.1f} s {why}".rstrip())

    def _run(self, entry: Entry) -> int:
        files = {"PBS_NODEFILE": str(entry.hosts)} if "PBS_NODEFILE" in os.environ else {}
        with entry.attempt.log.open("ab") as log:
            self.child = subprocess.Popen(
                ["bash", str(entry.script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **files},
                start_new_session=True,
            )
        if self.ended:  # SIGTERM arrived before the child existed
            self._end(signal.SIGTERM, None)
        code = self.child.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return 128 - code if code < 0 else code

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        """End the running point, first with SIGTERM; its records are kept."""
        self.ended = True
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()
            signal.setitimer(signal.ITIMER_REAL, KILL_AFTER_S)

    def _kill(self, _number: int, _frame: FrameType | None) -> None:
        for pid in members(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _say(line: str) -> None:
    sys.stdout.write(f"qsgd-hpc scale: {line}\n")
    sys.stdout.flush()
