"""Measures the points of a packed job in sequence; runs on the job's first node.

Only the driver starts points in its job. It writes only to their folders; ``qsgd-hpc scale``
collects the study's records, now or at its next start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from qsgd_hpc.jobs.processes import adopt_orphans, members
from qsgd_hpc.jobs.records.events import end_of
from qsgd_hpc.jobs.script.steps import host_lines, node_lines
from qsgd_hpc.scaling.run.pack import Entry, PackPlan, fits

__all__ = ["drive"]

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
