"""Run the tests as ``make test`` and ``make test-all`` do, and say what became of them.

    python -m tests.gate             the gate: what every change must pass, in minutes
    python -m tests.gate --all       everything, for an hour or two

Tests of pure functions and of jobs run on all cores; those that start ranks follow, one at a time.
What failed runs once more, alone: what passes then is printed as ``flaky: NAME`` and does not fail
the run, but must be mended or leave the gate (``tests/selection.py``) before anything else is done.
A run in which nothing happens any more is ended with its stacks, and fails. Whatever is still alive
at the end is named, ended, and fails the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import psutil

from qsgd_hpc.launch.shared_memory import sweep
from tests.processes import MARK, OUTCOMES, default_interrupts, end_marked, until
from tests.selection import SERIAL

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tested.md"
PAGE_HEAD = """# What was tested last

`make test-all` runs every test there is: those of the gate, and those that are long, or need root,
system packages or real data ([which is which](../CONTRIBUTING.md#test)). What it said last:
"""
WORKERS = "3"  # on two cores, as jobs mostly wait
# So many failures are no accident: the phase ends, and nothing is tried again. A core that hangs
# would otherwise cost each test of it the longest that one may take.
MOST_FAILED = 10
LONGEST_PURE_S = 300
LONGEST_SERIAL_S = 1800  # the longest that a test asks for: it builds, or trains for long
# A test that takes too long is ended by itself. What is silent for longer than that is pytest: its
# workers may wait for their controller, and it for them, when five had gone down before.
SILENCE_MARGIN_S = 180
STACKS_S = 10  # for a process to write where it is
ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # a cancelled CI job, a closed terminal


@dataclass(frozen=True)
class Phase:
    """One run of pytest: what it is called, and what ends it."""

    title: str
    options: tuple[str, ...]
    most_failed: int = MOST_FAILED
    longest_s: float = LONGEST_SERIAL_S
    """The longest that one of its tests may take."""


@dataclass(frozen=True)
class Outcomes:
    """What became of the tests of a phase, by their names."""

    passed: frozenset[str]
    skipped: frozenset[str]
    failed: tuple[str, ...]
    broken_off: tuple[str, ...]  # begun and never ended: the process went down with them


def phases(everything: bool) -> list[Phase]:
    """Return what runs, in order."""
    also = "" if everything else " and not full"
    side_by_side = ("-n", WORKERS, "--dist", "loadfile", "--no-loadscope-reorder")
    pure = (*side_by_side, "--timeout", str(LONGEST_PURE_S), "-m", f"not serial{also}")
    most_failed = 1000 if everything else MOST_FAILED
    places = sorted({entry.partition("::")[0] for entry in SERIAL})  # to collect no others
    return [
        Phase("pure functions and jobs, on all cores", pure, most_failed, LONGEST_PURE_S),
        Phase("ranks, one at a time", ("-m", f"serial{also}", *places), most_failed // 2),
    ]


def read(file: Path) -> Outcomes:
    """Read what the tests' own conftest.py has written."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    begun: dict[str, bool] = {}
    became: dict[str, set[str]] = {}
    for entry in map(json.loads, lines):
        if "outcome" in entry:
            became.setdefault(entry["test"], set()).add(entry["outcome"])
        else:
            begun[entry["test"]] = entry["state"] == "ended"
    return Outcomes(
        passed=frozenset(t for t, found in became.items() if found == {"passed"}),
        skipped=frozenset(t for t, o in became.items() if "skipped" in o and "failed" not in o),
        failed=tuple(t for t, found in became.items() if "failed" in found),
        broken_off=tuple(t for t, ended in begun.items() if not ended),
    )


def run_phase(phase: Phase, folder: Path) -> tuple[int, Outcomes]:
    """Run pytest in a folder; return its exit code and what became of the tests."""
    print(f"\n== {phase.title} ==", flush=True)
    with tempfile.TemporaryDirectory(prefix="outcomes-") as name:
        file = Path(name, "outcomes.jsonl")
        command = [sys.executable, "-m", "pytest", "--durations=15"]
        command += ["--maxfail", str(phase.most_failed)]
        environ = {**os.environ, OUTCOMES: str(file)}
        with subprocess.Popen([*command, *phase.options], cwd=folder, env=environ) as run:
            try:
                wait(run, file, phase.longest_s + SILENCE_MARGIN_S)
            except BaseException:
                run.kill()  # what it has started bears our mark
                raise
        return run.returncode, read(file)


def wait(run: subprocess.Popen[bytes], file: Path, longest_s: float) -> None:
    """Wait for pytest; end it, and all it has started, when it has written nothing for so long."""
    written, silent_s = -1, 0  # seconds waited, not passed: a run that was stopped is not silent
    while silent_s < longest_s:
        try:
            run.wait(1)
            return
        except subprocess.TimeoutExpired:
            size = file.stat().st_size if file.exists() else 0
            written, silent_s = size, silent_s + 1 if size == written else 0
    run.send_signal(signal.SIGSTOP)  # or it would start new workers, and they end without it
    # pytest's processes write the stacks of all threads; one after the other, not into each other.
    for part in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, AssertionError):
            part.send_signal(signal.SIGABRT)
            until(lambda part=part: part.status() == psutil.STATUS_ZOMBIE, STACKS_S)
        with contextlib.suppress(psutil.Error):
            part.kill()
    run.send_signal(signal.SIGABRT)
    run.send_signal(signal.SIGCONT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(STACKS_S)
    run.kill()
    print(f"for {longest_s:.0f} s no test has begun or ended: the run was ended", flush=True)


@dataclass
class Verdict:
    """What a whole run has found."""

    well: bool = True
    passed: int = 0
    skipped: int = 0
    failed: dict[str, None] = field(default_factory=dict)
    """By name, in order; each once, though one may have failed in its test and after it."""
    flaky: list[str] = field(default_factory=list)
    """What failed, and passed when it ran once more."""

    def __str__(self) -> str:
        return f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"


def verdict(phases: Sequence[Phase], folder: Path = ROOT, options: tuple[str, ...] = ()) -> Verdict:
    """Run tests, and once more what failed.

    Args:
        phases: what to run.
        folder: where the names of the tests begin.
        options: of pytest, when it runs once more what failed.
    """
    result = Verdict()
    for phase in phases:
        code, found = run_phase(phase, folder)
        result.passed += len(found.passed)
        result.skipped += len(found.skipped)
        result.failed |= dict.fromkeys(found.failed)
        if len(found.failed) >= phase.most_failed:
            print(f"{len(found.failed)} tests failed, which is no accident: the run ends here")
            result.well = False
            return result
        # 0: all passed; 1: some failed, which is judged below; all else broke the run itself.
        if code not in (0, 1) or found.broken_off or (code == 1 and not found.failed):
            result.well = False
            for test in found.broken_off or ("(between tests)",):
                print(f"broken off, with pytest's exit code {code}, in: {test}", flush=True)
        if code not in (0, 1):  # what broke this phase would break the next, each at its longest
            for test in result.failed:
                if test not in found.broken_off:  # else it is named above
                    print(f"failed: {test}", flush=True)
            print("the run itself broke, and ends here")
            result.failed |= dict.fromkeys(found.broken_off)
            return result
    if result.failed:
        result.flaky = repeat(result.failed, folder, options)
        result.passed += len(result.flaky)
        for test in result.flaky:
            del result.failed[test]
    result.well &= not result.failed
    return result


def repeat(failed: Iterable[str], folder: Path, options: tuple[str, ...]) -> list[str]:
    """Run what failed once more, alone; say and return what passes now."""
    _, found = run_phase(Phase("what failed, once more and alone", (*options, *failed)), folder)
    for test in failed:
        print(f"{'flaky' if test in found.passed else 'failed twice'}: {test}", flush=True)
    return [test for test in failed if test in found.passed]


def write_page(result: Verdict, minutes: float) -> None:
    """Keep the result of a whole run for readers of the documentation."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    rows = {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "commit": commit,
        "machine": f"{os.cpu_count()} cores, {cpu}",
        "system": platform.freedesktop_os_release()["PRETTY_NAME"],
        "Python": platform.python_version(),
        "tests": str(result),
        "time": f"{minutes:.0f} minutes",
        "failed": _listed(result.failed),
        "flaky": _listed(result.flaky),
    }
    table = "\n".join(f"| {name} | {text} |" for name, text in rows.items())
    PAGE.write_text(f"{PAGE_HEAD}\n| | |\n|---|---|\n{table}\n", encoding="utf-8")


def _listed(tests: Iterable[str]) -> str:
    return "<br>".join(f"`{test}`" for test in tests) or "none"


def require_environments(pythons: str) -> None:
    """End at once, with the remedy, where one of these interpreters cannot run the package.

    Args:
        pythons: paths, with colons between them, as in QSGD_TEST_PYTHON; they may be none.
    """
    for python in filter(None, pythons.split(os.pathsep)):
        command = [python, "-c", "import mpi4py, qsgd_hpc.cli"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise SystemExit(
                f"{python} cannot run the package ({reason}). Was this folder moved or copied? "
                f"Remove {Path(python).parents[1]} and run make again, which sets it up."
            )


def stop(number: int, frame: object) -> None:
    """End this process as if by itself, so that it ends what it has started."""
    for each in ENDINGS:
        signal.signal(each, signal.SIG_IGN)  # a make that is told to end says so once more
    raise SystemExit(128 + number)


def main() -> int:
    """Run the tests; 0: all is well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--all", action="store_true", help="also what is long or needs more than PyPI"
    )
    everything = parser.parse_args().all
    default_interrupts()
    require_environments(os.environ.get("QSGD_TEST_PYTHON", ""))
    for each in ENDINGS:
        signal.signal(each, stop)
    mark = os.environ[MARK] = f"gate-{secrets.token_hex(4)}"
    begun_s = time.time()
    try:
        result = verdict(phases(everything))
    finally:
        left = end_marked(mark)
        for line in left:
            print(f"outlived the tests: {line}", flush=True)
        sweep(begun_s)  # of pytest's own processes, if one went down
    minutes = (time.time() - begun_s) / 60
    if everything:
        write_page(result, minutes)
    # The last line is for whoever reads no other.
    print(result)
    return 0 if result.well and not left else 1


if __name__ == "__main__":
    sys.exit(main())
