"""What holds for all tests: who owns processes, how long one may take, what a failure shows."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from qsgd_hpc.launch.shared_memory import sweep
from tests import selection
from tests.processes import (
    MARK,
    OUTCOMES,
    VANISH_S,
    OwnedPopen,
    Owner,
    default_interrupts,
    end_marked,
)

FAILED = pytest.StashKey[bool]()
# pytest-timeout ends a test from within the interpreter; compiled code that never returns to it is
# ended from outside, with the process and the stacks of all its threads.
HARD_LIMIT_MARGIN_S = float(os.environ.get("TESTS_MARGIN_S", "30"))
SHOWN_CHARS = 20_000
# pytest points fd 2 at a file of its own while it loads this file and while a test runs; this is
# the stderr from before.
STDERR = pytest.StashKey[TextIO]()


class OutcomeLog:
    """Appends what becomes of each test as it happens, so that a crash loses nothing."""

    def __init__(self, file: Path) -> None:
        self._stream = file.open("a", encoding="utf-8")

    def _write(self, **entry: str) -> None:
        print(json.dumps(entry), file=self._stream, flush=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, state="begun")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(test=nodeid, state="ended")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(test=report.nodeid, outcome=report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, outcome=report.outcome)

    def pytest_unconfigure(self) -> None:
        self._stream.close()


def pytest_configure(config: pytest.Config) -> None:
    default_interrupts()
    # Whatever is installed on this machine: a test that means a scheduler brings its own.
    os.environ["QSGD_SITE"] = "local"
    # A job that compresses measures its machine once: seconds, of which tests need none.
    os.environ["QSGD_PLANNER"] = "off"
    os.environ[MARK] = os.environ.get(MARK, f"session-{secrets.token_hex(4)}") + "."
    # What frameworks and MPIs leave in the folder for temporary files goes with this one, whose
    # name is short because names of sockets are.
    own = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
    config.add_cleanup(own.cleanup)
    Path(own.name).chmod(0o1777)  # as /tmp: a database runs as a user of its own
    os.environ["TMPDIR"] = own.name
    os.environ["QSGD_HOME"] = str(Path(own.name, "session"))
    config.stash[STDERR] = os.fdopen(os.dup(2), "w")
    config.add_cleanup(config.stash[STDERR].close)
    subprocess.Popen = OwnedPopen  # type: ignore[misc]
    # Not an option: pytest's workers would take its value for the name of a test. And not for the
    # tests that tests run.
    outcomes = os.environ.pop(OUTCOMES, None)
    if outcomes and not hasattr(config, "workerinput"):
        config.pluginmanager.register(OutcomeLog(Path(outcomes)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        selection.mark(item)
    # A test that was renamed must not leave the gate unnoticed. Asked for by name, it is alone.
    lost = selection.unmatched([item.nodeid for item in items])
    if lost and not any("::" in each for each in config.args):
        raise pytest.UsageError(f"tests/selection.py names what no test is called: {lost}")


def _limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    chosen = marker.args[0] if marker else item.config.getoption("timeout")
    return float(chosen or item.config.getini("timeout"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if sys.gettrace() is None:  # under a debugger there is no haste
        limit_s = _limit_s(item) + HARD_LIMIT_MARGIN_S
        faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def owner(request: pytest.FixtureRequest) -> Iterator[Owner | None]:
    """Own every process of this test: set up before all else of it, and torn down after.

    The ranks of a suite are themselves such processes, of the test that has started them.
    """
    if request.config.pluginmanager.hasplugin("tests.ranks"):
        yield None
        return
    before, home = os.environ[MARK], os.environ["QSGD_HOME"]
    token = secrets.token_hex(4)
    mine = Owner(f"{before}{token}", longer=before)
    os.environ[MARK], Owner.current = mine.mark, mine
    os.environ["QSGD_HOME"] = str(Path(home).with_name(token))  # made when it is needed
    began_s = time.time()
    yield mine
    failed = request.node.stash.get(FAILED, False)
    left = mine.end(0 if failed else VANISH_S)
    if request.node.get_closest_marker("serial"):  # else another test's ranks may be at work
        left += [f"shared memory /dev/shm/{name}" for name in sweep(began_s)]
    os.environ[MARK], os.environ["QSGD_HOME"], Owner.current = before, home, None
    if left and not failed:
        pytest.fail("this test left behind:\n" + "\n".join(left), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        report.sections += _printed(item)
    return report


def _printed(item: pytest.Item) -> list[tuple[str, str]]:
    """Return what the processes of a test have printed: to us, and into the logs of its jobs."""
    found = Owner.current.outputs() if Owner.current else []
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    for log in sorted(folder.rglob("*.log")) if isinstance(folder, Path) else ():
        with contextlib.suppress(OSError):
            text = log.read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARS:]
            if text:
                found.append((str(log.relative_to(folder)), text))
    return found


@pytest.hookimpl(trylast=True)  # after the teardown of what a broken-off session had set up
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what fixtures of the whole session have left running, and say so."""
    if hasattr(session.config, "workerinput") or session.config.getoption("numprocesses", None):
        return  # what is marked so are workers; whoever started them looks after them
    for line in end_marked(os.environ[MARK]):
        print(f"outlived the tests: {line}", file=session.config.stash[STDERR], flush=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
