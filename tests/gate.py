"""Run the tests as ``make test`` and ``make test-all`` do, and report the result.

    python -m tests.gate             the gate: what every change must pass, in minutes
    python -m tests.gate --all       everything, for an hour or two

Tests of pure functions and of jobs run on all cores; those that start ranks follow, one at a time.
What failed runs once more, alone: what passes then is printed as ``flaky: NAME`` and does not fail
the run, but must be mended or leave the gate before anything else is done. Processes that are still
alive at the end are named, ended, and fail the run. ``build/tests`` keeps each test's result and
time, as JUnit XML.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

from qsgd_hpc.launch.supervise import sweep_shared_memory
from tests.processes import MARK, default_interrupts, end_marked

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "build" / "tests"
PAGE = ROOT / "docs" / "tested.md"
PAGE_HEAD = """# What was tested last

`make test-all` runs every test there is: those of the gate, and those that are long, or need root,
system packages or real data ([which is which](../CONTRIBUTING.md#test)). What it said last:
"""
# A worker for a single test at a time, too: if it goes down, pytest-xdist names the test and starts
# another. Three workers on two cores, as jobs mostly wait.
SIDE_BY_SIDE = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
PARTS = {
    "parallel": (*SIDE_BY_SIDE, "-m", "not serial", "--timeout", "300"),
    "serial": ("-n", "1", "-m", "serial"),
}
AGAIN = ("--last-failed", "--last-failed-no-failures", "none", "-n", "1")
# So many failures have one cause: the run ends, and nothing is tried again. A core that hangs would
# otherwise cost each test of it the longest that one may take.
MOST_FAILED = 10
ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # a cancelled CI job, a closed terminal


@dataclass
class Result:
    """What became of the tests."""

    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    """What failed, and passed when it ran once more."""
    broken: bool = False
    """Whether a run ended before its tests did."""

    @property
    def well(self) -> bool:
        """Whether every test ran, and passed at last."""
        return not self.broken and not self.failed

    def __str__(self) -> str:
        return f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"


def run(
    parts: dict[str, Sequence[str]], records: Path, *common: str, most_failed: int = MOST_FAILED
) -> Result:
    """Run tests, and once more what failed.

    Args:
        parts: options of pytest that select what runs, by name; one part after the other.
        records: folder for the results.
        common: more options, for all.
        most_failed: so many failures end the run.
    """
    shutil.rmtree(records, ignore_errors=True)
    result = Result()
    common = (*common, "--maxfail", str(most_failed))
    for name, part in parts.items():
        pytest(name, part, records, common, result)
        if result.broken or len(result.failed) >= most_failed:
            return result
    if first := result.failed:
        pytest("again", AGAIN, records, common, result)
        result.flaky = [test for test in first if test not in result.failed]
    return result


def pytest(
    name: str, part: Sequence[str], records: Path, common: Sequence[str], result: Result
) -> None:
    """Run pytest once, and add to the result."""
    print(f"\n== {name} ==", flush=True)
    report = records / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "--durations=15", *common, *part]
    command += ["--junit-xml", str(report), "-o", f"cache_dir={records}"]
    code = subprocess.run(command, check=False).returncode
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            found = {child.tag for child in case}
            result.skipped += "skipped" in found
            result.passed += not found & {"skipped", "failure", "error"}
    failed = records / "v" / "cache" / "lastfailed"
    result.failed = list(json.loads(failed.read_text())) if failed.exists() else []
    # 1: some failed; but the watchdog of tests/conftest.py ends a run so, too, without a report.
    if code not in (0, 1) or not report.exists():
        result.broken = True
        print(f"the run itself broke off, with exit code {code}", flush=True)


def write_page(result: Result, minutes: float) -> None:
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


def guarded(tests: Callable[[], Result]) -> tuple[Result, bool]:
    """Run tests; then end what they left running, and tell whether that was nothing."""
    default_interrupts()
    for each in ENDINGS:
        signal.signal(each, stop)
    mark = os.environ[MARK] = f"gate-{secrets.token_hex(4)}"
    begun_s = time.time()
    try:
        result = tests()
    finally:
        left = end_marked(mark)
        for line in left:
            print(f"outlived the tests: {line}", flush=True)
        sweep_shared_memory(begun_s)  # of pytest's own processes, if one went down
    return result, not left


def main() -> int:
    """Run the tests; 0: all is well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--all", action="store_true", help="also what is long or needs more than PyPI"
    )
    everything = parser.parse_args().all
    require_environments(os.environ.get("QSGD_TEST_PYTHON", ""))
    os.chdir(ROOT)
    begun_s = time.monotonic()
    some = () if everything else ("--gate",)
    most_failed = 1000 if everything else MOST_FAILED
    result, clean = guarded(lambda: run(PARTS, RECORDS, *some, most_failed=most_failed))
    if everything:
        write_page(result, (time.monotonic() - begun_s) / 60)
    for kind in ("flaky", "failed"):
        for test in getattr(result, kind):
            print(f"{kind}: {test}")
    # The last line is for whoever reads no other.
    print(result)
    return 0 if clean and result.well else 1


if __name__ == "__main__":
    sys.exit(main())
